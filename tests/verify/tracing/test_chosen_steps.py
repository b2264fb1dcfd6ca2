"""Recordings of chosen steps: what is in them, and what comparing them says of the others."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fake_graphs import FakeGraph, capture, use_fake_graphs
from replayed_toys import ordered
from torch import nn
from trace_toy import record_toy
from traced_models import Block, events, stack, steps_of

import verify
from verify.cli import main
from verify.reasons import Verdict
from verify.replaying.orders import Orders
from verify.tracing.causes import Cause
from verify.tracing.choices import STATE
from verify.tracing.definitions import LANES_BYTES, Step
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder
from verify.tracing.findings import TraceDiff
from verify.tracing.sentences import sentence
from verify.tracing.timeline import timeline
from verify.tracing.timeline_sides import read_pairs

STEPS = 8
Between = Callable[[nn.Module, int], None]


def nothing(model: nn.Module, number: int) -> None:
    """Between two steps."""


def run(folder: Path, between: Between = nothing, length: int = STEPS, **choice: Any) -> Path:
    """A training with dropout, which draws, and evaluations, which end no step."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    np.random.seed(1)
    random.seed(1)
    with verify.record(folder, model, optimizer, **choice):
        for number in range(length):
            between(model, number)
            loss = model(torch.randn(2, 5, 8)).square().mean()
            verify.probe("loss", loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def state_of(step: Step) -> dict[Any, bytes]:
    return {
        key: step.lanes[at * LANES_BYTES : (at + 1) * LANES_BYTES]
        for at, key in enumerate(step.program.keys)
        if key[1] in STATE
    }


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("choice", "full", "bare"),
    [
        ({"every": 3}, [0, 3, 6], [2, 5, 7]),
        ({"every": 7}, [0, 7], [6]),
        ({"every": 100}, [0], [7]),
        ({"steps": range(2, 4)}, [2, 3], [1, 7]),
        ({"steps": range(50, 60)}, [], [7]),
        ({"steps": range(8, 60)}, [], [7]),
    ],
)
def test_chosen_steps_are_in_full_and_others_leave_their_state(
    tmp_path: Path, level: str, choice: dict[str, Any], full: list[int], bare: list[int]
) -> None:
    whole = {one.number: one for one in steps_of(run(tmp_path / "whole", level=level))}
    found = {one.number: one for one in steps_of(run(tmp_path / "some", level=level, **choice))}
    assert sorted(found) == sorted([-1, *full, *bare])
    for number in (-1, *full):
        assert found[number].program.keys == whole[number].program.keys
        assert found[number].lanes == whole[number].lanes
    for number in bare:
        assert state_of(found[number]) == state_of(whole[number])
        assert {one.kind for one in found[number].program.definitions} <= {*STATE, "grad"}


def test_a_choice_changes_no_bit_and_is_written(tmp_path: Path) -> None:
    found = []
    for choice in (None, {"every": 3}, {"steps": range(2, 5, 2)}):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        recording: Any = contextlib.nullcontext()
        if choice is not None:
            recording = verify.record(tmp_path, model, overwrite=True, **choice)
        with recording:
            for _ in range(6):
                model(torch.randn(2, 5, 8)).square().mean().backward()
                optimizer.step()
        found.append((str(verify.digest(model.state_dict())), torch.rand(1).item()))
    assert found[0] == found[1] == found[2]
    (one,) = read_folder(tmp_path).values()
    assert one.header.steps == range(2, 5, 2)
    shown = CliRunner().invoke(main, ["trace", "show", str(tmp_path)]).stdout
    assert "steps 2 to 4, each 2nd" in shown


