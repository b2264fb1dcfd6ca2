"""Which samples and tokens the page of `verify onpolicy` shows one by one, and what it folds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_analyses import drift, many, odd, routed
from onpolicy_records import both, lists, sample

from verify.onpolicy.pairing import pair
from verify.onpolicy.report_drawing import overview
from verify.onpolicy.report_strips import OVERVIEW, WORST, Fold, Token, level, strips
from verify.onpolicy.routing import check


def test_the_worst_samples_come_first_and_the_first_sample_last():
    samples = [
        sample(str(at), [1, 2], trainer=[-1.0, -1.0 - at / 10], rollout=[-1.0, -1.0])
        for at in range(9)
    ]
    found = strips(both(*samples), None)
    assert [(one.key, one.why) for one in found] == [
        *((str(at), "worst") for at in (8, 7, 6, 5, 4)),
        ("0", "first"),
    ]
    assert len(found) == WORST + 1
    found = strips(both(samples[8], *samples[1:3]), None)
    assert [(one.key, one.why) for one in found] == [("8", "worst"), ("2", "worst"), ("1", "worst")]


def test_values_that_are_not_finite_are_worse_than_any_difference():
    huge = sample("huge", [1], trainer=[-1e9], rollout=[-1.0])
    found = strips(both(huge, *odd()), None)
    assert [one.key for one in found] == ["odd", "huge"]
    tokens = found[0].parts
    assert [one.state for one in tokens] == ["equal", "odd", "odd", "absent", "odd", "below"]
    assert [one.level for one in tokens] == [0, 0, 0, 0, 0, 6]
    assert found[0].worst == 1
    assert found[0].differing == 4


def test_equal_samples_show_the_first_one_alone():
    same = [sample(str(at), [1], trainer=[-1.0], rollout=[-1.0]) for at in range(3)]
    (only,) = strips(both(*same), None)
    assert (only.key, only.why, only.differing, only.worst) == ("0", "first", 0, 0)
    assert strips(both(), None) == ()
    assert strips(both(*same), None, 0) == ()


def test_masked_tokens_are_shown_as_such_and_are_not_worst():
    (one,) = strips(lists([-1.0, -2.0, -9.0], [-1.0, -2.5, -0.5], [1, 1, 0]), None)
    assert [part.counted for part in one.parts] == [True, True, False]
    assert (one.worst, one.masked, one.differing) == (1, 1, 1)


def test_flips_are_told_where_they_are_known():
    found = both(routed([2, 4]))
    (one,) = strips(found, check(found).flips)
    assert [part.flips for part in one.parts] == [0, 0, 1, 0, 1, 0]
    (one,) = strips(found, None)
    assert {part.flips for part in one.parts} == {-1}


def test_text_is_the_samplers_before_the_trainers():
    (one,) = strips(both(*drift(1)), None)
    assert one.text == "response 0"


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 400),
    limit=st.integers(1, 90),
    unequal=st.lists(st.integers(0, 399), max_size=4),
)
def test_every_token_is_shown_or_folded_once(length, limit, unequal):
    trainer = np.full(length, -1.0)
    for place, at in enumerate(unequal):
        trainer[at % length] -= 0.5 + place
    (one,) = strips(lists(trainer.tolist(), [-1.0] * length), None, limit)
    covered = []
    for part in one.parts:
        if isinstance(part, Token):
            covered.append(part.position)
        else:
            covered += range(part.low, part.high + 1)
            assert part.differing == int((trainer[part.low : part.high + 1] != -1.0).sum())
            assert part.largest == np.abs(trainer[part.low : part.high + 1] + 1.0).max()
    assert covered == list(range(length))
    shown = [part.position for part in one.parts if isinstance(part, Token)]
    assert len(shown) <= max(limit, 1)
    assert one.worst in shown
    assert bool(one.overview) == (len(shown) < length)


def test_a_long_sample_keeps_its_worst_token_and_its_first_difference():
    d = np.zeros(3000)
    d[[700, 2500]] = 0.25, -3.0
    (one,) = strips(lists((d - 4.0).tolist(), [-4.0] * 3000), None, 200)
    kinds = [part.state if isinstance(part, Token) else "fold" for part in one.parts]
    assert kinds.count("fold") == 3
    assert [part.position for part in one.parts if isinstance(part, Token) and part.level] == [
        700,
        2500,
    ]
    folds = [part for part in one.parts if isinstance(part, Fold)]
    assert {part.differing for part in folds} == {0}
    assert len(one.overview) <= OVERVIEW
    assert [(col.above, col.below) for col in one.overview if col.above or col.below] == [
        (0.25, 0.0),
        (0.0, 3.0),
    ]
    above, below, width, height = overview(one)
    assert above.count("M") == below.count("M") == 1
    assert (width, height) == (1060, 44)


def test_a_fold_without_a_finite_difference_says_so():
    theirs: list[float | None] = [-2.0, *[-1.0] * 4, *[None] * 25]
    (one,) = strips(lists([-1.0] * 30, theirs), None, 4)
    assert [(part.low, part.largest) for part in one.parts if isinstance(part, Fold)] == [(3, 0.0)]
    theirs[1:] = [None] * 29
    (one,) = strips(lists([-1.0] * 30, theirs), None, 4)
    assert np.isnan(one.parts[-1].largest)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(0.0, 0), (1e-300, 1), (1e-5, 1), (2e-5, 2), (0.01, 3), (0.1, 4), (0.69, 5), (0.7, 6)],
)
def test_levels(size, wanted):
    assert level(size) == wanted


def test_many_tokens_are_bounded():
    found = strips(pair(many(20, 2000)), None)
    assert sum(len(one.parts) for one in found) <= 6 * 324
