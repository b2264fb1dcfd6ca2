"""`verify.record`: what is recorded, when a step ends, and that nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from traced_models import Block, events, recorded, stack, steps_of, train

import verify
from verify import InputFileError, UnsupportedError
from verify.hashing import digest_tensor
from verify.tracing.files import read_folder
from verify.tracing.queues import DigestQueue


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("autocast", [False, True])
def test_recording_changes_no_bit(tmp_path: Path, level: str, autocast: bool) -> None:
    """Parameters, optimizer state and generators afterwards; dropout draws, a change in place."""
    found = []
    for on in (False, True):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        np.random.seed(1)
        random.seed(1)
        recording = verify.record(tmp_path, model, level=level) if on else contextlib.nullcontext()
        with recording, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            train(model, optimizer, 3)
        state = str(verify.digest({"m": model.state_dict(), "o": optimizer.state_dict()["state"]}))
        found.append((state, torch.rand(1).item(), np.random.random(), random.random()))
    assert found[0] == found[1]
    assert len(steps_of(tmp_path)) == 4


def test_a_step_holds_everything_in_order(tmp_path: Path) -> None:
    model = stack(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with verify.record(tmp_path, model, optimizer):
        train(model, optimizer)
    start, first, second = steps_of(tmp_path)
    assert [one.number for one in (start, first, second)] == [-1, 0, 1]
    assert {event.definition.kind for event in start.events} == {
        *("parameter", "buffer", "optimizer", "rng")
    }
    assert first.program is second.program or first.program.keys == second.program.keys
    order = [
        ("(root)", "input", "0"),
        ("0", "input", "0"),
        ("0.attention", "input", "0"),
        ("0.attention", "input", "kwargs.scale"),
        ("0.attention.q", "input", "0"),
        ("0.attention.q", "output", ""),
        ("0.attention", "output", "0"),
        ("0.attention", "output", "1.weights"),
        ("(root)", "output", ""),
        ("(root)", "grad_output", ""),
        ("0.down", "grad_input", "0"),
        ("0.norm", "grad_output", ""),
        ("0.norm", "grad_input", "0"),
        ("0.attention", "grad_output", "0"),
        ("0.attention.q", "grad_output", ""),
        ("0.attention.q.weight", "grad", ""),
        ("0.attention.q.weight", "parameter", ""),
        ("0.calls", "buffer", ""),
        ("0.attention.q.weight", "optimizer", "exp_avg"),
        ("(group 0)", "optimizer", "lr"),
        ("torch", "rng", ""),
        ("numpy", "rng", ""),
        ("python", "rng", ""),
    ]
    keys = [key[:3] for key in first.program.keys]
    places = [keys.index(one) for one in order]
    assert places == sorted(places)
    (weight,) = events(second, "parameter", "0.down.weight")
    assert weight.digest == digest_tensor(model[0].down.weight)
    (lr,) = events(first, "optimizer", "(group 0)")[:1]
    assert lr.definition.dtype == "py_float"
    assert events(first, "input", "0.norm")[0].definition.module == "LayerNorm"


def test_digests_are_those_at_the_time(tmp_path: Path) -> None:
    """What is changed in place later is recorded as it was; `.data` does it past the counter."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Identity(), nn.Linear(64, 64))
    x, seen = torch.randn(64, 64), {}

    def change(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen["before"] = digest_tensor(output)
        output.data.add_(1)
        seen["after"] = digest_tensor(output)

    with verify.record(tmp_path, model) as recording:
        model[1].register_forward_hook(change)  # behind ours
        model(x)
        x.zero_()
    assert recording.path == tmp_path / "rank-00000.trace"
    _, step = steps_of(tmp_path)
    assert events(step, "input", "0")[0].digest != digest_tensor(x)
    assert events(step, "output", "1")[0].digest == seen["before"] != seen["after"]
    assert events(step, "input", "2")[0].digest == seen["after"]


def test_gradients_are_the_modules_own(tmp_path: Path) -> None:
    """Each reader of a shared input has what it contributes; they add up to the whole."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    x = torch.randn(2, 3, requires_grad=True)
    up = torch.randn(2, 3)

    def call() -> None:
        y = x * 1
        ((model["a"](y) + model["b"](y)) * up).sum().backward()

    step = recorded(tmp_path, model, call)
    for name in ("a", "b"):
        (output,) = events(step, "grad_output", name)
        assert output.digest == digest_tensor(up)
        (given,) = events(step, "grad_input", name)
        assert given.digest == digest_tensor(up @ model[name].weight.detach())
    grads = {event.definition.name: event.digest for event in events(step, "grad")}
    assert grads["a.weight"] == digest_tensor(model["a"].weight.grad)


def test_without_an_optimizer_the_block_is_one_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    step = recorded(tmp_path, model, lambda: [model(torch.ones(1, 2)) for _ in range(3)])
    assert step.number == 0
    assert [event.occurrence for event in events(step, "output")] == [0, 1, 2]
    assert events(step, "parameter")


def test_borders(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    a, b = (torch.optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) for name in "ab")
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    def both(by_hand: bool = False) -> None:
        for name, optimizer in (("a", a), ("b", b)):
            model[name](torch.ones(1, 2)).sum().backward()
            model[name](torch.ones(1, 2)).sum().backward()  # accumulates
            optimizer.step()
            if by_hand:
                recording.step()
        other.step()

    with verify.record(tmp_path / "each", model) as recording:
        both(by_hand=True)  # directly behind a border, which adds none
    _, first, second = steps_of(tmp_path / "each")
    assert [one.definition.name for one in events(first, "grad")] == ["a.weight", "a.bias"]
    assert len(events(first, "output")) == len(events(second, "output")) == 2
    with verify.record(tmp_path / "last", model, [a, b]):
        both()
    _, only = steps_of(tmp_path / "last")
    assert len(events(only, "grad")) == 4
    assert len(events(only, "output")) == 4
    with verify.record(tmp_path / "hand", model) as recording:
        model["a"](torch.ones(1, 2))
        recording.step()
        model["b"](torch.ones(1, 2))
        model["b"](torch.ones(1, 2))
    assert [len(events(one, "output")) for one in steps_of(tmp_path / "hand")] == [0, 1, 2]


def test_exceptions_leave_a_step_marked_as_failed(tmp_path: Path) -> None:
    model = stack(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def call() -> None:
        with verify.record(tmp_path, model):
            train(model, optimizer, 1)
            model(torch.randn(2, 5, 8))
            raise ZeroDivisionError("by hand")

    with pytest.raises(ZeroDivisionError):
        call()
    (found,) = read_folder(tmp_path).values()
    assert found.complete
    assert found.reason == "ZeroDivisionError: by hand"
    assert [one.failed for one in found.steps] == [False, False, True]
    assert events(found.steps[2], "output", "(root)")
    assert not events(found.steps[2], "parameter")


def test_afterwards_nothing_is_left(tmp_path: Path) -> None:
    model = stack(1)
    with verify.record(tmp_path, model):
        out = model(torch.randn(2, 5, 8)).sum()
    size = (tmp_path / "rank-00000.trace").stat().st_size
    out.backward()  # its hooks are there, and silent
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert (tmp_path / "rank-00000.trace").stat().st_size == size


def test_refusals(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with verify.record(tmp_path, model):
        pass
    with pytest.raises(InputFileError, match="overwrite=True"), verify.record(tmp_path, model):
        pass
    with verify.record(tmp_path, model, overwrite=True):
        inner = verify.record(tmp_path / "b", model)
        with pytest.raises(UnsupportedError, match="a recording is under way"), inner:
            pass
    for arguments, told in (
        ((model, None, "tensor"), "level is 'tensor'; allowed are module and op"),
        (
            (torch.ones(1), None, "module"),
            r"takes a folder and then a torch\.nn\.Module, not a PosixPath and then a Tensor",
        ),
        ((model, "adam", "module"), "optimizer is a"),
    ):
        given, optimizer, level = arguments
        refused = verify.record(tmp_path / "c", given, optimizer, level=level)
        with pytest.raises(UnsupportedError, match=told), refused:
            pass


def test_probes(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    assert verify.probe("outside", x) is x
    model = nn.Linear(3, 3)

    def call() -> None:
        y = verify.probe("y", {"a": x * 2, "rest": [torch.zeros(2), "text"]})
        assert verify.probe("text", "text") == "text"
        model(y["a"]).sum().backward()

    step = recorded(tmp_path, model, call)
    paths = [event.definition.path for event in events(step, "probe", "y")]
    assert paths == ["a", "rest.0", "a.grad"]
    assert events(step, "probe", "y")[0].digest == digest_tensor(torch.full((3,), 2.0))


def test_what_has_no_digest_is_told(tmp_path: Path) -> None:
    model = nn.Identity()
    recorded(tmp_path, model, lambda: model(torch.eye(2).to_sparse()))
    (found,) = read_folder(tmp_path).values()
    assert set(found.skipped) == {"input of (root) 0", "output of (root)"}
    assert "layout torch.sparse_coo" in found.skipped["output of (root)"]


def test_shared_modules_and_leaves_as_outputs(tmp_path: Path) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.same = nn.Linear(2, 2)
            self.table = nn.ParameterList([nn.Parameter(torch.ones(2, 2))])
            self.gives = Gives(self.table[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(self.same(x)) @ self.gives()

    class Gives(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self) -> torch.Tensor:
            return self.weight

    model = Shares()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with verify.record(tmp_path, model, optimizer):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    for step in steps_of(tmp_path)[1:]:
        assert [one.occurrence for one in events(step, "output", "one")] == [0, 1]
        assert not events(step, "output", "same")
        assert len(events(step, "grad_output", "gives")) == 1  # not one more with every step
    assert not model.gives.weight._backward_hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_modules_again(tmp_path: Path, reentrant: bool) -> None:
    states = []
    for on in (False, True):
        block = stack(1)
        x = torch.randn(2, 5, 8, requires_grad=True)
        recording = verify.record(tmp_path, block) if on else contextlib.nullcontext()
        with recording:
            for _ in range(2):  # what early stopping leaves behind must not disturb the next call
                torch.utils.checkpoint.checkpoint(
                    block, x, use_reentrant=reentrant
                ).sum().backward()
        states.append(str(verify.digest({n: p.grad for n, p in block.named_parameters()})))
    assert states[0] == states[1]
    _, step = steps_of(tmp_path)
    queries = events(step, "output", "0.attention.q")
    assert [one.occurrence for one in queries] == [0, 1, 2, 3]
    assert len({one.digest for one in queries}) == 1
    assert len(events(step, "grad_output", "0.attention.q")) == 2
    assert len(events(step, "grad_input", "0.attention.q")) == 2


def test_the_fast_path_of_transformer_layers_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    step = recorded(tmp_path, layer, lambda: torch.no_grad()(layer)(x))
    assert {one.definition.name for one in events(step, "output")} == {"(root)"}
    slow = recorded(tmp_path / "train", layer.train(), lambda: layer(x))
    assert "self_attn" in {one.definition.name for one in events(slow, "output")}


def test_a_model_can_be_copied_pickled_and_mapped_meanwhile(tmp_path: Path) -> None:
    model = stack(1)
    with verify.record(tmp_path, model):
        copied = copy.deepcopy(model)
        copied(torch.randn(2, 5, 8))  # another model: no events
        torch.save(model, io.BytesIO())
        torch.func.vmap(model[0].norm)(torch.randn(3, 2, 8))
        torch.jit.trace(model[0].norm, torch.ones(2, 8), check_trace=False)
        model[0].norm(torch.ones(2, 8))
    (found,) = read_folder(tmp_path).values()
    assert "no digest inside vmap" in found.skipped["output of 0.norm"]
    (only,) = events(found.steps[1], "output")
    assert only.definition.name == "0.norm"


def test_a_fault_is_seen_where_it_is(tmp_path: Path) -> None:
    """One module's output differs from equal inputs; what runs before it is equal."""

    class Faulty(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            out.view(-1)[0] += 1
            return out

    found = []
    for kind in (Block, Faulty):
        model = stack(3)
        model[1].__class__ = kind
        torch.manual_seed(3)
        x = torch.randn(2, 5, 8)
        found.append(recorded(tmp_path / kind.__name__, model, lambda m=model, x=x: m(x)))
    pairs = zip(*(one.events for one in found), strict=True)
    first = next(one.definition for one, other in pairs if one.digest != other.digest)
    assert (first.name, first.kind) == ("1", "output")


def test_exchanged_arguments_are_named(tmp_path: Path) -> None:
    said = "takes a folder and then a torch.nn.Module, not a Linear and then a str"
    with pytest.raises(UnsupportedError, match=said), verify.record(nn.Linear(2, 2), str(tmp_path)):
        pass


def test_digests_are_taken_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a digest computes joins the program's graph; the mode is put back after."""
    seen: list[bool] = []
    put = DigestQueue.put

    def noted(queue: DigestQueue, *args: Any, **kwargs: Any) -> None:
        seen.append(torch.is_grad_enabled())
        put(queue, *args, **kwargs)

    monkeypatch.setattr(DigestQueue, "put", noted)
    model = stack(1)
    with verify.record(tmp_path, model, level="op") as recording:
        for _ in range(2):
            model(torch.randn(2, 5, 8)).square().mean().backward()
            assert torch.is_grad_enabled()
        with torch.no_grad():
            model(torch.randn(2, 5, 8))
            assert not torch.is_grad_enabled()
        recording.step()
    assert len(seen) > 50
    assert not any(seen)
