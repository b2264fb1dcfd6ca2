"""Geometry of the figures: right counts at the right places, and nothing for what is malformed."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.comparison import tile_map as tiles_of
from verify.explanation.telling import explain
from verify.rendering import figures

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def test_histogram_bars_are_in_order_and_to_scale():
    drawn = figures.histogram({"5-8": 50, "not finite": 7, "1": 100, "0": 25})
    assert [bar.about for bar in drawn.bars] == [
        "0 ulp: 25",
        "1 ulp: 100",
        "5-8 ulp: 50",
        "not finite: 7",
    ]
    assert [bar.height for bar in drawn.bars] == [21.0, 84.0, 42.0, 5.88]
    left = [bar.x for bar in drawn.bars]
    step = left[1] - left[0]
    assert left == sorted(left)
    assert left[2] - left[1] == pytest.approx(3 * step)  # 2 and 3-4 are empty slots
    assert [bar.special for bar in drawn.bars] == [False, False, False, True]
    assert [label for _, label in drawn.ticks] == ["0", "1", "2", "4", "8", "nan, inf"]
    assert drawn.largest == "100"


def test_histogram_of_the_widest_range_stays_inside():
    drawn = figures.histogram({"1": 1, f"{2**62 + 1}-{2**63}": 10**6, "not finite": 1})
    assert all(bar.x >= 0 and bar.x + bar.width <= drawn.width for bar in drawn.bars)
    assert all(bar.height >= 1.5 and bar.y >= 0 for bar in drawn.bars)
    assert all(bar.y + bar.height == pytest.approx(drawn.height) for bar in drawn.bars)
    assert drawn.ticks[-2][1].startswith("2^")


def test_histogram_of_nothing():
    for nothing in (None, {}, {"1": 0}, {"1": "many"}, {"1": -3}, {"1": True}, [1], "1"):
        assert figures.histogram(nothing) is None


def test_tile_map_of_a_real_comparison():
    mask = torch.zeros(3, 60, 32, dtype=torch.bool)
    mask[:, 56:] = True
    mask[0, 0, 0] = True
    found = tiles_of(mask)
    tiles = {
        "shape": list(found.shape),
        "tile": list(found.tile),
        "counts": [list(row) for row in found.counts],
    }
    drawn = figures.tile_map(tiles, mask.numel())
    counts = {level: path.count("M") for level, path in drawn.paths}
    assert counts == {0: 14 * 16 - 1, 2: 1, 5: 16}  # 1 of 24 is below 10 %
    assert dict(drawn.paths)[2].startswith("M0 0h")
    assert drawn.about == "differ: rows 0-59 of 60, columns 0-31 of 32"
    assert (drawn.width, drawn.height) == (16 * 11, 15 * 11)
    assert [label for _, label in drawn.rows] == ["0", "16", "32", "48"]
    assert drawn.tile == "4 x 2"


def test_tile_map_of_a_vector_speaks_of_elements():
    tiles = {"shape": [1, 100], "tile": [1, 8], "counts": [[0] * 12 + [4]]}
    drawn = figures.tile_map(tiles, 100)
    assert drawn.about == "differ: elements 96-99 of 100"
    assert [level for level, _ in drawn.paths] == [0, 5]  # the last tile holds four elements
    assert drawn.rows == ()


@given(JSON, JSON)
def test_malformed_figures_are_not_drawn(value, other):
    for tiles in (value, {"shape": value, "tile": other, "counts": [[1]]}, {"counts": value}):
        drawn = figures.tile_map(tiles, other)
        if drawn is not None:
            assert all(re.fullmatch(r"[Mhvz0-9 -]+", path) for _, path in drawn.paths)
    figures.histogram(value)
    figures.histogram({"1": value, str(other): 1})


def _claim(differing, outputs=None, executions=5):
    return {
        "ranks": [
            {
                "rank": rank,
                "executions": executions if count is not None else 0,
                "differing": count or 0,
                "outputs": {"w": outputs[rank]} if outputs and outputs[rank] else {},
            }
            for rank, count in enumerate(differing)
        ]
    }


def _finding(rank, reason="bits-differ", verdict="MISMATCH", tensor="w"):
    return {"rank": rank, "reason": reason, "verdict": verdict, "tensor": tensor}


def _states(grid):
    return [(cell.state, cell.text) for cell in grid.cells]


def test_rank_grid_tells_four_kinds_of_ranks():
    grid = figures.rank_grid(4, [_claim([2, 0, 1, None])], [_finding(0)])
    assert _states(grid) == [
        ("differs", "2/5"),
        ("equal", "0/5"),
        ("other", "1/5"),
        ("missing", "no runs"),
    ]
    assert grid.more == 0


def test_rank_grid_of_a_lost_rank():
    finding = _finding(1, "missing-rank", "UNVERIFIED", None)
    grid = figures.rank_grid(2, [_claim([0, None])], [finding])
    assert _states(grid) == [("equal", "0/5"), ("missing", "lost")]


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ("aab", [("equal", "copy A"), ("equal", "copy A"), ("differs", "copy B")]),
        ("abb", [("differs", "copy B"), ("equal", "copy A"), ("equal", "copy A")]),
        ("ab", [("differs", "copy A"), ("differs", "copy B")]),
        ("abc", [("differs", "copy A"), ("differs", "copy B"), ("differs", "copy C")]),
    ],
)
def test_replicas_show_which_ranks_hold_the_same_copy(copies, expected):
    claim = _claim([0] * len(copies), copies)
    finding = _finding(len(copies) - 1, "ranks-differ")
    assert _states(figures.rank_grid(len(copies), [claim], [finding])) == expected


def test_no_rank_grid_without_ranks():
    assert figures.rank_grid(1, [_claim([1])], [_finding(0)]) is None
    assert figures.rank_grid(2, [_claim([0, 0])], [_finding(None)]) is None


def test_rank_grid_is_bounded():
    grid = figures.rank_grid(3000, [], [_finding(0)])
    assert (len(grid.cells), grid.more) == (256, 2744)


def test_a_difference_counts_ulp_distances_of_what_differs():
    base = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])
    other = base.clone()
    other[1] = torch.nextafter(base[1], torch.tensor(9.0))
    other[2] = float("nan")
    other[4] = -0.0
    found = explain(base, other, "out", "repeat")
    assert found["ulps"] == {"not finite": 1, "0": 1, "1": 1}
    assert sum(found["ulps"].values()) == found["num_differing"] == 3


@pytest.mark.parametrize("other", [torch.ones(4, dtype=torch.float64), torch.ones(5)])
def test_no_ulp_distances_of_other_dtypes_and_shapes(other):
    assert "ulps" not in explain(torch.zeros(4), other, "out", "repeat")
    assert "ulps" not in explain(torch.zeros(4).int(), torch.ones(4).int(), "out", "repeat")
