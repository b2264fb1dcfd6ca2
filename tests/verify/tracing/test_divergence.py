"""Comparing whole recordings: ranks, what is missing, other forms, and when it is not VERIFIED."""

from __future__ import annotations

import pytest
from trace_toy import header, record_toy, write_step

from verify.errors import InputFileError
from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, file_name


def record(folder, *steps, world=1, rank=0, **fields):
    """Steps of (name, kind, path, value) from number 0 on."""
    writer = TraceWriter(folder, header(rank, world, **fields))
    for number, entries in enumerate(steps):
        write_step(writer, number, entries)
    writer.close()
    return folder


def module(name, value="x"):
    return [(name, "input", "0", value), (name, "output", "", f"{name}({value})")]


def test_equal_recordings_are_verified(tmp_path):
    found = diff(record_toy(tmp_path / "a"), record_toy(tmp_path / "b"))
    assert found.verdict is Verdict.VERIFIED
    assert (found.differing, found.culprit, found.reasons, found.notes) == (0, None, (), ())
    assert found.compared == 15 + 3 * 65
    assert found.ranks[0].steps == 3


def test_the_earliest_rank_is_to_blame_and_others_may_have_it_from_there(tmp_path):
    for rank in range(3):
        record_toy(tmp_path / "a", rank=rank, world=3)
        faults = {0: [(1, "forward", "head")], 1: [(0, "loss", "")], 2: []}[rank]
        record_toy(tmp_path / "b", faults, rank=rank, world=3)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.culprit.place.rank, found.culprit.cause) == (1, Cause.LOSS)
    assert not found.culprit.collective
    (other,) = found.others
    assert (other.place.rank, other.names, other.collective) == (0, ("head",), True)
    assert [one.cause for one in found.ranks] == [Cause.FORWARD, Cause.LOSS, None]
    assert [one.first is None for one in found.ranks] == [False, False, True]


def test_events_of_one_run_only_are_not_verified_and_not_a_mismatch(tmp_path):
    a = record(tmp_path / "a", module("m") + module("n"))
    b = record(tmp_path / "b", module("m") + module("new") + module("n"))
    found = diff(a, b)
    assert (found.verdict, found.differing) == (Verdict.UNVERIFIED, 0)
    assert "2 events have no partner" in found.reasons[0]
    assert [(one.side, one.name) for one in found.unmatched] == [("b", "new"), ("b", "new")]
    assert (found.ranks[0].only_a, found.ranks[0].only_b) == (0, 2)
    turned = diff(b, a)
    assert (turned.ranks[0].only_a, turned.ranks[0].only_b) == (2, 0)


def test_another_order_is_told_and_changes_nothing(tmp_path):
    a = record(tmp_path / "a", module("m") + module("n"))
    b = record(tmp_path / "b", module("n") + module("m"))
    found = diff(a, b)
    assert (found.verdict, found.ranks[0].moved) == (Verdict.VERIFIED, 2)


def test_a_difference_counts_also_beside_events_without_a_partner(tmp_path):
    a = record(tmp_path / "a", module("m") + module("n", "y"))
    b = record(tmp_path / "b", module("extra") + module("m") + module("n", "z"))
    found = diff(a, b)
    assert found.verdict is Verdict.MISMATCH
    assert found.culprit.names == ("n",)


def test_another_dtype_is_a_finding_of_its_own(tmp_path):
    a = record_toy(tmp_path / "a")
    b = record_toy(tmp_path / "b", dtypes={"head.weight": "bfloat16"})
    found = diff(a, b)
    assert found.verdict is Verdict.MISMATCH
    assert found.culprit.cause is Cause.START
    assert found.culprit.place.difference == "dtype"
    stored = {(one.kind, one.a, one.b, one.first_step, one.steps) for one in found.forms}
    assert ("parameter", "float32[4,6]", "bfloat16[4,6]", -1, 4) in stored
    assert ("grad", "float32[4,6]", "bfloat16[4,6]", 0, 3) in stored
    assert found.forms_count == len(found.forms) == 3


def test_another_shape_is_a_finding_of_its_own(tmp_path):
    for side, shape in (("a", (2, 3)), ("b", (3, 2))):
        writer = TraceWriter(tmp_path / side, header())
        writer.step(0, [writer.define("m", "output", "", "float32", shape)], bytes(32))
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [one.difference for one in found.forms] == ["shape"]
    assert found.verdict is Verdict.MISMATCH


