"""A fault inside of mok's layer is located to its stage; without one nothing is said."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_block import Block, batch
from torch.utils.checkpoint import checkpoint

import mok.engine
import mok.portable
import verify
from mok.stages import Told
from verify.reasons import Verdict
from verify.tracing.divergence import diff
from verify.tracing.files import read_recording
from verify.tracing.findings import TraceDiff
from verify.tracing.sentences import sentence
from verify.tracing.stages import LayerStages

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


class Beside(Two):
    """Two layers that share their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routes = self.first.route(x)
        return self.first.moe(x, *routes) + self.second.moe(x, *routes)


class Moved(Two):
    """What autograd keeps comes back at another address, as from another device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return super().forward(x)


class Evaluated(Two):
    """The other layer sees the input again, without gradients, before the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        with torch.no_grad():
            self.second(x)
        return self.second(out)


class Shadowed(Two):
    """The other layer sees the input without gradients when the first one's node is the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routes = self.first.route(x)
        out = self.first.moe(x, *routes)
        with torch.no_grad():
            self.second.moe(x, *routes)
        return self.second(out)


class Checkpointed(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=True)
        return x


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


@pytest.mark.parametrize("model", [Two, Beside, Moved, Evaluated, Shadowed, Checkpointed])
@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("steps", [None, range(5)])
def test_a_gradient_is_told_of_the_layer_that_it_is_of(
    model: type[Two], tokens: int, steps: range | None, tmp_path: Path
) -> None:
    made = model()
    with verify.record(tmp_path / "run", made, steps=steps) as recording:
        for _ in range(2):
            out = made(batch(tokens).requires_grad_()).float().square().sum()
            out.backward(retain_graph=True)
            if model is not Checkpointed:  # torch refuses a second one
                out.backward()
    each = ["second.moe", "first.moe"]
    told = layers_of_gradients(recording.path)
    assert told == each * (2 if model is Checkpointed else 4)


def test_threads_that_share_an_input_number_their_nodes_alike(tmp_path: Path) -> None:
    made, x = Two(), batch(6)
    forwards_done = threading.Barrier(2, timeout=60)

    def run(block: Block) -> None:
        out = block(x)
        forwards_done.wait()
        out.float().sum().backward()

    with verify.record(tmp_path / "run", made) as recording:
        threads = [threading.Thread(target=run, args=(one,)) for one in (made.first, made.second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(layers_of_gradients(recording.path)) == ["first.moe", "second.moe"]


@pytest.mark.parametrize("chosen", [False, True])
def test_a_backward_names_no_layer_whose_forward_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    """Another layer may have had its input's address since."""
    made, x = Two(), batch(6)
    with verify.record(tmp_path, made, steps=range(1, 2) if chosen else None) as recording:
        held = made.first(x)
        recording.step()
        with torch.no_grad():
            made.second(x)
        held.float().sum().backward()
    assert layers_of_gradients(recording.path) == ([] if chosen else ["first.moe"])


@pytest.mark.parametrize("left_out", [False, True])
def test_a_node_of_several_layers_is_no_unknown_one(left_out: bool) -> None:
    """As torch.compile makes them; then the address of the input decides, with chosen steps too."""
    taken: list[str] = []

    class Taker:
        def __init__(self) -> None:
            self.running, self.left_out = "first", left_out

        def running_module(self) -> str:
            return self.running

        def take(self, name: str, *_: Any) -> None:
            taken.append(name)

    taker, none = Taker(), torch.empty(0)
    stages = LayerStages(taker)
    for taker.running, owner, node in (("first", 16, 7), ("second", 32, 7), ("third", 48, 8)):
        stages(Told("gate", "", none, False, owner, node))
    taker.running = "(root)"
    for owner, node in ((32, 7), (48, 7), (64, 7), (48, 9)):
        stages(Told("gate", "", none, True, owner, node))
    last = [] if left_out else ["third/mok.gate"]
    assert taken[3:] == ["second/mok.gate", "third/mok.gate", "(root)/mok.gate", *last]


def layers_of_gradients(path: Path) -> list[str]:
    """The layer of each gradient at gate, in order."""
    return [
        one.name.partition("/")[0]
        for step in read_recording(path).steps
        for one in step.program.definitions
        if one.name.endswith("/mok.gate") and one.path == "grad"
    ]


def test_what_is_no_gradient_is_not_called_one(
    right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mok.portable.swiglu_backward

    def fault(*args: Any) -> Any:
        found = plain(*args)
        return dataclasses.replace(found, weighted_hidden=other(found.weighted_hidden))

    monkeypatch.setattr(mok.portable, "swiglu_backward", fault)
    said = words(diff(right, record(tmp_path / "run")))
    assert "backward: stage weighted_hidden of mok's layer in module second.moe" in said


def test_a_probe_that_is_named_like_a_stage_is_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for side, value in (("a", 1.0), ("b", 2.0)):
        with verify.record(tmp_path / side, model):
            verify.probe("first/mok.gate", torch.full((2,), value))
    assert "mok's layer" not in words(diff(tmp_path / "a", tmp_path / "b"))
