"""What a recorder does under orders: it keeps tensors as they were, begins steps with the state
that they find, and stops where nothing is lost; and nothing of it without orders."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from replayed_toys import Training, ordered
from torch import nn
from traced_models import events

import verify
from verify import InputFileError, UnsupportedError
from verify.hashing import digest_tensor
from verify.replaying.borders import States, found_state
from verify.replaying.orders import BEFORE, STOPPED, Orders, Stopped
from verify.tracing import keeping
from verify.tracing.definitions import KINDS, START
from verify.tracing.files import read_folder
from verify.tracing.keeping import kept_tensors, narrow_dtype

X = torch.arange(8.0).view(2, 4)


def net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, out: str = "run"
) -> None:
    with verify.record(out, model, optimizer):
        for step in range(steps):
            optimizer.zero_grad()
            model(X + step).sum().backward()
            optimizer.step()


def test_kept_tensors_are_what_was_digested(tmp_path: Path) -> None:
    keys = [
        (None, 1, "0", "input", "0", 0),
        (0, 1, "2", "output", "", 0),
        (0, 1, "0.weight", "grad", "", 0),
        (0, START, "0.weight", "parameter", "", 0),
        (0, 0, "2.weight", "optimizer", "momentum_buffer", 0),
        (0, 2, "torch", "rng", "", 0),
        (0, 1, "0", "input", "0", 7),  # never comes
        (1, 1, "0", "output", "", 0),  # of another rank
        (0, 9, "0", "output", "", 0),
    ]
    with ordered(tmp_path / "run", Orders("", keep=tuple(keys))):
        train(*net(), out=str(tmp_path / "unused"))
    assert not (tmp_path / "unused").exists()
    (recording,) = read_folder(tmp_path / "run").values()
    steps = {step.number: step for step in recording.steps}
    found = 0
    for number in (START, 0, 1, 2):
        kept, left = kept_tensors(tmp_path / "run", 0, number)
        assert not left
        for key, tensor in kept.items():
            (event,) = [one for one in steps[number].events if one.key == key]
            assert digest_tensor(tensor) == event.digest, key
            found += 1
    assert found == 6
    assert kept_tensors(tmp_path / "run", 0, 9) == ({}, {})
    assert not list((tmp_path / "run").glob("*.partial"))
    kept, _ = kept_tensors(tmp_path / "run", 0, 1)
    assert torch.equal(kept["0", "input", "0", 0], X + 1)


def test_each_call_of_a_module_is_told_apart(tmp_path: Path) -> None:
    model, optimizer = net()
    with (
        ordered(tmp_path / "run", Orders("", keep=((0, 0, "0", "output", "", 1),))),
        verify.record("run", model, optimizer),
    ):
        model[0](X)
        expected = model[0](X + 1)
        model[0](X + 2)
        model[2](X).sum().backward()
        optimizer.step()
    kept, _ = kept_tensors(tmp_path / "run", 0, 0)
    assert list(kept) == [("0", "output", "", 1)]
    assert torch.equal(kept["0", "output", "", 1], expected)


def test_a_later_change_in_place_is_not_kept(tmp_path: Path) -> None:
    model, optimizer = net()
    with (
        ordered(tmp_path / "run", Orders("", keep=((0, 0, "x", "probe", "", 0),))),
        verify.record("run", model, optimizer),
    ):
        x = verify.probe("x", X.clone())
        x.add_(1)
        model(x).sum().backward()
        optimizer.step()
    kept, _ = kept_tensors(tmp_path / "run", 0, 0)
    assert torch.equal(kept["x", "probe", "", 0], X)


def test_what_cannot_be_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST_BYTES", 100)
    wanted = (
        (0, 0, "big", "probe", "", 0),
        (0, 0, "odd", "probe", "", 0),
        (0, 0, "ok", "probe", "", 0),
    )
    model, optimizer = net()
    with ordered(tmp_path / "run", Orders("", keep=wanted)), verify.record("run", model, optimizer):
        verify.probe("big", torch.zeros(1000))
        verify.probe("odd", torch.zeros(2, dtype=torch.complex128))
        verify.probe("ok", X)
        model(X).sum().backward()
        optimizer.step()
    kept, left = kept_tensors(tmp_path / "run", 0, 0)
    assert list(kept) == [("ok", "probe", "", 0)]
    assert left["big", "probe", "", 0].startswith("more than")
    assert "complex128" in left["odd", "probe", "", 0] or "Error" in left["odd", "probe", "", 0]


def test_the_first_that_is_wanted_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The culprit, though what it was made of comes before it."""
    monkeypatch.setattr(keeping, "MOST_BYTES", X.nbytes)
    keys = [(name, "probe", "", 0) for name in ("culprit", "given", "also given")]
    model, optimizer = net()
    orders = Orders("", keep=tuple((0, 0, *key) for key in keys))
    with ordered(tmp_path / "run", orders), verify.record("run", model, optimizer):
        for name, *_ in reversed(keys):
            verify.probe(name, X)
        model(X).sum().backward()
        optimizer.step()
    kept, left = kept_tensors(tmp_path / "run", 0, 0)
    assert set(kept) == {keys[0], keys[2]}
    assert set(left) == {keys[1]}


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    orders = Orders("", keep=((0, 0, "x", "probe", "", 0),))
    with ordered(tmp_path / "run", orders):
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(InputFileError, match=r"step-0\.safetensors: cannot write: No space"):
            _probes_and_steps()
    assert not list((tmp_path / "run").glob("*.partial"))


