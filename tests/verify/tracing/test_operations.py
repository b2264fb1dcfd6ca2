"""Recording at the level of operations."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from traced_models import events, recorded, stack

from verify.hashing import digest_tensor
from verify.tracing.sentences import _place_of


def test_operations_are_named_after_their_module(tmp_path: Path) -> None:
    model = stack(1)
    x = torch.randn(2, 5, 8)

    def call() -> None:
        model(x).sum().backward()

    step = recorded(tmp_path, model, call, level="op")
    names = {event.definition.name for event in events(step, "output")}
    assert {"0.attention.q/aten.addmm.default", "0.attention/aten._softmax.default"} <= names
    assert "0.norm/aten.native_layer_norm.default" in names
    assert any(one.startswith("(backward AddmmBackward0)/aten.mm") for one in names)
    assert not any("empty" in one or "aten.view" in one or "aten.t." in one for one in names)
    assert {"0.attention.q", "(root)"} <= names  # modules are there as well
    changed = events(step, "output", "0.feed.1/aten.relu_.default")
    assert [one.definition.path for one in changed] == ["changed.self"]


def test_an_operation_has_the_digest_of_its_result(tmp_path: Path) -> None:
    model = nn.Identity()
    x = torch.ones(3)

    def call() -> None:
        model(x)
        x.add_(1)
        torch.empty(5)
        x[1:].mul_(2)

    step = recorded(tmp_path, model, call, level="op")
    (added,) = events(step, "output", "(root)/aten.add_.Tensor")
    assert added.digest == digest_tensor(torch.full((3,), 2.0))
    (multiplied,) = events(step, "output", "(root)/aten.mul_.Tensor")
    assert multiplied.digest == digest_tensor(torch.full((2,), 4.0))
    assert not [one for one in events(step, "output") if "empty" in one.definition.name]


def test_memory_that_is_put_under_a_tensor_is_not_read_before_it_is_filled(tmp_path: Path) -> None:
    """deepcopy makes a tensor of no elements, puts memory under it, and only then copies."""
    model = nn.Linear(64, 64)
    step = recorded(tmp_path, model, lambda: copy.deepcopy(model.state_dict()), level="op")
    assert not any("set_" in event.definition.name for event in events(step, "output"))


@pytest.mark.parametrize(
    ("owner", "told"),
    [("(root)", "the model"), ("0.a", "module 0.a"), ("(backward Mul)", "backward operation Mul")],
)
def test_where_an_operation_ran_is_told(owner: str, told: str) -> None:
    assert _place_of(owner) == told
