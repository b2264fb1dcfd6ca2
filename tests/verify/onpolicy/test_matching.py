"""Which records belong together where keys repeat, and that no list is compared with itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onpolicy_records import both, dump, kinds, sample

from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.misalignments import KINDS
from verify.onpolicy.pairing import ONE_SOURCE, Pairs, pair
from verify.onpolicy.samples import ROLLOUT, TRAINER

A = [-0.1, -0.2]
B = [-0.1, -0.25]
GROUP = [[5, 6], [5, 7], [8, 9]]


def written(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def files(trainer: Path, rollout: Path) -> Pairs:
    return pair(read_dump(trainer, TRAINER), read_dump(rollout, ROLLOUT))


def test_responses_under_the_id_of_their_prompt_are_paired_by_token_ids():
    ours = dump(*(sample("p", ids, trainer=A, place=f"line {ids[1]}") for ids in GROUP))
    theirs = dump(*(sample("p", ids, rollout=B) for ids in reversed(GROUP)), file="b.jsonl")
    pairs = pair(ours, theirs)
    assert not pairs.misalignments
    assert [one.key for one in pairs.samples] == ["p (line 6)", "p (line 7)", "p (line 9)"]
    assert pairs.token.tolist() == [5, 6, 5, 7, 8, 9]
    assert any("told apart by token ids" in note for note in pairs.notes)


def test_of_one_file_each_record_that_holds_both_sides_is_its_own_counterpart():
    same = [sample("p", [5, 6], trainer=A, rollout=B, place=f"line {n}") for n in (1, 2)]
    pairs = both(*same)
    assert not pairs.misalignments
    assert [one.trainer is one.rollout for one in pairs.samples] == [True, True]


@pytest.mark.parametrize("ids", [[[5, 6], [5, 6]], [None, [5, 6]]])
def test_what_token_ids_do_not_tell_apart_is_not_guessed_at(ids):
    ours = dump(*(sample("p", one, trainer=A) for one in [*ids, [7, 7]]))
    theirs = dump(*(sample("p", one, rollout=A) for one in [*ids, [7, 7]]), file="b.jsonl")
    pairs = pair(ours, theirs)
    assert set(kinds(pairs)) <= {"duplicate-key", "no-token-ids"}
    assert pairs.token.tolist() == ([7, 7] if ids[0] else [5, 6, 7, 7])


def test_one_response_of_a_group_with_other_tokens_is_named_as_that():
    ours = dump(*(sample("p", ids, trainer=A) for ids in GROUP))
    changed = [*GROUP[:2], [8, 8]]
    pairs = pair(ours, dump(*(sample("p", ids, rollout=A) for ids in changed), file="b.jsonl"))
    assert kinds(pairs) == ["other-tokens"]
    assert len(pairs.samples) == 2


@pytest.mark.parametrize("how", ["same", "link", "hard"])
def test_a_list_is_not_compared_with_itself(tmp_path, how):
    """It would be equal in every bit, and prove nothing."""
    first = written(tmp_path / "a.jsonl", {"id": 1, "response_ids": [5, 6], "logprobs": A})
    second = tmp_path / "b.jsonl"
    if how == "link":
        second.symlink_to(first)
    elif how == "hard":
        second.hardlink_to(first)
    pairs = files(first, first if how == "same" else second)
    assert kinds(pairs) == ["one-list"]
    assert not pairs.scored.any()


def test_a_file_with_both_names_may_be_given_twice_and_a_copy_is_another_file(tmp_path):
    record = {"id": 1, "response_ids": [5, 6], "sampler_logprobs": A, "trainer_logprobs": B}
    named = written(tmp_path / "a.jsonl", record)
    assert not files(named, named).misalignments
    one = {"id": 1, "response_ids": [5, 6], "logprobs": A}
    first, second = (written(tmp_path / name, one) for name in ("b.jsonl", "c.jsonl"))
    assert not files(first, second).misalignments


RESPONSES = [[n, 5, 6, 7] for n in range(6)]


def moved(by: int, responses: list[list[int]] = RESPONSES) -> Pairs:
    """Ids of the trainer's file that are larger by so much."""
    values = [-0.5] * len(responses[0])
    ours = dump(*(sample(str(n + by), ids, trainer=values) for n, ids in enumerate(responses)))
    theirs = [sample(str(n), ids, rollout=values) for n, ids in enumerate(responses)]
    return pair(ours, dump(*theirs, file="b.jsonl"))


@pytest.mark.parametrize(("by", "way"), [(1, "1 record further up"), (-2, "2 records further on")])
def test_ids_that_are_moved_are_named_with_their_place(by, way):
    """Once the remedy was not to decode and encode, which nobody had done."""
    found = [one for one in moved(by).misalignments if one.kind != "missing-sample"]
    assert {one.kind for one in found} == {"other-id"}
    assert len(found) == 6 - abs(by)
    key = found[0].key
    assert f"has the trainer's response {key} under the id {int(key) - by}" in found[0].what
    assert f"({way}, as {len(found)} responses are)" in found[0].what
    assert "join" in KINDS["other-id"].remedy


def test_other_tokens_that_no_other_id_has_stay_that():
    changed = [*RESPONSES[:2], [9, 9, 9, 9]]
    ours = dump(*(sample(str(n), ids, trainer=[-0.5] * 4) for n, ids in enumerate(changed)))
    theirs = [sample(str(n), ids, rollout=[-0.5] * 4) for n, ids in enumerate(RESPONSES)]
    assert kinds(pair(ours, dump(*theirs, file="b.jsonl")))[0] == "other-tokens"
    # too short to be told, and the same response of several ids
    assert {*kinds(moved(1, [[n, 5] for n in range(4)]))} == {"other-tokens", "missing-sample"}
    twice = [[1, 1, 1, 1], [2, 2, 2, 2]] * 2
    assert {*kinds(moved(1, twice))} == {"other-tokens", "missing-sample"}


def test_equal_values_of_one_file_come_with_a_word_on_what_they_prove():
    assert ONE_SOURCE in both(sample("x", [5, 6], trainer=A, rollout=A)).notes
    assert ONE_SOURCE not in both(sample("x", [5, 6], trainer=A, rollout=B)).notes
    two = pair(dump(sample("x", [5, 6], trainer=A)), dump(sample("x", [5, 6], rollout=A)))
    assert ONE_SOURCE not in two.notes


def test_steps_in_a_folder_may_use_the_same_ids(tmp_path):
    for side, values in (("trainer", A), ("rollout", B)):
        (tmp_path / side).mkdir()
        for step, ids in enumerate(GROUP):
            record = {"id": 0, "response_ids": ids, "logprobs": values}
            written(tmp_path / side / f"step_{step}.jsonl", record)
    pairs = files(tmp_path / "trainer", tmp_path / "rollout")
    assert not pairs.misalignments
    assert pairs.token.tolist() == [5, 6, 5, 7, 8, 9]
    assert len({one.key for one in pairs.samples}) == 3


def test_a_record_that_cannot_be_read_does_not_shift_those_without_ids(tmp_path):
    records = [{"response_ids": ids, "logprobs": A} for ids in GROUP]
    whole = written(tmp_path / "a.jsonl", {"onpolicy": 1}, *records)
    lines = [json.dumps(record) for record in records]
    broken = tmp_path / "b.jsonl"
    broken.write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n", encoding="utf-8")
    pairs = files(whole, broken)
    assert kinds(pairs) == ["missing-sample"]
    assert [one.key for one in pairs.samples] == ["record 1", "record 3"]
