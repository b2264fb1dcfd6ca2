"""The figures of the page of `verify onpolicy`, against plain loops; and their geometry."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_analyses import NAN, drift, many, odd, routed
from onpolicy_records import both, lists, sample

from verify.onpolicy.pairing import pair
from verify.onpolicy.report_drawing import Scale, along, drawn_bars, drawn_layers, scale
from verify.onpolicy.report_figures import COLUMNS, SAMPLES, VALUES, figures, spreads
from verify.onpolicy.report_squares import SIDE, drawn_scatter
from verify.onpolicy.report_values import OUTLIERS, SQUARES, bars, scatter, squeezed
from verify.onpolicy.routing import LayerFlips, check

sizes = st.one_of(st.sampled_from([0.0, -0.5, 0.5]), st.floats(-1e3, 1e3))


def loop(values):
    """The spread of a list, by its definition."""
    ordered = sorted(map(abs, values))
    count = len(ordered)
    median = ordered[math.ceil(count / 2) - 1]
    p99 = ordered[math.ceil(99 * count / 100) - 1]
    differing = sum(one > 0 for one in ordered)
    return (count, differing, statistics.fmean(values), statistics.fmean(ordered), median, p99,
            ordered[-1])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 4), sizes), max_size=120))
def test_spreads_are_those_of_a_loop(given):
    given.sort(key=lambda one: abs(one[1]))
    labels = np.array([label for label, _ in given], np.int64)
    found = spreads(labels, np.array([value for _, value in given]))
    assert set(found) == {label for label, _ in given} - {-1}
    for label, one in found.items():
        wanted = loop([value for at, value in given if at == label])
        held = (one.tokens, one.differing, one.mean, one.size, one.median, one.p99, one.largest)
        assert held == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(sizes, st.sampled_from([1e-300, 1e300, 1e-9, -1e-3])), max_size=60))
def test_every_token_is_in_one_bar(values):
    d = np.array(sorted(values, key=abs), np.float64)
    above, below = bars(d)
    assert sum(one.count for one in above) == sum(value > 0 for value in values)
    assert sum(one.count for one in below) == sum(value < 0 for value in values)
    for one in above:
        assert one.count == sum(one.low < value <= one.high for value in values)


def test_only_what_counts_and_is_finite_is_drawn():
    found = figures(both(*odd()))
    assert found.scatter.tokens == 4
    assert found.equal == 3
    assert [one.key for one in found.samples] == ["odd"]
    assert found.samples[0].spread.tokens == 2
    assert found.samples[0].total == -2.5
    masked = figures(lists([-1.0, -2.0, -9.0], [-1.0, -2.5, -0.5], [1, 1, 0]))
    assert masked.scatter.tokens == 2
    assert masked.samples[0].spread.largest == 0.5


def test_nothing_compared_gives_no_figure():
    for pairs in (both(), lists([NAN], [-1.0]), lists([None], [-1.0])):
        found = figures(pairs)
        assert (found.scatter, found.positions, found.samples) == (None, (), ())
        assert along(found.positions) is None
        assert drawn_bars(found) is None


def test_positions_and_samples_are_folded_into_ranges():
    pairs = pair(many(250, 40))
    found = figures(pairs)
    assert len(found.by_sample) == 84 <= COLUMNS
    assert [(one.low, one.high) for one in found.by_sample][:2] == [(0, 2), (3, 5)]
    assert found.by_sample[-1].high == 249
    assert [(one.low, one.high) for one in found.positions] == [(at, at) for at in range(40)]
    assert sum(one.spread.tokens for one in found.positions) == 10_000
    worst = max(found.positions, key=lambda one: one.spread.largest)
    assert worst.low == 40 // 3
    assert len(found.samples) == SAMPLES
    assert found.samples_more == 250 - SAMPLES
    assert (found.samples[0].index, found.samples[0].place) == (125, "a.jsonl, line 125")
    assert found.samples[0].share > 0.9


def test_samples_are_grouped_by_what_is_recorded():
    samples = drift(40)
    found = figures(both(*samples))
    assert [one.name for one in found.groupings] == ["rank"]  # step is the same everywhere
    (ranks,) = found.groupings
    assert sorted(one.value for one in ranks.groups) == ["0", "1"]
    assert [one.samples for one in ranks.groups] == [20, 20]
    assert ranks.groups[0].spread.size >= ranks.groups[1].spread.size
    named = [sample(str(at), [1], trainer=[-1.0 - at], rollout=[-1.0], rank=at) for at in range(30)]
    (ranks,) = figures(both(*named)).groupings
    assert [one.value for one in ranks.groups] == [str(at) for at in range(29, 29 - VALUES, -1)]
    assert ranks.more == 30 - VALUES


def test_a_value_that_is_no_name_groups_nothing():
    named = [
        sample(str(at), [1], trainer=[-2.0], rollout=[-1.0], rollout_version=[str(at)])
        for at in range(3)
    ]
    assert figures(both(*named)).groupings == ()


def test_few_tokens_are_points_and_many_are_squares_with_outliers():
    few = figures(both(*drift())).scatter
    assert few.counts is None
    assert len(few.points) == few.tokens == 21
    found = figures(pair(many(40, 50))).scatter
    assert found.counts.shape == (SQUARES, SQUARES)
    assert found.counts.sum() == found.tokens == 2000
    assert len(found.points) == OUTLIERS
    assert (found.points[-1].trainer, found.points[-1].position) == (-1e4, 50 // 3)
    assert found.low == -1e4
    equal = lists([-0.5] * 2000, [-0.5] * 2000)
    assert scatter(equal, np.arange(2000)).points == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=9))
def test_every_point_lies_inside_of_the_picture(values):
    pairs = lists(values, [one / 3 for one in values])
    drawn = drawn_scatter(scatter(pairs, np.flatnonzero(pairs.finite)))
    assert len(drawn.points) == len(values)
    for x, y, one in drawn.points:
        assert 58 <= x <= 58 + SIDE
        assert 10 <= y <= 10 + SIDE
        right, up = x - 58, 10 + SIDE - y
        assert right >= up - 0.11 if one.rollout >= one.trainer else up >= right - 0.11
    assert all(58 <= x <= 58 + SIDE for x, _ in drawn.ticks)


def test_equal_values_lie_on_the_diagonal():
    pairs = lists([-3.0, -0.01, 0.0, -200.0], [-3.0, -0.01, 0.0, -200.0])
    for x, y, _ in drawn_scatter(scatter(pairs, np.arange(4))).points:
        assert x - 58 == pytest.approx(10 + SIDE - y)
    drawn = drawn_scatter(scatter(lists([-1.0], [-2.0]), np.arange(1)))
    ((x, y, _),) = drawn.points
    assert x - 58 < 10 + SIDE - y  # the trainer's is higher: above the diagonal


def test_the_axes_of_the_scatter_keep_the_order():
    values = [-1e300, -50.0, -1.0, -0.1, -1e-9, 0.0, 1e-9, 0.5, 1e5]
    assert list(squeezed(values)) == sorted(squeezed(values))
    assert squeezed(0.0) == 0.0
    assert squeezed(-2.0) == -squeezed(2.0)


def test_squares_have_shades_by_their_counts():
    found = figures(pair(many(40, 50))).scatter
    drawn = drawn_scatter(found)
    assert drawn.shade_counts[0] == 1
    assert list(drawn.shade_counts) == sorted(set(drawn.shade_counts))
    area = 0.0
    for path in drawn.shades:
        for one in path.split("M")[1:]:
            wide, tall = one.split("h")[1].split("v")
            area += float(wide) * float(tall)
    squares = int(np.count_nonzero(found.counts))
    assert area == pytest.approx(squares * (SIDE / SQUARES) ** 2, rel=0.05)


def test_a_scale_goes_by_decades_and_shows_what_is_small():
    axis = scale([0.0, 0.02, 5.0, math.inf], 100)
    assert axis == Scale(-2, 1, 100)
    assert axis.height(10.0) == 100
    assert axis.height(0.1) == pytest.approx(33.3)
    assert axis.height(math.inf) == 100
    assert (axis.height(0.0), axis.height(math.nan)) == (0.0, 0.0)
    assert axis.height(1e-30) == 2.0
    assert [label for _, label in axis.ticks()] == ["0.1", "1", "10"]
    assert scale([1e-30, 1.0], 100).bottom == -8
    assert scale([0.0], 100) == Scale(-1, 0, 100)


def test_bars_stand_by_sign_and_size():
    values = [0.5, -0.5, -0.25, 0.0, 1e-3]
    found = figures(lists([-1.0 + one for one in values], [-1.0] * 5))
    drawn = drawn_bars(found)
    kinds = [kind for *_, kind, _ in drawn.bars]
    assert kinds == ["below", "below", "equal", "above", "above"]
    places = [x for x, *_ in drawn.bars]
    assert places == sorted(places)
    assert {label for _, label in drawn.ticks} >= {"0", "1", "-1", "0.1", "-0.01"}
    assert [bar.count for *_, bar in drawn.bars] == [1] * 5


def test_layers_are_as_high_as_their_share():
    checked = check(both(routed([1, 2, 4])))
    drawn = drawn_layers(checked.layers)
    assert [bar[4].layer for bar in drawn.bars] == [0, 1, 2]
    heights = [bar[3] for bar in drawn.bars]
    assert heights[1] == 150
    assert heights[0] == heights[2] == 0
    assert drawn.lines[0][1] == "50 %"
    assert drawn_layers(()) is None
    many = [LayerFlips(at, 10, at % 3, 0.9, None, None) for at in range(400)]
    assert drawn_layers(many).width <= 1140


def test_values_near_the_end_of_float64_have_a_place_on_the_axes():
    ends = squeezed([-1.7e308, 0.0, 1.7e308])
    assert np.isfinite(ends).all()
    assert ends[1] == 0.0
    assert ends[0] == -ends[2] < squeezed(-1e290)
