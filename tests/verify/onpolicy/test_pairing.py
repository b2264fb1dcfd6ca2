"""What belongs together is paired by key and token id; what does not is reported and not scored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_records import both, dump, kinds, lists, sample

from verify.onpolicy.misalignments import KINDS
from verify.onpolicy.pairing import pair
from verify.onpolicy.samples import Routing, Sample

IDS = [5, 6, 7, 8]
A = [-0.1, -0.2, -0.3, -0.4]
B = [-0.1, -0.25, -0.3, -0.5]


def two(trainer: Sample, rollout: Sample):
    return pair(dump(trainer), dump(rollout, file="b.jsonl"))


def test_two_files_are_joined_by_id_in_the_order_of_the_trainers():
    first = dump(sample("x", IDS, trainer=A), sample("y", IDS[:2], trainer=A[:2]))
    second = dump(sample("y", IDS[:2], rollout=B[:2]), sample("x", IDS, rollout=B))
    pairs = pair(first, second)
    assert [one.key for one in pairs.samples] == ["x", "y"]
    assert pairs.misalignments == ()
    assert pairs.sample.tolist() == [0, 0, 0, 0, 1, 1]
    assert pairs.position.tolist() == [0, 1, 2, 3, 0, 1]
    assert pairs.token.tolist() == [*IDS, *IDS[:2]]
    assert pairs.trainer.tolist() == [*A, *A[:2]]
    assert pairs.rollout.tolist() == [*B, *B[:2]]
    assert pairs.counted.all()
    assert pairs.present.all()
    assert [(one.start, one.stop) for one in pairs.samples] == [(0, 4), (4, 6)]
    np.testing.assert_array_equal(pairs.difference, pairs.trainer - pairs.rollout)


def test_one_file_may_hold_both_sides_in_one_record_or_in_two():
    one = both(sample("x", IDS, trainer=A, rollout=B))
    apart = both(sample("x", IDS, trainer=A), sample("x", IDS, rollout=B, place="line 2"))
    for pairs in (one, apart):
        assert pairs.rollout.tolist() == B
        assert pairs.trainer.tolist() == A
        assert not pairs.misalignments
    assert one.samples[0].trainer is one.samples[0].rollout


def test_an_id_that_occurs_twice_is_not_guessed_at():
    first = dump(sample("x", IDS, trainer=A), sample("x", IDS, trainer=B, place="line 2"))
    pairs = pair(first, dump(sample("x", IDS, rollout=B, place="line 9")))
    assert kinds(pairs) == ["duplicate-key"]
    assert len(pairs.misalignments[0].places) == 3
    assert pairs.samples == ()
    assert len(pairs.trainer) == 0


def test_a_sample_of_one_file_only_is_named_and_the_rest_is_compared():
    first = dump(sample("x", IDS, trainer=A), sample("only-a", IDS, trainer=A))
    second = dump(sample("x", IDS, rollout=B), sample("only-b", IDS, rollout=B), file="b.jsonl")
    pairs = pair(first, second)
    assert [(one.kind, one.key) for one in pairs.misalignments] == [
        ("missing-sample", "only-a"),
        ("missing-sample", "only-b"),
    ]
    assert "rollout (b.jsonl)" in pairs.misalignments[0].what
    assert [one.key for one in pairs.samples] == ["x"]


def test_files_given_in_the_other_order_are_recognised():
    pairs = pair(dump(sample("x", IDS, rollout=B)), dump(sample("x", IDS, trainer=A)))
    assert kinds(pairs) == ["exchanged-files"]
    assert not pairs.samples
    right = pair(dump(sample("x", IDS, trainer=A)), dump(sample("x", IDS, rollout=B)))
    assert not right.notes
    assert not right.misalignments


def test_a_record_without_one_side_says_what_it_has():
    full = sample("y", IDS, trainer=A, rollout=B)
    pairs = both(sample("x", IDS, trainer=A), sample("none", IDS), full)
    assert {one.kind for one in pairs.misalignments} == {"no-logprobs"}
    assert "rollout" in pairs.misalignments[0].what
    assert [one.key for one in pairs.samples] == ["y"]


@pytest.mark.parametrize(
    ("ours", "theirs"), [([2, 3, 6], [0, 1, 3, 6]), ([2, 1, 3, 6], [0, 1, 3, 6])]
)
def test_retokenised_text_is_other_tokens(ours, theirs):
    """BUG-45"""
    text = "hello world"
    pairs = two(
        sample("x", ours, trainer=[-0.5] * len(ours), text=text),
        sample("x", theirs, rollout=[-0.4] * 4, text=text),
    )
    assert kinds(pairs) == ["other-tokens"]
    assert "differ from position 0" in pairs.misalignments[0].what
    assert "the text is the same" in pairs.misalignments[0].what
    assert len(pairs.trainer) == 0


def test_ids_that_lack_the_first_token_are_named():
    pairs = two(sample("x", IDS[1:], trainer=A[1:]), sample("x", IDS, rollout=B))
    assert "without the first 1" in pairs.misalignments[0].what


def test_without_ids_lists_of_two_records_are_not_paired():
    pairs = two(sample("x", None, trainer=A), sample("x", IDS, rollout=B))
    assert kinds(pairs) == ["no-token-ids"]
    assert not pairs.samples


def test_without_ids_one_record_is_its_own_word():
    pairs = both(sample("x", None, trainer=A, rollout=B))
    assert pairs.token.tolist() == [-1] * 4
    assert pairs.samples[0].tokens is None
    assert any("its own word" in note for note in pairs.notes)
    short = both(sample("x", None, trainer=A, rollout=B[:3]))
    assert kinds(short) == ["length"]


def test_values_that_both_records_carry_stand_for_ids():
    carried = sample("x", None, trainer=A, rollout=B)
    pairs = two(carried, sample("x", IDS, rollout=B))
    assert pairs.token.tolist() == IDS
    assert any("value for value" in note for note in pairs.notes)
    other = two(carried, sample("x", IDS, rollout=[*B[:3], -0.51]))
    assert kinds(other) == ["no-token-ids"]
    constant = [-1.0] * 4  # equal lists of one number prove nothing
    flat = two(sample("x", None, trainer=A, rollout=constant), sample("x", IDS, rollout=constant))
    assert kinds(flat) == ["no-token-ids"]


def test_one_token_more_at_the_end_is_named_and_the_rest_compared():
    """BUG-49"""
    more = [*IDS, 2]
    pairs = two(
        sample("x", more, trainer=[*A, -4.6], eos_token_ids=[2, 3]), sample("x", IDS, rollout=B)
    )
    assert kinds(pairs) == ["end-token"]
    assert "trainer has 1 token more, id 2 = EOS" in pairs.misalignments[0].what
    assert pairs.trainer.tolist() == A
    assert (
        "(EOS?)"
        in two(sample("x", IDS, trainer=A), sample("x", more, rollout=[*B, 0.0]))
        .misalignments[0]
        .what
    )


def test_a_truncated_response_is_compared_as_far_as_it_goes():
    pairs = two(sample("x", IDS[:2], trainer=A[:2]), sample("x", IDS, rollout=B))
    assert kinds(pairs) == ["truncated"]
    assert "the rollout has 2 tokens more" in pairs.misalignments[0].what
    assert pairs.rollout.tolist() == B[:2]


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_list_longer_or_shorter_than_its_tokens_is_not_scored(extra):
    """BUG-50"""
    ids = list(range(12))
    values = [-0.1 * one for one in range(1, 13 + extra)]
    pairs = both(sample("x", ids, trainer=[-0.1] * 12, rollout=values))
    assert kinds(pairs) == ["length"]
    assert f"ids 12, log-probabilities {12 + extra}" in pairs.misalignments[0].what
    assert ("stop token?" in pairs.misalignments[0].what) == (extra == 1)
    assert len(pairs.trainer) == 0


@pytest.mark.parametrize("dropped", ["first", "last"])
def test_the_end_at_which_a_list_was_cut_is_told_in_numbers(dropped):
    """BUG-37"""
    rng = np.random.default_rng(3)
    values = (-3 * rng.random(20)).tolist()
    kept = values[1:] if dropped == "first" else values[:-1]
    what = both(sample("x", range(20), trainer=kept, rollout=values)).misalignments[0].what
    assert "ids 20, log-probabilities 19: 1 too few" in what
    assert f"without its {dropped} leaves mean |d| 0 (n=19)" in what


def test_too_few_values_tell_no_end():
    what = both(sample("x", range(4), trainer=A[1:], rollout=A)).misalignments[0].what
    assert "leaves mean" not in what


@pytest.mark.parametrize("first", [None, 0.0, float("nan")])
def test_a_list_that_covers_the_prompt_is_cut_in_front(first):
    """BUG-52"""
    longer = [first, -2.0, -3.0, *B]
    pairs = both(sample("x", IDS, prompt=[1, 2, 3], trainer=A, rollout=longer))
    assert not pairs.misalignments
    assert pairs.rollout.tolist() == B
    assert any("covers prompt and response" in note for note in pairs.notes)


def test_a_list_that_covers_the_prompt_and_begins_with_a_number_may_be_shifted():
    pairs = both(sample("x", IDS, prompt=[1, 2, 3], trainer=A, rollout=[-1.0, -2.0, -3.0, *B]))
    assert kinds(pairs) == ["prompt-included"]
    assert len(pairs.trainer) == 0


def test_a_stop_token_trimmed_from_ids_only():
    """BUG-52"""
    pairs = both(sample("x", range(9), trainer=[-0.5] * 9, rollout=[-0.5] * 10))
    assert kinds(pairs) == ["length"]
    assert "1 too many (stop token?)" in pairs.misalignments[0].what


@pytest.mark.parametrize("prompt", [None, [1, 2]])
@pytest.mark.parametrize("values", [A, [None, -1.0, *A]])
def test_ids_that_cover_prompt_and_response(prompt, values):
    pairs = two(
        sample("x", [1, 2, *IDS], prompt=prompt, trainer=values, mask=[0, 0, 1, 0, 1, 1]),
        sample("x", IDS, prompt=[1, 2], rollout=B),
    )
    assert not pairs.misalignments
    assert pairs.trainer.tolist() == A
    assert pairs.token.tolist() == IDS
    assert pairs.counted.tolist() == [True, False, True, True]
    assert any("token ids cover prompt and response" in note for note in pairs.notes)


def test_ids_that_begin_with_something_else_than_the_prompt_are_other_tokens():
    pairs = two(sample("x", [1, 9, *IDS], trainer=A), sample("x", IDS, prompt=[1, 2], rollout=B))
    assert kinds(pairs) == ["other-tokens"]


def test_left_padding_is_no_other_prompt():
    padded = two(
        sample("x", IDS, prompt=[0, 0, 1, 2], trainer=A), sample("x", IDS, prompt=[1, 2], rollout=B)
    )
    assert not padded.misalignments
    assert any("padded on the left" in note for note in padded.notes)
    stated = two(
        sample("x", IDS, prompt=[0, 1, 2], trainer=A, padding=1),
        sample("x", IDS, prompt=[1, 2], rollout=B),
    )
    assert not stated.misalignments


@pytest.mark.parametrize("ours", [[9, 1, 2], [7, 8, 1, 2], [1, 3], [1, 2, 3]])
def test_another_prompt_is_not_scored(ours):
    pairs = two(
        sample("x", IDS, prompt=ours, trainer=A), sample("x", IDS, prompt=[1, 2], rollout=B)
    )
    assert kinds(pairs) == ["other-prompt"]
    assert len(pairs.trainer) == 0


def test_masks_count_and_a_mask_of_another_length_says_nothing():
    pairs = both(sample("x", IDS, trainer=A, rollout=B, mask=[1, 0, 1, 1]))
    assert pairs.counted.tolist() == [True, False, True, True]
    assert kinds(both(sample("x", IDS, trainer=A, rollout=B, mask=[1, 0]))) == ["mask-length"]
    longer = both(sample("x", IDS, prompt=[1], trainer=A, rollout=B, mask=[0, 1, 0, 1, 1]))
    assert longer.counted.tolist() == [True, False, True, True]
    assert not longer.misalignments


def test_a_token_that_only_the_trainer_counts_is_a_fault_and_the_reverse_a_note():
    ours, theirs = [1, 1, 1, 1], [1, 1, 0, 1]
    more = two(sample("x", IDS, trainer=A, mask=ours), sample("x", IDS, rollout=B, mask=theirs))
    assert kinds(more) == ["other-mask"]
    assert "position 2" in more.misalignments[0].what
    assert len(more.trainer) == 4
    assert more.counted.all()
    less = two(sample("x", IDS, trainer=A, mask=theirs), sample("x", IDS, rollout=B, mask=ours))
    assert not less.misalignments
    assert any("leaves out" in note for note in less.notes)
    assert less.counted.tolist() == [True, True, False, True]


def test_a_span_in_place_of_the_masks_sum():
    """BUG-47"""
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
    values = [-0.5] * 15

    def stated(length: int):
        return both(
            sample(
                "x", range(15), trainer=values, rollout=values, mask=mask, response_length=length
            )
        )

    wrong = stated(12)
    assert kinds(wrong) == ["response-length"]
    assert "response_length 12 != mask sum 9 (the span" in wrong.misalignments[0].what
    assert len(wrong.trainer) == 15
    assert not stated(9).misalignments
    assert not stated(15).misalignments


def test_stated_lengths_without_a_mask():
    assert kinds(both(sample("x", IDS, trainer=A, rollout=B, response_length=5))) == [
        "response-length"
    ]
    prompt = {"prompt": [1, 2], "trainer": A, "rollout": B}
    assert kinds(both(sample("x", IDS, prompt_length=3, **prompt))) == ["prompt-length"]
    assert not both(sample("x", IDS, prompt_length=2, **prompt)).misalignments
    assert not both(sample("x", IDS, prompt_length=3, padding=1, **prompt)).misalignments


def test_the_samplers_own_sum():
    """BUG-52"""
    right = float(np.sum(np.array(B, np.float32), dtype=np.float32))
    assert not both(sample("x", IDS, trainer=A, rollout=B, cumulative_logprob=right)).misalignments
    wrong = both(sample("x", IDS, trainer=A, rollout=B, cumulative_logprob=sum(B) - 0.7))
    assert kinds(wrong) == ["cumulative"]
    assert len(wrong.trainer) == 4


@pytest.mark.parametrize(("rows", "start", "fits"), [
    (41, -1, True), (42, -1, True), (38, -1, False), (41, 0, True), (31, 10, True),
    (32, 10, True), (30, 10, False), (12, -1, True), (11, -1, True), (43, -1, False),
])  # fmt: skip
def test_rows_of_routing(rows, start, fits):
    """BUG-44"""
    routing = {"rollout": Routing(np.zeros((rows, 2, 4), np.int32), start)}
    values = [-0.5] * 12
    given = {"trainer": values, "rollout": values, "routing": routing}
    pairs = both(sample("x", range(12), prompt=list(range(30)), **given))
    assert (kinds(pairs) == []) is fits
    if rows == 38:
        assert "expected n-1 = 41 rows for 42 tokens, got 38" in pairs.misalignments[0].what
    assert len(pairs.trainer) == 12
    assert not both(
        sample("x", range(12), **given)
    ).misalignments  # how long the prompt is, is not known


def test_what_is_absent_is_not_present_and_nan_as_written_is():
    pairs = both(
        sample("x", IDS, trainer=[-0.1, None, float("nan"), -0.4], rollout=[None, -1, -1, -1])
    )
    assert pairs.present.tolist() == [False, False, True, True]
    assert pairs.finite.tolist() == [False, False, False, True]


def test_notes_are_counted_not_repeated():
    pairs = both(*(sample(str(i), None, trainer=A, rollout=B) for i in range(50)))
    assert len(pairs.notes) == 1
    assert pairs.notes[0].startswith("50 samples, first 0: ")


def test_empty_dumps_and_empty_samples():
    assert len(pair(dump()).trainer) == 0
    assert len(pair(dump(), dump()).difference) == 0
    pairs = both(sample("e", [], trainer=[], rollout=[]), sample("x", IDS, trainer=A, rollout=B))
    assert [(one.start, one.stop) for one in pairs.samples] == [(0, 0), (0, 4)]
    assert pairs.sample.tolist() == [1] * 4


def test_every_kind_says_what_it_means():
    assert all(kind.meaning and kind.remedy for kind in KINDS.values())


SHORT = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=100, deadline=None)
@given(SHORT, SHORT, SHORT, SHORT, st.data())
def test_no_mixture_of_lengths_pairs_unlike_tokens(ours, theirs, ours_before, theirs_before, data):
    """Whatever is given, every row is one token id of both sides at the same position."""
    counts = {name: data.draw(st.integers(0, 7), name) for name in ("trainer", "rollout", "mask")}
    a = sample(
        "x", ours, prompt=ours_before, trainer=[-1.0 - i for i in range(counts["trainer"])],
        mask=[1] * counts["mask"],
    )  # fmt: skip
    b = sample(
        "x", theirs, prompt=theirs_before, rollout=[-9.0 - i for i in range(counts["rollout"])]
    )
    pairs = two(a, b)
    rows = len(pairs.trainer)
    assert {len(one) for one in (pairs.rollout, pairs.token, pairs.counted, pairs.present)} == {
        rows
    }
    assert rows == sum(one.stop - one.start for one in pairs.samples)
    if rows:
        ids = pairs.token.tolist()
        assert ours[len(ours) - len(ids) :] == ids or ours[: len(ids)] == ids
        assert theirs[len(theirs) - len(ids) :] == ids or theirs[: len(ids)] == ids
        assert np.all(np.diff(pairs.trainer) == -1)
        assert np.all(np.diff(pairs.rollout) == -1)
        scored = [KINDS[kind].scored for kind in kinds(pairs)]
        assert all(scored)
    elif ours and theirs:
        assert kinds(pairs)


@pytest.mark.parametrize("first", [None, -0.5])
def test_a_prompt_that_both_sides_cover_is_told_by_the_missing_first_value(first):
    """Where the first token has a value, the response may just repeat the prompt."""
    ids = [1, 2, *IDS]
    pairs = two(
        sample("x", ids, prompt=[1, 2], trainer=[first, -0.7, *A]),
        sample("x", ids, prompt=[1, 2], rollout=[first, -0.7, *B]),
    )
    assert not pairs.misalignments
    assert pairs.present.all()
    assert pairs.token.tolist() == (IDS if first is None else ids)
    assert any("cover prompt and response" in note for note in pairs.notes) is (first is None)


def test_a_difference_beyond_float64_is_infinite_and_warns_of_nothing():
    assert lists([1e308, -1.0, -2.0], [-1e308, -1.0, -2.5]).difference.tolist() == [
        np.inf,
        0.0,
        0.5,
    ]
