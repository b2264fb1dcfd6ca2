"""What it takes for knobs to beat the defaults: never slower, never inside the spread.

The rules of `mok bench tune` alone; measuring and the command are in test_bench_tune.py.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mok.bench import tuning
from mok.bench.protocols import quantile
from mok.bench.shapes import PEER_SHAPES, SHAPES, Shape
from mok.bench.tuning import Comparison, Tried, candidates, compare
from mok.hopper import tuned
from mok.hopper.layout import Segments, choose_segments, make_layout, up_columns
from mok.hopper.tuned import Choice

SMS = 132
_times = st.floats(1e-6, 1.0)


def _still(ratio: float, turns: int = 100) -> Comparison:
    """Without spread."""
    return Comparison(ratio, ratio, ratio, turns, ratio, 1.0)


NOISE = Comparison(1.0, 0.998, 1.002, 100, 1.0, 1.0)


@st.composite
def _runs(draw, least=1):
    turns = draw(st.integers(least, 60))
    return tuple(draw(st.lists(_times, min_size=turns, max_size=turns)) for _ in range(2))


@given(_runs(tuning.LEAST_TURNS), st.floats(0.5, 2.0))
def test_who_is_slower_is_never_better(run, noise):
    found = compare(*run)
    assume(quantile(run[0], 0.5) < (1 + tuning.LEAST_GAIN) * quantile(run[1], 0.5))
    assert not tuning.better(found, _still(noise))


@given(_runs(tuning.LEAST_TURNS), _runs(tuning.LEAST_TURNS))
def test_nothing_is_better_inside_the_spread_of_equal_code(run, equal):
    found, noise = compare(*run), compare(*equal)
    if tuning.better(found, noise):
        assert found.low > noise.high
        assert found.low > 1
        assert found.ratio / noise.ratio >= 1 + tuning.LEAST_GAIN
    if found.low <= noise.high:
        assert not tuning.better(found, noise)


_RATIOS = st.floats(0.9, 1.1)


@given(st.tuples(*[_RATIOS] * 3), st.tuples(*[_RATIOS] * 3))
def test_better_is_outside_the_overlap_and_beyond_the_gain(found, noise):
    (low, ratio, high), (least, middle, most) = sorted(found), sorted(noise)
    got = tuning.better(
        Comparison(ratio, low, high, 100, ratio, 1.0),
        Comparison(middle, least, most, 100, 1.0, 1.0),
    )
    gains = ratio >= 1.01 and ratio / max(1.0, middle) >= 1.01 * (1 - 1e-12)
    if got:
        assert low > most
        assert low > 1
        assert gains
    elif gains:
        assert low <= max(1.0, most) or ratio < 1.01 * middle


def test_a_gain_that_overlaps_with_noise_is_none():
    found = Comparison(1.05, 1.02, 1.08, 100, 1.05, 1.0)
    for high, wins in ((1.019, True), (1.02, False), (1.03, False)):
        noise = Comparison(1.0, 0.97, high, 100, 1.0, 1.0)
        assert tuning.better(found, noise) is wins


@given(_runs(), st.data())
def test_equal_code_in_another_order_is_never_better(run, data):
    shuffled = data.draw(st.permutations(run[0]))
    assert not tuning.better(compare(run[0], shuffled), NOISE)


@given(_runs(), st.integers(1, 60))
def test_too_few_calls_decide_nothing(run, turns):
    found = dataclasses.replace(_still(2.0), turns=turns)
    assert tuning.better(found, NOISE) is (turns >= tuning.LEAST_TURNS)
    assert tuning.better(_still(2.0), dataclasses.replace(NOISE, turns=turns)) is (
        turns >= tuning.LEAST_TURNS
    )


@given(_runs())
def test_a_comparison_holds_what_the_clock_said(run):
    found = compare(*run)
    assert found.low <= found.high
    assert found.turns == len(run[0])
    assert found.ratio == pytest.approx(found.first_ms / found.other_ms)
    if found.turns < 2:
        assert found.low == found.high == found.ratio


def test_a_gain_of_one_percent_counts_and_a_drift_of_the_clock_does_not():
    clock = [1.0 + 0.2 * (turn // 10 % 2) for turn in range(100)]
    drifting = compare([1.012 * at for at in clock], clock)
    assert drifting.low == pytest.approx(1.012)
    assert tuning.better(drifting, NOISE)
    assert not tuning.better(_still(1.009), NOISE)
    assert not tuning.better(compare([1.012] * 100, [0.9] * 60 + [1.2] * 40), NOISE)
    with pytest.raises(ValueError, match="as many of each"):
        compare([1.0], [])


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.booleans())))
def test_the_best_is_the_fastest_of_those_that_are_better(ratios):
    tried = [
        Tried(Choice(Segments(1, 1 + place)), _still(ratio), better)
        for place, (ratio, better) in enumerate(ratios)
    ]
    found = tuning.best(tried)
    expected = max((ratio for ratio, better in ratios if better), default=None)
    assert (None if found is None else found.found.ratio) == expected
    assert found is None or found.better


@given(
    st.integers(1, 1 << 16),
    st.integers(1, 512),
    st.integers(1, 256),
    st.integers(1, 16),
    st.sampled_from((1, 8, 78, 132)),
)
def test_candidates_are_few_legal_and_no_defaults(tokens, experts, width, slots, sms):
    shape = Shape("any", tokens, experts, 64, 64 * width, min(slots, experts))
    found = candidates(shape, sms)
    assert 1 <= len(found) <= 7
    assert len(set(found)) == len(found)
    assert tuning.default_choice(shape.I) not in found
    for one in found:
        assert one.segments.most <= tuned.MOST_BLOCKS
        assert 0 <= one.num_sms < sms
        if one.num_sms:
            assert one.segments == choose_segments(shape.I)
        layout = make_layout(tuning.sizes_of(shape), one.segments)
        assert layout.ring_x >= min(one.segments.most, layout.max_blocks)


@pytest.mark.parametrize("name", PEER_SHAPES)
def test_no_candidate_leaves_multiprocessors_without_a_tile(name):
    shape = SHAPES[name]
    for one in candidates(shape, SMS):
        assert one.segments.least * up_columns(shape.I) >= SMS
    earlier = Choice(Segments(3, 5), 100)
    assert candidates(shape, SMS, earlier)[0] == earlier
    default = tuning.default_choice(shape.I)
    assert candidates(shape, SMS, default) == candidates(shape, SMS)