def test_a_killed_run_is_not_verified_but_a_difference_in_it_counts(tmp_path):
    whole = record_toy(tmp_path / "a")
    killed = record_toy(tmp_path / "b", close=False)
    found = diff(whole, killed)
    assert (found.verdict, found.differing) == (Verdict.UNVERIFIED, 0)
    assert found.reasons[0].startswith("B, rank 0 is incomplete: ")
    other = record_toy(tmp_path / "c", [(0, "loss", "")], close=False)
    assert diff(other, whole).verdict is Verdict.MISMATCH


def test_steps_and_ranks_of_one_run_only(tmp_path):
    long, short = record_toy(tmp_path / "a", steps=4), record_toy(tmp_path / "b", steps=2)
    found = diff(long, short)
    assert found.verdict is Verdict.UNVERIFIED
    assert found.reasons == ("only A has steps 2, 3",)
    assert diff(long, short, (None, 2)).verdict is Verdict.VERIFIED
    for side, ranks in (("c", (0, 1)), ("d", (0,))):
        for rank in ranks:
            record_toy(tmp_path / side, rank=rank, world=2)
    found = diff(tmp_path / "c", tmp_path / "d")
    assert found.verdict is Verdict.UNVERIFIED
    assert f"{tmp_path / 'd'} lacks 1 of 2 ranks: 1" in found.reasons


def test_nothing_in_common_is_not_verified(tmp_path):
    a, b = record(tmp_path / "a", module("m")), record(tmp_path / "b", module("n"))
    found = diff(a, b)
    assert (found.verdict, found.compared) == (Verdict.UNVERIFIED, 0)
    assert found.reasons[-1] == "nothing was compared"
    empty = diff(record(tmp_path / "c"), record(tmp_path / "d"))
    assert (empty.verdict, empty.reasons) == (Verdict.UNVERIFIED, ("nothing was compared",))


def test_other_schemes_are_not_compared(tmp_path, monkeypatch):
    from verify.tracing import divergence

    a, b = record_toy(tmp_path / "a"), record_toy(tmp_path / "b")
    real = divergence.read_folder

    def read(path):
        from dataclasses import replace

        run = real(path)
        if path == a:
            return run
        return {
            rank: replace(one, header=replace(one.header, scheme="other-v9"))
            for rank, one in run.items()
        }

    monkeypatch.setattr(divergence, "read_folder", read)
    found = diff(a, b)
    assert (found.verdict, found.compared) == (Verdict.UNVERIFIED, 0)
    assert "digests differ in kind: lanes4x64-v1 and other-v9" in found.reasons


def test_files_of_ranks(tmp_path):
    for rank in range(2):
        record_toy(tmp_path / "a", [(0, "loss", "")] if rank else [], rank=rank, world=2)
        record_toy(tmp_path / "b", rank=rank, world=2)
    files = [tmp_path / "a" / file_name(rank) for rank in range(2)]
    assert diff(files[0], tmp_path / "b" / file_name(0)).verdict is Verdict.VERIFIED
    assert diff(files[1], tmp_path / "b" / file_name(1)).culprit.place.rank == 1
    between = diff(files[0], files[1])  # two ranks of one run
    assert between.culprit.cause is Cause.LOSS
    one = diff(files[0], tmp_path / "b")
    assert (one.verdict, len(one.ranks)) == (Verdict.VERIFIED, 1)
    (tmp_path / "b" / file_name(1)).unlink()
    assert diff(files[1], tmp_path / "b").reasons[0] == f"{tmp_path / 'b'} has no rank 1"


def test_files_of_several_runs_in_one_folder_are_refused(tmp_path):
    record_toy(tmp_path / "a", rank=0, world=1)
    record_toy(tmp_path / "a", rank=1, world=2)
    with pytest.raises(InputFileError, match="of several runs, on 1 and 2 ranks"):
        diff(tmp_path / "a", tmp_path / "a")
    with pytest.raises(InputFileError, match="no such"):
        diff(tmp_path / "none", tmp_path / "a")


