"""Whose values a file holds, where that is not what its place on the command line says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from onpolicy_records import dump, kinds, sample

from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump
from verify.onpolicy.sides import assign
from verify.onpolicy.verdicts import judge

IDS = [10, 11, 12, 13]
A = [-0.1, -0.2, -0.3, -0.4]
B = [-0.1, -0.25, -0.3, -0.4]
BOTH = "both files hold the"


def of(side: str, values: list[float] = A, count: int = 1, file: str = "a", **meta: object) -> Dump:
    return dump(*(sample(f"s{n}", IDS, **{side: values}, **meta) for n in range(count)), file=file)


def remedies(pairs: Pairs) -> list[str]:
    return [one.remedy for one in judge(pairs, measure(pairs)).findings]


def test_exchanged_files_are_one_fault_of_each_sample():
    pairs = pair(of(ROLLOUT, count=12), of(TRAINER, B, count=12))
    assert kinds(pairs) == ["exchanged-files"] * 12
    (finding, nothing) = judge(pairs, measure(pairs)).findings
    assert finding.what.startswith("12 samples, first s0: the first file holds the rollout's")
    assert remedies(pairs) == ["exchange the two files: the trainer's comes first, the rollout's"
                               " second"] * 2  # fmt: skip
    assert nothing.reason == "nothing-compared"
    assert not pair(of(TRAINER, B, count=12), of(ROLLOUT, count=12)).misalignments


def test_a_sample_that_lacks_both_sides_is_counted_once():
    lacking = [sample(f"s{n}", IDS) for n in range(3)]
    held = sample("x", IDS, trainer=A, rollout=B)
    pairs = pair(dump(*lacking, held), dump(*lacking, held, file="b"))
    assert judge(pairs, measure(pairs)).findings[0].what.startswith("3 samples, first s0")


@pytest.mark.parametrize(("side", "other"), [(TRAINER, ROLLOUT), (ROLLOUT, TRAINER)])
def test_the_only_file_with_one_side_misses_the_other(side, other):
    pairs = pair(of(side))
    assert kinds(pairs) == ["missing-file"]
    assert f"{side}'s log-probabilities alone: no {other}'s file" in pairs.misalignments[0].what
    assert "give the other side's file too" in remedies(pairs)[0]
    assert not pair(dump(sample("x", IDS, trainer=A, rollout=B))).misalignments


def test_of_two_engines_the_place_says_whose_values_they_are():
    one = of(ROLLOUT, B, rollout_version="7", rollout_rank=2, cached_tokens=1)
    pairs = pair(one, of(ROLLOUT, rollout_version="6"))
    assert pairs.trainer.tolist() == B
    assert pairs.rollout.tolist() == A
    assert any(note.startswith(f"{BOTH} sampler's values; the first") for note in pairs.notes)
    assert dict(pairs.samples[0].trainer.meta) == {
        "trainer_version": "7",
        "rank": 2,
        "cached_tokens": 1,
    }
    assert one.samples[0].meta["rollout_version"] == "7"  # the dump itself is as it was read
    pairs = pair(of(TRAINER, rank=1), of(TRAINER, B, rank=1))
    assert any(note.startswith(f"{BOTH} trainer's values; the second") for note in pairs.notes)
    assert dict(pairs.samples[0].rollout.meta) == {"rollout_rank": 1}


def test_versions_within_a_response_are_none_of_a_trainer():
    pairs = pair(of(ROLLOUT, rollout_version=["1", "1", "2", "2"]), of(ROLLOUT))
    assert "trainer_version" not in pairs.samples[0].trainer.meta


def test_files_that_hold_both_sides_stay_as_they_are():
    full = dump(sample("x", IDS, trainer=A, rollout=B))
    found = assign(full, full)
    assert found.trainer is found.rollout is full
    assert not found.notes
    assert not found.own


def test_a_copy_of_a_file_is_told_of_and_another_file_is_not(tmp_path: Path):
    """Equal values would be taken for agreement of two sides."""
    files = {name: tmp_path / name for name in ("one", "two", "third")}
    for name, content in (("one", b"123"), ("two", b"123"), ("third", b"124")):
        files[name].write_bytes(content)
    ours = replace(of(TRAINER), files=(str(files["one"]),))

    def told(name: str) -> bool:
        theirs = replace(of(ROLLOUT), files=(str(tmp_path / name),))
        return any("equal byte for byte" in note for note in pair(ours, theirs).notes)

    assert told("two")
    assert not told("third")
    assert not told("gone")
    assert not told("one")  # the file itself: `matching` has a fault for that


def test_settings_of_each_side_are_kept_apart_where_the_trainers_file_is_its_own():
    ours = replace(of(TRAINER), config={"temperature": 1.0})
    theirs = replace(of(ROLLOUT), config={"temperature": 0.7})
    pairs = pair(ours, theirs)
    assert {side: dict(held) for side, held in pairs.own.items()} == {
        TRAINER: {"temperature": 1.0},
        ROLLOUT: {"temperature": 0.7},
    }
    full = dump(sample("s0", IDS, trainer=A, rollout=B))
    assert not pair(replace(full, config={"temperature": 1.0}), theirs).own