def _probes_and_steps() -> None:
    model, optimizer = net()
    with verify.record("run", model, optimizer):
        verify.probe("x", X)
        model(X).sum().backward()
        optimizer.step()


def test_a_stop_comes_before_weights_change(tmp_path: Path) -> None:
    model, optimizer = net()
    between = []
    with ordered(tmp_path / "run", Orders("", 2)), verify.record("run", model, optimizer):
        for step in range(5):
            between.append([one.detach().clone() for one in model.parameters()])
            model(X + step).sum().backward()
            optimizer.step()
    assert len(between) == 3  # the script came as far as its third optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(between[2], model.parameters(), strict=True))
    (recording,) = read_folder(tmp_path / "run").values()
    assert recording.complete
    assert recording.reason == f"{STOPPED}: after 2 steps, as ordered"
    assert [(step.number, step.failed) for step in recording.steps] == [
        *((number, False) for number in (START, 0, 1)),
        (2, True),
    ]


def test_steps_marked_by_hand_and_no_step_at_all_stop_too(tmp_path: Path) -> None:
    model, optimizer = net()
    made = []
    with ordered(tmp_path / "hand", Orders("", 1)), verify.record("run", model) as recording:
        for step in range(3):
            model(X)
            recording.step()
            made.append(step)
    assert made == [0]
    with ordered(tmp_path / "none", Orders("", 0)):
        train(model, optimizer)
    (found,) = read_folder(tmp_path / "none").values()
    assert [step.number for step in found.steps if not step.failed] == [START]


def test_a_stop_ends_a_script_as_an_exit_would() -> None:
    with pytest.raises(SystemExit) as caught:
        raise Stopped(3)
    assert caught.value.code == 0
    assert not isinstance(caught.value, Exception)


def test_steps_begin_with_the_state_that_they_find(tmp_path: Path) -> None:
    model, optimizer = net()
    found = []
    with (
        ordered(tmp_path / "run", Orders("", states=True)),
        verify.record("run", model),  # the optimizer is found by itself
    ):
        for step in range(3):
            found.append(digest_tensor(model[0].weight))
            optimizer.zero_grad()
            model(X + step).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)  # behind the border, as an average would
            optimizer.param_groups[0]["lr"] *= 0.5
    (recording,) = read_folder(tmp_path / "run").values()
    states = States(recording)
    assert ("0.weight", "parameter", "", 0) in states.start
    assert ("(group 0)", "optimizer", "lr", 0) in states.start
    rates = [states.opening(number)["(group 0)", "optimizer", "lr", 0] for number in range(3)]
    assert len(set(rates)) == 3
    assert rates[0] == states.start["(group 0)", "optimizer", "lr", 0]
    for number, digest in enumerate(found):
        (event,) = [
            one
            for one in states.steps[number].events
            if found_state(one.definition) == ("0.weight", "parameter", "")
        ]
        assert event.digest == digest
    assert ("0.weight", "optimizer", "momentum_buffer", 0) in states.opening(1)
    program = states.steps[1].program
    first = next(i for i, one in enumerate(program.definitions) if one.kind == "input")
    before = [found_state(one) for one in program.definitions[:first]]
    assert None not in before
    assert ("torch", "rng", "") in before
    assert [found_state(one) for one in program.definitions[first:]] == [None] * (
        len(program.definitions) - first
    )


def test_only_what_is_ordered_is_recorded_besides(tmp_path: Path) -> None:
    train(*net(), out=str(tmp_path / "plain"))
    with ordered(tmp_path / "kept", Orders("", keep=((0, 0, "0", "output", "", 0),))):
        train(*net())
    (plain,) = read_folder(tmp_path / "plain").values()
    (kept,) = read_folder(tmp_path / "kept").values()
    assert plain.steps == kept.steps
    assert not any(BEFORE in one.path for one in plain.steps[1].program.definitions)
    assert all(events(plain.steps[1], kind, "0") for kind in ("input", "output"))
    assert "probe" in KINDS


def test_orders_change_no_bit_of_a_run(tmp_path: Path) -> None:
    weights = []
    orders = Orders("", states=True, narrow=True, keep=((0, 1, "0", "output", "", 0),))
    for number in range(2):
        training = Training()
        if number:
            with ordered(tmp_path / "run", orders):
                training.run()
        else:
            training.run(out=str(tmp_path / "plain"))
        assert training.saved is not None
        weights.append([*training.saved["model"].values(), training.saved["rng"]])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_second_recording_in_one_run_is_refused(tmp_path: Path) -> None:
    with ordered(tmp_path / "run", Orders("")):
        train(*net())
        with pytest.raises(UnsupportedError, match="a second recording in one run"):
            train(*net(), out=str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([0.1, 0.2, 0.3, 0.7]).bfloat16().float(), "bfloat16"),
        (torch.tensor([0.1, 0.2, 0.3, 1000.1]).half().double(), "float16"),
        (torch.tensor([0.1, 0.2, 0.3, 0.7]), ""),
        (torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64).float().double(), ""),
        (torch.arange(8.0), ""),  # integers
        (torch.full((8,), 1.5), ""),  # a constant
        (torch.tensor([0.5, 0.25, 0.75]), ""),  # few
        (torch.tensor([0.5, 0.25, 0.75, float("nan")]), ""),
        (torch.arange(8), ""),
        (torch.rand(8).bfloat16(), ""),  # narrow by itself
    ],
)
def test_narrow_values(values: torch.Tensor, dtype: str) -> None:
    assert narrow_dtype(values) == dtype