def test_nothing_of_another_step_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of chosen steps only: a step that was not chosen costs no reading."""
    from verify.tracing.queues import DigestQueue

    put, taken = DigestQueue.put, []
    monkeypatch.setattr(
        DigestQueue, "put", lambda queue, *a, **k: (taken.append(len(seen)), put(queue, *a, **k))[1]
    )
    seen: list[int] = []
    run(tmp_path, lambda _, number: seen.append(number), every=3)
    # Steps are counted from 1 here. 8: the state at the end is that of a step not chosen.
    assert set(taken) == {0, 1, 3, 4, 6, 7, 8}
    full, bare = [taken.count(number) for number in (1, 4, 7)], [taken.count(n) for n in (3, 6)]
    assert len(set(full)) == len(set(bare)) == 1
    assert full[0] > bare[0] > taken.count(8)  # without gradients, which are gone


def test_steps_by_hand_are_counted_though_nothing_of_them_is_taken(tmp_path: Path) -> None:
    model = Block()
    with verify.record(tmp_path, model, steps=range(2, 3)) as recording:
        for _ in range(4):
            model(torch.randn(2, 5, 8))
            recording.step()
            recording.step()  # directly behind the end of a step: nothing
        assert recording.number == 4
    assert [one.number for one in steps_of(tmp_path)] == [-1, 1, 2, 3]
    assert events(steps_of(tmp_path)[2], "output")


def test_equal_runs_are_verified_and_the_choice_is_told(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", every=3), run(tmp_path / "b", every=3)
    found = diff(a, b)
    assert (found.verdict, found.reasons) == (Verdict.VERIFIED, ())
    assert found.ranks[0].steps == 3
    assert any(
        note == "recorded by choice: every 3rd step; 3 of 8 steps were compared in full, the "
        "others by the state behind them, where it was recorded"
        for note in found.notes
    )


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("other", [{}, {"every": 2}, {"steps": range(1, 5)}])
def test_runs_of_two_choices_are_compared_in_what_both_have(
    tmp_path: Path, other: dict[str, Any], length: int
) -> None:
    a, b = run(tmp_path / "a", length=length, every=3), run(tmp_path / "b", length=length, **other)
    for found in (diff(a, b), diff(b, a)):
        assert (found.verdict, found.reasons) == (Verdict.VERIFIED, ())
        assert not found.unmatched
        assert found.compared > 0
    assert " in A, " in next(note for note in found.notes if "by choice" in note)


def touch(step: int) -> Between:
    def between(model: nn.Module, number: int) -> None:
        if number == step:
            with torch.no_grad():
                model[1].down.bias[3] += 1e-3

    return between


def said(found: TraceDiff) -> str:
    assert found.culprit is not None
    return sentence(found.culprit, found)


@pytest.mark.parametrize("other", [{"every": 3}, {}, {"every": 2}])
def test_what_came_in_with_steps_between_is_told_of_them(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    a, b = run(tmp_path / "a", every=3), run(tmp_path / "b", touch(4), **other)
    for found in (diff(a, b), diff(b, a)):
        assert found.verdict is Verdict.MISMATCH
        assert found.culprit is not None
        assert (found.culprit.cause, found.culprit.place.step) == (Cause.UNRECORDED, 5)
        assert found.culprit.unrecorded == (4, 5)
        assert found.others == ()
        assert "steps 4 to 5 were not recorded in full" in said(found)
        assert "record both with steps=range(4, 6)" in said(found)
        pictured = timeline(found, read_pairs(Path(found.a), Path(found.b), found))
        assert pictured.events is not None
        assert pictured.events.number == 5
    wide = diff(a, b, (6, 7))
    assert wide.differing
    assert wide.culprit is None  # all of it inherits from before


def test_what_came_in_with_a_chosen_step_is_located_in_it(tmp_path: Path) -> None:
    def fault(model: nn.Module, number: int) -> None:
        if number == 3:
            down: Any = model[1].down  # type: ignore[index]
            down.register_forward_hook(lambda m, given, out: out + 1e-3)

    whole, other = run(tmp_path / "whole"), run(tmp_path / "faulty", fault)
    a, b = run(tmp_path / "a", every=3), run(tmp_path / "b", fault, every=3)
    for found in (diff(a, b), diff(whole, b), diff(a, other)):
        expected = diff(whole, other)
        assert found.culprit is not None
        assert expected.culprit is not None
        assert found.culprit.place.step == 3
        assert found.culprit.cause is expected.culprit.cause is Cause.FORWARD
        assert said(found) == said(expected)


def test_the_state_behind_the_last_step_is_compared(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", every=100), run(tmp_path / "b", touch(7), every=100)
    found = diff(a, b)
    assert found.culprit is not None
    assert found.culprit.unrecorded == (1, 7)


def test_a_chosen_step_that_is_missing_is_missing(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", every=3), run(tmp_path / "b", length=6, every=3)
    for found in (diff(a, b), diff(run(tmp_path / "whole"), b)):
        assert found.verdict is Verdict.UNVERIFIED
        assert any("only A has" in reason for reason in found.reasons)


@pytest.mark.parametrize("number", [3, 4])
def test_an_exception_in_any_step_is_never_verified(tmp_path: Path, number: int) -> None:
    def fail(model: nn.Module, at: int) -> None:
        if at == number:
            model(torch.randn(2, 5, 8))
            raise KeyError("stopped")

    for name in "ab":
        with pytest.raises(KeyError, match="stopped"):
            run(tmp_path / name, fail, every=3)
    (one,) = read_folder(tmp_path / "a").values()
    assert one.cut_at == number
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.verdict is Verdict.UNVERIFIED
    assert sum(f"an exception ended it in step {number}" in one for one in found.reasons) == 2


def test_runs_that_were_killed_before_anything_are_compared(tmp_path: Path) -> None:
    for name in "ab":
        record_toy(tmp_path / name, steps=-1, choice=range(0, 100, 3), close=False)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.verdict is Verdict.UNVERIFIED
    assert found.compared == 0


@pytest.mark.parametrize(
    ("longer", "shorter"),
    [
        ((51, {}), (50, {"every": 100})),
        ((13, {"every": 20}), (5, {"every": 30})),
        ((12, {}), (5, {})),
    ],
)
def test_runs_of_other_lengths_are_never_verified(
    tmp_path: Path, longer: tuple[int, dict[str, Any]], shorter: tuple[int, dict[str, Any]]
) -> None:
    folders = [
        run(tmp_path / name, length=length, **choice)
        for name, (length, choice) in (("a", longer), ("b", shorter))
    ]
    found = diff(folders[0], folders[1])
    assert found.verdict is Verdict.UNVERIFIED
    assert any(one.startswith("only A has step") for one in found.reasons)


def with_scheduler(folder: Path, after: Callable[[nn.Module], None], **choice: Any) -> Path:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with verify.record(folder, model, optimizer, **choice):
        for _ in range(5):
            model(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        after(model)
    return folder


def test_state_behind_the_last_step_is_not_that_at_the_end(tmp_path: Path) -> None:
    """Schedulers and swaps of averages come between them: equal runs are no mismatch."""

    def swap(model: nn.Module) -> None:
        with torch.no_grad():
            model[1].down.bias.zero_()

    whole = with_scheduler(tmp_path / "whole", swap)
    a, b, c = (with_scheduler(tmp_path / name, swap, every=3) for name in "abc")
    found = diff(whole, a)
    assert (found.verdict, found.differing) == (Verdict.UNVERIFIED, 0)
    (left,) = (one for one in found.left if one.open)
    assert "at the end of the recording" in left.reason
    assert timeline(found, read_pairs(whole, a, found)).steps == (-1, 0, 2, 3, 4)
    assert diff(b, c).verdict is Verdict.VERIFIED
    d = with_scheduler(tmp_path / "d", lambda model: None, every=3)
    found = diff(c, d)
    assert found.culprit is not None
    assert found.culprit.unrecorded == (4, 4)
    assert any("at the end of the recording" in hint for hint in found.culprit.hints)


def gan(folder: Path, fault: int | None = None, **choice: Any) -> Path:
    """Two optimizers, found without being named, that step in turn."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"d": nn.Linear(4, 4), "g": nn.Linear(4, 4)})
    optimizers = [torch.optim.AdamW(model[name].parameters(), lr=0.1) for name in "dg"]
    with verify.record(folder, model, **choice):
        for number in range(10):
            name = "dg"[number % 2]
            model[name](torch.randn(2, 4)).square().mean().backward()
            if number == fault:
                model[name].weight.grad *= 1 + 2**-20
            optimizers[number % 2].step()
            model.zero_grad()
    return folder


