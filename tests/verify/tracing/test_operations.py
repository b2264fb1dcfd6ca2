"""Recording at the level of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn
from traced_models import events, recorded, stack

from verify.hashing import digest_tensor
from verify.tracing import operations
from verify.tracing.operations import OperationMode
from verify.tracing.sentences import _place_of
from verify.tracing.tensors import Found


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


class Names:
    """Takes what operations are called, and where their tensors are."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[str]]] = []

    def take(self, name: str, kind: str, module: str, found: Iterable[Found]) -> None:
        self.taken.append((name, [path for path, _ in found]))

    def wants(self) -> bool:
        return True

    def pass_over(self, found: Callable[[], Iterable[Found]]) -> None:
        raise AssertionError("all are taken")

    def running_module(self) -> str:
        return "a"


def test_arguments_that_change_are_found_by_place_and_by_name() -> None:
    names, x, out = Names(), torch.ones(2, 2), torch.empty(2, 2)
    with OperationMode(names):
        torch.mm(x, x, out=out)
        torch._foreach_add_([x, x.clone()], 1.0)
        x.view(4)
    assert names.taken == [
        ("a/aten.mm.out", ["changed.out"]),
        ("a/aten.clone.default", [""]),
        ("a/aten._foreach_add_.Scalar", ["changed.self.0", "changed.self.1"]),
    ]


def test_operations_are_known_anew_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_MOST", 2)
    names, x = Names(), torch.ones(2)
    mode = OperationMode(names)
    with mode:
        for _ in range(2):
            x.sin(), x.cos(), x.exp()
    assert len(mode._known) <= 2
    assert [name for name, _ in names.taken] == [f"a/aten.{n}.default" for n in SINES] * 2


SINES = ("sin", "cos", "exp")


@pytest.mark.skipif(not operations._TELLS, reason="torch does not tell, and does it itself")
def test_nothing_of_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """While dynamo looks at each frame, as in what it left to Python; and kept away only then."""
    names, seen, guarded = Names(), [], []
    uncompiled = operations._uncompiled
    monkeypatch.setattr(
        operations, "_uncompiled", lambda *args: guarded.append(1) or uncompiled(*args)
    )

    def look(frame: Any, *_: Any) -> Any:
        seen.append(frame.f_code)
        return ConvertFrameReturn()

    with OperationMode(names):
        x = torch.ones(3)
        before = eval_frame.set_eval_frame(look)
        try:
            x.cos()
        finally:
            eval_frame.set_eval_frame(before)
        x.sin()
    assert [name for name, _ in names.taken] == [
        f"a/aten.{one}.default" for one in ("ones", "cos", "sin")
    ]
    assert not any(code.co_filename == operations.__file__ for code in seen)
    assert guarded == [1]