def test_ops_that_one_run_recorded_are_left_out(tmp_path):
    a = record(tmp_path / "a", module("m"))
    ops = [*module("m"), ("m/aten.mm", "output", "0", "y")]
    b = record(tmp_path / "b", ops, level="op")
    found = diff(a, b)
    assert (found.verdict, found.unmatched) == (Verdict.VERIFIED, ())
    assert [(one.events, one.open) for one in found.left] == [(1, False)]
    same = record(tmp_path / "c", module("m"), level="op")
    assert diff(same, b).verdict is Verdict.UNVERIFIED


def test_environments_are_compared_and_an_early_end_is_told(tmp_path):
    sides = (("a", "2.11", "1"), ("b", "2.13", "2"))
    a, b = (
        record_toy(
            tmp_path / side,
            environment={"torch": torch, "variables": {"TORCHELASTIC_RUN_ID": run, "OMP": "1"}},
        )
        for side, torch, run in sides
    )
    assert diff(a, b).notes == ("environment.torch: 2.11 in A, 2.13 in B",)
    raised(tmp_path / "c", module("m"))
    found = diff(tmp_path / "c", tmp_path / "c", (None, 0))  # the exception came behind these
    assert found.notes == (
        "A, rank 0 ended early: RuntimeError: lost",
        "B, rank 0 ended early: RuntimeError: lost",
    )


def raised(folder, *steps, cut=None):
    """A run that an exception ended: behind its whole steps, or within `cut`."""
    writer = TraceWriter(folder, header())
    for number, entries in enumerate(steps):
        write_step(writer, number, entries)
    if cut is not None:
        write_step(writer, len(steps), cut, failed=True)
    writer.close("RuntimeError: lost")
    return folder


def test_runs_that_an_exception_ended_are_like_killed_ones(tmp_path):
    a, b = (raised(tmp_path / side, module("m"), cut=module("m")) for side in "ab")
    found = diff(a, b)
    assert (found.verdict, found.differing, found.compared) == (Verdict.UNVERIFIED, 0, 4)
    assert found.reasons == tuple(
        f"{side}, rank 0 is incomplete: an exception ended it in step 1: RuntimeError: lost"
        for side in "AB"
    )
    assert (found.notes, found.left) == ((), ())
    behind = raised(tmp_path / "c", module("m"))  # nothing of step 1 was recorded
    assert "ended it in step 1: " in diff(behind, behind).reasons[0]
    whole = record(tmp_path / "d", module("m"))
    for sides in ((whole, behind), (behind, whole)):
        assert diff(*sides).verdict is Verdict.UNVERIFIED
        assert diff(*sides, (None, 1)).verdict is Verdict.VERIFIED
    assert diff(whole, whole).verdict is Verdict.VERIFIED
    other = raised(tmp_path / "e", module("m"), cut=module("m", "y"))
    assert diff(a, other).verdict is Verdict.MISMATCH  # what both have counts


def test_a_cut_step_is_compared_as_far_as_it_came(tmp_path):
    whole = record(tmp_path / "a", module("m") + module("n") + module("o"))
    cut = raised(tmp_path / "b", cut=module("m") + module("n")[:1])
    for sides in ((whole, cut), (cut, whole)):
        found = diff(*sides)
        assert (found.verdict, found.compared, found.unmatched) == (Verdict.UNVERIFIED, 3, ())
        (left,) = found.left
        assert (left.open, left.events) == (False, 3)
        assert left.reason == "an exception ended the other run's step before"
        assert len(found.reasons) == 1
    more = raised(tmp_path / "c", cut=module("extra") + module("m"))  # a part of the cut run only
    assert [one.name for one in diff(whole, more).unmatched] == ["extra", "extra"]


def test_long_lists_are_cut_and_counted(tmp_path):
    names = [f"m{number}" for number in range(60)]
    sides = []
    for side, mark in (("a", ""), ("b", "!")):
        entries = [(name, "buffer", "", name + mark) for name in names]
        only = [(f"{side}{name}", "probe", "", name) for name in names]
        sides.append(record(tmp_path / side, [], entries + only))
    found = diff(*sides)
    assert (len(found.unmatched), found.unmatched_count) == (20, 120)
    assert len(found.others) + len(found.inherits) <= 40
    assert found.differing == 60
