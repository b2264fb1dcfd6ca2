"""A fault inside of mok's layer is located to its stage; without one nothing is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_block import Block, batch

import mok.engine
import mok.portable
import verify
from verify.reasons import Verdict
from verify.tracing.divergence import diff
from verify.tracing.findings import TraceDiff
from verify.tracing.sentences import sentence

Fault = Callable[[pytest.MonkeyPatch], None]


def other(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with one element moved."""
    changed = tensor.clone()
    changed.view(-1)[0] += 0.5
    return changed


def changes(module: Any, name: str, change: Callable[[Any], Any] = other) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: change(right(*args)))

    return plant


def up_of(gradients: Any) -> Any:
    return dataclasses.replace(gradients, d_up=other(gradients.d_up))


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "dispatch": (changes(mok.engine, "dispatch"), "forward: stage dispatched", "first.moe"),
    "activation": (changes(mok.portable, "swiglu"), "forward: stage hidden", "first.moe"),
    "give back": (changes(mok.engine, "give_back"), "forward: stage route_output", "first.moe"),
    "combine": (changes(mok.engine, "combine"), "forward: stage combined", "first.moe"),
    "activation's backward": (
        changes(mok.portable, "swiglu_backward", up_of),
        "backward: the gradient at stage up",
        "second.moe",
    ),
    "weight gradients": (
        changes(mok.portable, "_weight_gradients", lambda found: [*found[:2], other(found[2])]),
        "backward: the gradient at stage w_down",
        "second.moe",
    ),
}


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block(seed=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def record(folder: Path, steps: int = 1) -> Path:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with verify.record(folder, model):
        for number in range(steps):
            optimizer.zero_grad()
            model(batch(24, seed=number)).float().square().mean().backward()
            optimizer.step()
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("right") / "run")


def words(found: TraceDiff) -> str:
    assert found.culprit is not None
    return sentence(found.culprit, found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_located_to_its_stage(
    name: str, right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, stage, module = FAULTS[name]
    fault(monkeypatch)
    found = diff(right, record(tmp_path / "run"))
    assert found.verdict is Verdict.MISMATCH
    said = words(found)
    assert f"{stage} of mok's layer in module {module} (MoE) differs" in said
    assert "all recorded before it in that call is equal" in said


def test_without_a_fault_nothing_is_said(right: Path, tmp_path: Path) -> None:
    found = diff(right, record(tmp_path / "run"))
    assert (found.verdict, found.culprit) == (Verdict.VERIFIED, None)


def test_a_fault_outside_of_the_layer_is_not_blamed_on_a_stage(
    right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = Block.route
    monkeypatch.setattr(
        Block, "route", lambda block, x: (route(block, x)[0], route(block, x)[1] * 2)
    )
    assert "mok's layer" not in words(diff(right, record(tmp_path / "run")))
