"""The model of the backward's order keeps the contract of record.cuh and fits its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
import pytest
from backward_tables import Case, random_case
from hypothesis import given
from hypothesis import strategies as st

from mok.errors import InputError
from mok.hopper.backward_layout import make_backward_layout, weight_tiles
from mok.hopper.backward_model import Aims, count_tiles, plan_backward
from mok.hopper.backward_protocol import WHOLE, Group
from mok.hopper.gradient_records import (
    BACK_AGAIN,
    BACK_END,
    BACK_HIDDEN,
    BACK_INPUT,
    BACK_SHARED_AGAIN,
    BACK_SHARED_HIDDEN,
    BACK_SHARED_INPUT,
    BACK_SHARED_WEIGHTS,
    BACK_SUM,
    BACK_WEIGHTS,
    PART_FIRST,
    PART_LAST,
)
from mok.hopper.layout import Segments, Sizes, make_layout
from mok.hopper.schedule_model import cut_segments, plan_ranks

# Columns of I = 192: 2 of again, 1 of hidden; of H = 320: 2; of S = 64: 1 and 1. Tiles of an
# expert: gate and up 2 x 2 each, down 3 x 1; of the shared one 1 x 2 each and 3 x 1.
JOINED = Case((130,), ((129, 0, 300, 200),), 320, 192, 64, Segments(2, 4), 4, Aims(63, 0, 4, True))
CUT = Case((130,), ((129, 0, 300, 700),), 320, 192, 0, Segments(1, 2), 3, Aims(4, 0, 99))
NO_ROWS = Case((9,), ((0, 0),), 320, 192, 64, Segments(1, 2), 2, Aims(63))


def groups_of(case: Case) -> list[tuple[int, ...]]:
    return [astuple(group) for group in case.plan(0)[1].groups]


def test_groups_come_in_the_order_of_the_contract() -> None:
    assert groups_of(JOINED) == [
        (0, BACK_SHARED_AGAIN, 0, 2, 0, 0, 0, 0),
        (2, BACK_SHARED_HIDDEN, 0, 2, 0, 2, 0, 0),
        (4, BACK_HIDDEN, 0, 2, 0, 0, 0, 0),
        (6, BACK_SHARED_INPUT, 0, 2, 0, 2, 0, 0),
        (10, BACK_SHARED_WEIGHTS, 0, 2, 0, 2, 0, WHOLE),
        (17, BACK_AGAIN, 4, 1, 1, 0, 0, 0),
        (19, BACK_HIDDEN, 2, 3, 1, 0, 0, 0),
        (22, BACK_INPUT, 0, 2, 0, 2, 0, 0),
        (26, BACK_WEIGHTS, 0, 2, 0, 2, 0, WHOLE),
        (37, BACK_AGAIN, 5, 2, 2, 0, 0, 0),
        (41, BACK_HIDDEN, 5, 2, 2, 0, 0, 0),
        (43, BACK_INPUT, 2, 3, 1, 3, 0, 0),
        (49, BACK_WEIGHTS, 2, 3, 1, 3, 2, WHOLE),
        (60, BACK_INPUT, 5, 2, 2, 2, 0, 0),
        (64, BACK_WEIGHTS, 5, 2, 2, 2, 3, WHOLE),
        (75, BACK_WEIGHTS, 0, 0, 0, 0, 1, WHOLE),
        (86, BACK_SUM, 0, 17, 0, 0, 0, 0),
        (103, BACK_END, 0, 1, 0, 0, 0, 0),
    ]
    plan = JOINED.plan(0)[1]
    assert plan.segment_of.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert plan.used_target.tolist() == [15, 17, 15]
    assert plan.down == 18


def test_an_expert_is_cut_only_above_the_limit() -> None:
    assert [one for one in groups_of(CUT) if one[1] == BACK_WEIGHTS] == [
        (9, BACK_WEIGHTS, 0, 2, 0, 2, 0, WHOLE),
        (20, BACK_WEIGHTS, 2, 3, 1, 3, 2, WHOLE),  # longer than a segment, and yet whole
        (29, BACK_WEIGHTS, 5, 2, 2, 2, 3, PART_FIRST | 1),
        (38, BACK_WEIGHTS, 7, 2, 3, 2, 3, 2),
        (45, BACK_WEIGHTS, 9, 2, 4, 2, 3, PART_LAST | 3),
        (48, BACK_WEIGHTS, 0, 0, 0, 0, 1, WHOLE),
    ]
    segments = Segments(2, 3)
    assert cut_segments([1, 7, 1], segments, 7) == [(0, 1), (1, 7), (8, 1)]
    assert cut_segments([1, 7, 1], segments, 6) == [(0, 1), (1, 3), (4, 2), (6, 2), (8, 1)]
    assert cut_segments([1, 7, 1], segments, 3) == cut_segments([1, 7, 1], segments)


def test_without_rows_gradients_are_still_written() -> None:
    kinds = [one[1] for one in groups_of(NO_ROWS)]
    shared = [BACK_SHARED_HIDDEN, BACK_SHARED_INPUT, BACK_SHARED_WEIGHTS]
    assert kinds == [*shared, BACK_WEIGHTS, BACK_WEIGHTS, BACK_SUM, BACK_END]
    nobody = replace(NO_ROWS, tokens=(0,))
    assert groups_of(nobody) == [
        (0, BACK_SHARED_WEIGHTS, 0, 0, 0, 0, 0, WHOLE),
        (7, BACK_WEIGHTS, 0, 0, 0, 0, 0, WHOLE),
        (18, BACK_WEIGHTS, 0, 0, 0, 0, 1, WHOLE),
        (29, BACK_END, 0, 1, 0, 0, 0, 0),
    ]


def test_nothing_is_added_to_main_memory_for_an_expert_without_rows() -> None:
    for wants, added, written in ((63, 63, 0), (63, 3, 2), (1, 1, 0), (4, 59, 2), (56, 0, 0)):
        case = replace(NO_ROWS, aims=Aims(wants, added & wants))
        assert sum(one[1] == BACK_WEIGHTS for one in groups_of(case)) == written, (wants, added)
    alone = replace(NO_ROWS, tokens=(0,), aims=Aims(63, 56))
    assert BACK_SHARED_WEIGHTS not in [one[1] for one in groups_of(alone)]
    assert count_tiles(0, 320, 192) == 0
    assert count_tiles(7, 320, 192) == weight_tiles(320, 192) == 11


def test_experts_with_more_rows_come_first_in_their_segment() -> None:
    case = replace(JOINED, rows=((130, 256, 130, 1, 0, 200),), segments=Segments(9, 9), uncut=9)
    weights = [one for one in case.plan(0)[1].groups if one.kind == BACK_WEIGHTS]
    assert [one.expert for one in weights] == [1, 5, 0, 2, 3, 4]


@given(st.integers(0, 2**32))
def test_every_tile_is_there_once(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    for rank, rows in enumerate(case.rows):
        schedule, plan = case.plan(rank)
        counted: Counter[int] = Counter()
        targets = [0] * len(plan.used_target)
        for group, after in pairwise(plan.groups):
            tiles = after.ticket - group.ticket
            assert tiles > 0
            counted[group.kind] += tiles
            if group.kind == BACK_INPUT or (group.kind == BACK_WEIGHTS and group.blocks):
                targets[group.segment] += tiles
        assert targets == plan.used_target.tolist()
        blocks = len(schedule.blocks)
        wide = [-(-case.width // 128), -(-case.width // 256), -(-case.hidden // 256)]
        again = max(0, blocks - case.aims.saved_blocks) * wide[0]
        assert counted[BACK_AGAIN] == again
        assert counted[BACK_HIDDEN] == blocks * wide[1]
        assert counted[BACK_INPUT] == blocks * wide[2]
        assert counted[BACK_INPUT] + counted[BACK_SHARED_INPUT] == plan.down
        weights = [one for one in plan.groups if one.kind == BACK_WEIGHTS]
        if case.aims.wants & 7:
            whole = Counter(one.expert for one in weights if one.part & PART_LAST)
            some = {expert for expert, count in enumerate(rows) if count}
            assert set(whole.values()) <= {1}
            assert whole.keys() in (some, set(range(len(rows))))
            assert sum(one.blocks for one in weights) == blocks
        else:
            assert not weights


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[np.ndarray], Sizes, Segments]:
    """Ids of each rank; one expert may get all tokens."""
    ranks, experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    tokens = draw(st.lists(st.integers(0, 900), min_size=ranks, max_size=ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    common = draw(st.sampled_from([0.0, 0.8, 1.0]))
    ids = []
    for count in tokens:
        one = rng.integers(0, ranks * experts, (count, 1))
        one[rng.random(count) < common] = 0
        ids.append(one)
    least = draw(st.integers(1, 3))
    hidden, width = draw(st.sampled_from([64, 512])), draw(st.sampled_from([64, 1024]))
    sizes = Sizes(max(tokens), 1, experts, hidden, width, draw(st.sampled_from([0, 64])), ranks)
    return ids, sizes, Segments(least, least + draw(st.integers(0, 2)))


@given(routings(), st.booleans(), st.integers(0, 20))
def test_the_layout_has_room_for_every_routing(
    case: tuple[list[np.ndarray], Sizes, Segments], shared_again: bool, saved: int
) -> None:
    ids, sizes, segments = case
    layout = make_layout(sizes)
    backward = make_backward_layout(layout, segments)
    for schedule in plan_ranks(ids, sizes, layout.segments):
        plan = plan_backward(
            schedule, sizes, segments, backward.uncut, Aims(63, 0, saved, shared_again)
        )
        assert len(plan.groups) <= backward.max_groups
        runs = np.bincount(plan.segment_of).tolist()
        together = [left + right for left, right in pairwise(runs)]
        assert max([*together, *runs], default=0) <= backward.ring
        if any(one.part not in (0, WHOLE) for one in plan.groups):
            assert "scratch" in backward.local


def test_a_limit_below_a_segment_is_refused() -> None:
    with pytest.raises(InputError, match="uncut has to be"):
        replace(CUT, uncut=1).plan(0)


def test_an_end_is_always_there() -> None:
    assert Case((0,), ((0,),), 64, 64, 0, Segments(1, 1), 1, Aims(0)).plan(0)[1].groups == (
        Group(0, BACK_END, 0, 1),
    )