@pytest.mark.parametrize("fault", [2, 3])
@pytest.mark.parametrize("every", [5, 100])
def test_a_border_has_every_optimizer_that_stepped_since(
    tmp_path: Path, fault: int, every: int
) -> None:
    a, b = gan(tmp_path / "a", every=every), gan(tmp_path / "b", fault, every=every)
    found = diff(a, b)
    assert found.culprit is not None
    assert found.culprit.cause is Cause.UNRECORDED
    assert found.culprit.unrecorded == ((1, 4) if every == 5 else (1, 9))
    assert any(name.startswith("dg"[fault % 2]) for name in found.culprit.names)
    assert diff(a, gan(tmp_path / "c", every=every)).verdict is Verdict.VERIFIED
    whole = diff(a, gan(tmp_path / "d"))
    assert (whole.differing, whole.unmatched) == (0, ())


def test_what_a_step_begins_with_is_the_same_for_all_choices(tmp_path: Path) -> None:
    """Values without a digest begin no step, as they have no event."""
    ends = []
    for name, choice in (("whole", {}), ("some", {"every": 3})):
        torch.manual_seed(0)
        model = Block()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with verify.record(tmp_path / name, model, **choice) as recording:  # type: ignore[arg-type]
            for _ in range(4):
                model(torch.ones(2, 5, 8)).sum().backward()
                optimizer.step()
                verify.probe("lr", 0.1)
                verify.probe("nowhere", torch.ones(1, device="meta"))
                recording.step()
            verify.probe("final", 0.5)
        ends.append(recording.number)
    assert ends == [4, 4]
    found = diff(tmp_path / "whole", tmp_path / "some")
    assert (found.differing, found.unmatched) == (0, ())
    assert all("has no digest, such as probe of nowhere" in one for one in found.reasons)


