"""Comparing recordings of chosen steps: what is said of the steps that were left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen_runs import STEPS, Between, run, touch
from torch import nn
from trace_toy import record_toy
from traced_models import events, stack, steps_of

import verify
from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.files import file_name, read_folder
from verify.tracing.findings import TraceDiff
from verify.tracing.sentences import sentence
from verify.tracing.timeline import timeline
from verify.tracing.timeline_sides import read_pairs


def test_equal_runs_are_verified_and_the_choice_is_told(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", every=3), run(tmp_path / "b", every=3)
    found = diff(a, b)
    assert (found.verdict, found.reasons) == (Verdict.VERIFIED, ())
    assert found.ranks[0].steps == 3
    assert any(
        note == "recorded by choice: every 3rd step; 3 steps were compared in full, the others "
        "by the state behind them, where it was recorded"
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
        assert Cause.UNRECORDED in {one.cause for one in pictured.events.shown}
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


@pytest.mark.parametrize("number", [3, 4, 5])
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
    border = next(one for one in steps_of(a) if one.number == found.culprit.place.step)
    held = {event.definition.name for event in events(border, "optimizer")}
    assert {"d.weight", "g.weight"} <= held
    assert diff(a, gan(tmp_path / "c", every=every)).verdict is Verdict.VERIFIED
    whole = diff(a, gan(tmp_path / "d"))
    assert (whole.differing, whole.unmatched) == (0, ())


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


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("late", ["input", "probe"])
def test_a_gradient_that_only_one_run_has_is_open(tmp_path: Path, every: int, late: str) -> None:
    """Both made the same choice, so that both saw the same forwards."""
    for name in "ab":
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        with verify.record(tmp_path / name, model, every=every) as recording:
            for number in range(5):
                more = name == "b" and number >= 1
                x = torch.randn(2, 4, requires_grad=more and late == "input")
                noted = torch.ones(2, requires_grad=more and late == "probe")
                (model(x).square().mean() + verify.probe("noted", noted).sum()).backward()
                recording.step()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.verdict is Verdict.UNVERIFIED
    assert {one.side for one in found.unmatched} == {"b"}
    pictured = timeline(found, read_pairs(tmp_path / "a", tmp_path / "b", found))
    assert any("only" in row.states for row in pictured.ranks)


def test_state_that_only_one_run_has_is_open(tmp_path: Path) -> None:
    for name in "ab":
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9 * (name == "b"))
        with verify.record(tmp_path / name, model, optimizer, steps=range(100, 101)):
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                if name == "a":
                    model.zero_grad()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert {(one.side, one.kind) for one in found.unmatched} >= {("b", "optimizer"), ("b", "grad")}


def test_a_generator_that_one_run_saw_drawn_from_is_no_still_one(tmp_path: Path) -> None:
    """At the borders that both have, it is where it was."""
    for name, choice in (("a", {}), ("b", {"every": 3})):
        torch.manual_seed(0)
        model, seed = nn.Linear(4, 4), 1 if name == "a" else 2
        random.seed(seed)
        with verify.record(tmp_path / name, model, **choice) as recording:  # type: ignore[arg-type]
            for number in range(7):
                model(torch.randn(2, 4))
                if number % 3 == 1:
                    random.random()
                if number % 3 == 2:
                    random.seed(seed)
                recording.step()
    for found in (diff(tmp_path / "a", tmp_path / "b"), diff(tmp_path / "b", tmp_path / "a")):
        assert found.verdict is Verdict.MISMATCH
        assert found.culprit is not None
        assert found.culprit.place.name == "python"
        assert timeline(found, read_pairs(Path(found.a), Path(found.b), found)).events is not None


def test_runs_of_which_nothing_was_recorded_in_full_are_not_verified(tmp_path: Path) -> None:
    a, b = (run(tmp_path / name, steps=range(1000, 1010)) for name in "ab")
    assert any("no step was compared in full" in one for one in diff(a, b).reasons)
    c, d = run(tmp_path / "c", every=2), run(tmp_path / "d", steps=range(1, 2))
    assert diff(c, d).verdict is Verdict.UNVERIFIED
    between = diff(c, c, (1, 2))
    assert between.verdict is Verdict.UNVERIFIED
    assert any("; 0 steps were compared in full" in one for one in between.notes)
    assert diff(c, c, (2, 3)).verdict is Verdict.VERIFIED


def test_files_are_compared_and_drawn_as_folders_are(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", touch(4), every=3)
    files = a / file_name(0), b / file_name(0)
    found = diff(*files)
    assert found.culprit is not None
    assert found.culprit.unrecorded == (4, 5)
    assert timeline(found, read_pairs(*files, found)).events is not None


def test_a_run_that_was_killed_says_behind_which_step(tmp_path: Path) -> None:
    record_toy(tmp_path / "a", steps=STEPS, choice=range(0, 100, 3), close=False)
    found = diff(tmp_path / "a", tmp_path / "a")
    assert any("after step 7:" in one for one in found.reasons)
