"""What comes in a recording's way: Ctrl-C, a full disk, forked processes, exceptions in a forward,
and values without digests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from traced_models import events, recorded, steps_of

import verify
from verify import InputFileError
from verify.hashing import digest_tensor
from verify.reasons import Verdict
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, read_folder

X = torch.ones(2, 4)


def net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(X).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("caught", [False, True])
def test_an_interrupt_in_the_midst_of_a_digest(
    caught: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = net()
    define, calls = TraceWriter.define, 0

    def interrupted(self: TraceWriter, *args: object, **kwargs: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return define(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TraceWriter, "define", interrupted)
    try:
        with verify.record(tmp_path, model, optimizer):
            try:
                train(model, optimizer)
            except KeyboardInterrupt:
                if not caught:
                    raise
                train(model, optimizer)
    except KeyboardInterrupt:
        assert not caught
    (found,) = read_folder(tmp_path).values()
    assert found.complete
    assert found.reason == ("finished" if caught else "KeyboardInterrupt: ")
    assert [step.failed for step in found.steps] == [False, not caught]
    for one in events(found.steps[1], "input", "0"):  # each digest is still at its own entry
        assert one.digest == digest_tensor(X)
    if caught:
        (weight,) = events(found.steps[1], "parameter", "2.weight")
        assert weight.digest == digest_tensor(model[2].weight)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_and_leaves_what_was_written(tmp_path: Path) -> None:
    model, optimizer = net()
    recording = verify.record(tmp_path, model, optimizer)

    def fill() -> None:
        with recording as recorder:
            train(model, optimizer)
            recorder._writer._file.close()
            recorder._writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
            train(model, optimizer)

    with pytest.raises(InputFileError, match=r"rank-00000\.trace: cannot write: No space left"):
        fill()
    (found,) = read_folder(tmp_path).values()
    assert not found.complete
    assert [step.number for step in found.steps] == [-1, 0]
    train(model, optimizer)  # no hook is left


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_nothing_into_its_parents_recording(tmp_path: Path) -> None:
    model, optimizer = net()
    child = -1
    try:
        with verify.record(tmp_path / "a", model, optimizer) as recorder:
            train(model, optimizer)
            child = os.fork()
            if not child:
                train(model, optimizer)
                recorder.step()
                verify.probe("x", X)
        if not child:
            with verify.record(tmp_path / "child", model, optimizer):
                train(model, optimizer)
    finally:
        if not child:
            os._exit(0)
    os.waitpid(child, 0)
    (found,) = read_folder(tmp_path / "a").values()
    assert found.complete
    assert [step.number for step in found.steps] == [-1, 0]
    assert len(steps_of(tmp_path / "child")) == 2


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        if self.fails:
            raise RuntimeError("out of memory")
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def test_calls_that_an_exception_ends_are_not_kept(tmp_path: Path) -> None:
    """They would hold their graphs; checkpointing ends its second forward by an exception."""
    fails, checkpointed = Fails(), Checkpointed()
    model = nn.Sequential(checkpointed, fails)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with verify.record(tmp_path, model, optimizer) as recorder:
        for step in range(4):
            fails.fails = step % 2 == 1
            try:
                train(model, optimizer)
            except RuntimeError:
                assert fails.fails
            assert recorder.running_module() == "(root)"
            assert not recorder.hooks._begun()
    gradients = events(steps_of(tmp_path)[1], "grad_input", "1.inner")
    assert len(gradients) == 1


@pytest.mark.parametrize("steps", [0, 2])
def test_training_that_raised_is_never_verified(tmp_path: Path, steps: int) -> None:
    def loses(folder: Path, seed: int) -> None:
        model, optimizer = net()
        torch.manual_seed(seed)  # another state of the generator, from which nothing draws
        with verify.record(folder, model, optimizer):
            train(model, optimizer, steps)
            model(X)
            raise ArithmeticError("lost")

    for seed, side in enumerate("ab"):
        with pytest.raises(ArithmeticError, match="lost"):
            loses(tmp_path / side, seed)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.differing) == (Verdict.UNVERIFIED, 0)
    assert found.reasons == tuple(
        f"{side}, rank 0 is incomplete: an exception ended it in step {steps}: "
        "ArithmeticError: lost"
        for side in "AB"
    )
    until = (None, steps)  # before the step that was cut
    assert diff(tmp_path / "a", tmp_path / "b", until).verdict is Verdict.VERIFIED


def test_a_value_without_a_digest_keeps_from_verified(tmp_path: Path) -> None:
    for name in "ab":
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with verify.record(tmp_path / name, model, optimizer):
            model(torch.tensor([1, 1])).sum().backward()
            optimizer.step()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.verdict is Verdict.UNVERIFIED
    assert not found.differing
    assert found.reasons[0].startswith(
        "A, rank 0: 1 value has no digest, such as grad of weight: no digest of a tensor of layout"
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("level", ["module", "op"])
def test_nested_tensors_do_not_end_the_run(
    layout: torch.layout, level: str, tmp_path: Path
) -> None:
    model = nn.Identity()
    with verify.record(tmp_path, model, level=level):
        model(torch.nested.nested_tensor([X, X[:1]], layout=layout))
    (found,) = read_folder(tmp_path).values()
    assert found.skipped["output of (root)"].startswith("no digest of a nested tensor")


def test_a_parameter_without_a_value_yet_lacks_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    step = recorded(tmp_path, model, lambda: model(X))
    assert len(events(step, "parameter")) == 2
    (found,) = read_folder(tmp_path).values()
    assert not found.skipped


def test_a_workspace_is_no_event_of_an_operation(tmp_path: Path) -> None:
    """Of an LSTM on a CPU the fourth output is memory that holds anything."""
    model = nn.LSTM(4, 4)
    with verify.record(tmp_path, model, level="op"):
        model(torch.ones(3, 2, 4))
    (step,) = steps_of(tmp_path)[1:]
    paths = [
        one.definition.path
        for one in events(step, "output")
        if "mkldnn_rnn_layer" in one.definition.name
    ]
    assert paths in (["0", "1", "2"], [])  # nothing where torch has no oneDNN


class Left(nn.Module):
    """Ctrl-C leaves its inner module, behind which no hook runs then, and is caught here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(KeyboardInterrupt):
            self.inner(x)
        return torch.sin(x) * 2


def test_a_call_that_an_interrupt_left_is_not_taken_for_its_caller(tmp_path: Path) -> None:
    """The call around it ends as itself, so that what follows is no module's."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = nn.Sequential(Left())
    with verify.record(tmp_path, model, level="op") as recording:
        left = model[0].inner.register_forward_pre_hook(interrupt)
        try:
            y = model(X.clone().requires_grad_())
        finally:
            left.remove()
        assert recording.hooks.idle()
        torch.cos(y.detach())
    steps = steps_of(tmp_path)
    names = {event.definition.name for event in steps[-1].events}
    assert "(root)/aten.cos.default" in names
    assert not any(name.startswith("0/aten.cos") for name in names)