def accumulated(folder: Path, fault: bool, **choice: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with verify.record(folder, model, **choice) as recording:
        for number in range(7):
            model(torch.randn(2, 4)).square().mean().backward()
            if fault and number == 3:
                assert model.weight.grad is not None
                model.weight.grad[0] += 1
            recording.step()
    return folder


def test_gradients_that_steps_between_left_are_theirs(tmp_path: Path) -> None:
    """Nothing else of the state differs."""
    for choice in ({"steps": range(5, 6)}, {"every": 5}, {"every": 2}):
        a = accumulated(tmp_path / f"a{choice}", False, **choice)
        b = accumulated(tmp_path / f"b{choice}", True, **choice)
        found = diff(a, b)
        assert found.culprit is not None
        assert found.culprit.cause is Cause.UNRECORDED
        assert found.culprit.unrecorded is not None
        assert found.culprit.unrecorded[1] == (3 if choice == {"every": 2} else 4)
        assert found.others == ()


def test_what_is_carried_past_the_state_is_hinted_at(tmp_path: Path) -> None:
    for name in "ab":
        torch.manual_seed(0)
        cell, hidden = nn.GRUCell(4, 4), torch.zeros(2, 4)
        with verify.record(tmp_path / name, cell, every=3) as recording, torch.no_grad():
            for number in range(7):
                hidden = cell(torch.randn(2, 4), hidden) + (number == 4 and name == "b")
                recording.step()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.culprit is not None
    assert (found.culprit.cause, found.culprit.place.step) == (Cause.DATA, 6)
    assert "the step before was not recorded in full" in found.culprit.hints[0]


def test_the_step_of_an_exception_is_that_of_the_run(tmp_path: Path) -> None:
    def fail(model: nn.Module, at: int) -> None:
        if at == 7:
            raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        run(tmp_path / "a", fail, length=12)
    b = run(tmp_path / "b", length=12, every=10)
    found = diff(tmp_path / "a", b)
    assert any("an exception ended it in step 7" in one for one in found.reasons)
    assert not any("an exception" in one for one in diff(tmp_path / "a", b, (None, 5)).reasons)


def test_a_forward_of_another_step_leaves_nothing_open(tmp_path: Path) -> None:
    """A run in full has the gradients; one by choice did not see the forward that they are of."""
    for name, choice in (("whole", {}), ("some", {"every": 2})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ahead = None
        with verify.record(tmp_path / name, model, **choice) as recording:  # type: ignore[arg-type]
            for _ in range(5):
                now, ahead = ahead, verify.probe("ahead", model(torch.randn(2, 4)))
                if now is not None:
                    now.square().mean().backward()
                recording.step()
    found = diff(tmp_path / "whole", tmp_path / "some")
    assert found.verdict is Verdict.VERIFIED, (found.reasons, found.unmatched)
    assert any(one.reason.startswith("forward and backward lie in two") for one in found.left)
    pictured = timeline(found, read_pairs(tmp_path / "whole", tmp_path / "some", found))
    assert pictured.steps[0] == -1


def test_a_harmless_difference_hides_no_step_between(tmp_path: Path) -> None:
    def noted(fault: int | None) -> Between:
        def between(model: nn.Module, number: int) -> None:
            verify.probe("note", torch.full((2,), float(fault or 0)))
            if number == fault:
                touch(number)(model, number)

        return between

    a, b = run(tmp_path / "a", noted(None), every=3), run(tmp_path / "b", noted(4), every=3)
    found = diff(a, b)
    assert found.culprit is not None
    assert found.culprit.place.name == "note"
    assert [one.unrecorded for one in found.others if one.cause is Cause.UNRECORDED] == [(4, 5)]


def test_sums_of_ranks_that_chose_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    record_toy(tmp_path / "one", steps=STEPS)
    for rank in range(2):
        choice = range(0, 100, 2 + rank)
        record_toy(tmp_path / "two", steps=STEPS, rank=rank, world=2, shards=2, choice=choice)
    found = diff(tmp_path / "one", tmp_path / "two")
    assert found.verdict is Verdict.UNVERIFIED
    assert any("the ranks of B recorded other steps in full" in one for one in found.reasons)
    same = diff(tmp_path / "two", tmp_path / "two")
    assert not any("the ranks of" in one for one in same.reasons)


def test_sums_over_ranks_of_chosen_steps(tmp_path: Path) -> None:
    every = range(0, 100, 3)
    record_toy(tmp_path / "one", steps=STEPS, choice=every)
    for rank in range(2):
        record_toy(tmp_path / "two", steps=STEPS, rank=rank, world=2, shards=2)
        record_toy(tmp_path / "some", steps=STEPS, rank=rank, world=2, shards=2, choice=every)
    for other in ("two", "some"):
        found = diff(tmp_path / "one", tmp_path / other)
        assert found.verdict is Verdict.VERIFIED, found.reasons
        assert found.ranks[-1].rank is None
        assert found.ranks[-1].steps == 3
    faulty = record_toy(tmp_path / "faulty", [(4, "optimizer", "head")], steps=STEPS, choice=every)
    found = diff(faulty, tmp_path / "two")
    assert found.culprit is not None
    assert found.culprit.unrecorded == (4, 5)


def test_a_graph_of_another_step_is_recorded_where_it_is_replayed_in_a_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_graphs(monkeypatch)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with verify.record(tmp_path, model, steps=range(2, 4)) as recording:
        graph = FakeGraph()
        with capture(graph):
            out = model(x)
        values = []
        for number in range(5):
            x.fill_(number)
            graph.replay()
            values.append(out.detach().clone())
            recording.step()
    found = {one.number: one for one in steps_of(tmp_path)}
    assert sorted(found) == [-1, 1, 2, 3, 4]
    for number in (2, 3):
        (event,) = events(found[number], "output")
        assert event.digest == verify.digest(values[number])
    for number in (1, 4):
        assert not events(found[number], "output")


@pytest.mark.parametrize(
    ("orders", "full"),
    [
        (Orders(""), [0, 3, 6]),
        (Orders("", states=True), [*range(8)]),  # of `verify replay`, which compares all state
        (Orders("", steps=(2, 5)), [2, 3, 4]),
        (Orders("", states=True, steps=(2, 5)), [2, 3, 4]),
    ],
)
def test_a_tool_that_runs_the_script_again_may_choose_otherwise(
    tmp_path: Path, orders: Orders, full: list[int]
) -> None:
    with ordered(tmp_path / "run", orders):
        run(tmp_path / "unused", every=3)
    found = steps_of(tmp_path / "run")
    assert [one.number for one in found if events(one, "output")] == full
