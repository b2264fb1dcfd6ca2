"""The model of the schedule has the portable backend's order, and its tables keep the rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_schedules import KINDS, random_routing
from hypothesis import given
from hypothesis import strategies as st

from mok.dispatch import arrival_order, clean_topk, plan_sends
from mok.errors import InputError
from mok.hopper.layout import Segments, Sizes, make_layout
from mok.hopper.records import BLOCK, PADDING, ROUTE_BITS
from mok.hopper.schedule_model import (
    DOWN,
    END,
    SHARED_DOWN,
    SHARED_UP,
    SUM,
    UP,
    RankPlan,
    TicketGroup,
    clean_ids,
    cut_segments,
    list_groups,
    plan_ranks,
)


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[np.ndarray], Sizes, Segments]:
    """Ids of each rank, with sizes and segments; experts of more than a block occur."""
    ranks, experts, slots = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 5)),
    )
    tokens = draw(st.lists(st.integers(0, 300), min_size=ranks, max_size=ranks))
    sizes = Sizes(max(tokens), slots, experts, 320, 192, draw(st.sampled_from([0, 64])), ranks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = st.sampled_from(KINDS)
    ids = [random_routing(rng, count, slots, ranks * experts, draw(kinds)) for count in tokens]
    least = draw(st.integers(1, 4))
    return ids, sizes, Segments(least, least + draw(st.integers(0, 4)))


@given(st.integers(1, 6), st.data())
def test_ids_are_cleaned_as_in_the_portable_backend(slots: int, data: st.DataObject):
    ids = st.one_of(st.integers(-3, 5), st.integers(-(2**63), 2**63 - 1))
    rows = data.draw(st.lists(st.lists(ids, min_size=slots, max_size=slots), max_size=8))
    topk = np.array(rows, dtype=np.int64).reshape(len(rows), slots)
    cleaned, bad = clean_ids(topk, 4)
    wanted, mask = clean_topk(torch.from_numpy(topk), 4)
    assert cleaned.tolist() == wanted.tolist()
    assert bad == int(mask.sum())


def portable_rows(ids: list[np.ndarray], sizes: Sizes, rank: int) -> list[tuple[int, int]]:
    """(source, token * slots + slot) of each row in the portable backend's canonical order."""
    everybody = sizes.ranks * sizes.experts
    cleaned = [clean_topk(torch.from_numpy(one), everybody)[0] for one in ids]
    plans = [plan_sends(one, sizes.experts, sizes.ranks) for one in cleaned]
    received: list[tuple[int, int]] = []
    for source, plan in enumerate(plans):
        sent = (plan.token_S * sizes.slots + plan.slot_S).tolist()
        counts = plan.counts_PE.sum(dim=1).tolist()
        first = sum(counts[:rank])
        received += [(source, route) for route in sent[first : first + counts[rank]]]
    order = arrival_order(torch.stack([plan.counts_PE[rank] for plan in plans]))
    return [received[index] for index in order.tolist()]


@given(routings())
def test_rows_have_the_portable_backends_order(case: tuple[list[np.ndarray], Sizes, Segments]):
    ids, sizes, segments = case
    for rank, plan in enumerate(plan_ranks(ids, sizes, segments)):
        valid = [int(route) for route in plan.routes if route != PADDING]
        seen = [(route >> ROUTE_BITS, route & ((1 << ROUTE_BITS) - 1)) for route in valid]
        assert seen == portable_rows(ids, sizes, rank)
        assert plan.rows == len(valid) == int(plan.expert_rows.sum())


@given(routings())
def test_every_route_is_one_row_of_its_expert(case: tuple[list[np.ndarray], Sizes, Segments]):
    ids, sizes, segments = case
    plans = plan_ranks(ids, sizes, segments)
    for rank, plan in enumerate(plans):
        for block, word in enumerate(plan.blocks.tolist()):
            expert, rows = word >> 16, word & 0xFFFF
            routes = plan.routes[block * BLOCK : (block + 1) * BLOCK]
            assert 1 <= rows <= BLOCK
            assert (routes[rows:] == PADDING).all()
            for route in routes[:rows].tolist():
                owner = plans[route >> ROUTE_BITS].ids
                assert owner[1 + (route & ((1 << ROUTE_BITS) - 1))] == rank * sizes.experts + expert
    used = sum(int((plan.ids[1:] >= 0).sum()) for plan in plans)
    assert used == sum(plan.rows for plan in plans)


@given(routings())
def test_the_layout_has_room_for_every_routing(case: tuple[list[np.ndarray], Sizes, Segments]):
    ids, sizes, segments = case
    layout = make_layout(sizes, segments)
    for plan in plan_ranks(ids, sizes, segments):
        assert len(plan.blocks) <= layout.max_blocks
        assert len(plan.groups) <= layout.max_groups
        # `enter` keeps the first blocks of segments in the schedule's scratch if they are many.
        assert len(plan.blocks) <= sizes.experts * layout.max_chunks


BLOCKS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 40)), max_size=12)


@given(BLOCKS, st.integers(1, 6), st.integers(0, 8))
def test_segments_join_small_experts_and_cut_only_large_ones(
    blocks: list[int], least: int, more: int
):
    most = least + more
    owners = [expert for expert, count in enumerate(blocks) for _ in range(count)]
    runs = cut_segments(blocks, Segments(least, most))
    assert [block for first, n in runs for block in range(first, first + n)] == [
        *range(sum(blocks))
    ]
    assert all(1 <= n <= most for _, n in runs)
    parts: dict[int, list[int]] = {}
    for first, n in runs:
        held = sorted(set(owners[first : first + n]))
        for expert in held:
            parts.setdefault(expert, []).append(n)
        cut = blocks[held[0]] > most
        assert len(held) == 1 if cut else n == sum(blocks[expert] for expert in held)
        assert sum(blocks[expert] for expert in held[:-1]) < least, "it was full before"
        if not cut and n < least and first + n < len(owners):
            assert n + blocks[owners[first + n]] > most, "the next expert had room"
    for expert, sizes in parts.items():
        assert len(sizes) == -(-blocks[expert] // most)
        assert max(sizes) - min(sizes) <= 1 or blocks[expert] <= most
        assert sizes == sorted(sizes, reverse=True)


def test_small_experts_are_joined_and_large_ones_cut_into_equal_parts():
    segments = Segments(4, 6)
    assert cut_segments([3, 0, 1, 5, 2, 5, 1], segments) == [
        (0, 4),
        (4, 5),
        (9, 2),
        (11, 5),
        (16, 1),
    ]
    assert cut_segments([1, 13, 1], segments) == [(0, 1), (1, 5), (6, 4), (10, 4), (14, 1)]
    assert cut_segments([0, 0], segments) == []


def test_groups_come_in_the_order_of_the_launch():
    sizes = Sizes(130, 2, 3, 320, 192, 64, 1)  # 2 column tiles of up, 2 of down, 1 of the shared up
    assert list_groups([(0, 4), (4, 1), (5, 2)], 130, sizes) == [
        TicketGroup(0, SHARED_UP, 0, 2),
        TicketGroup(2, SHARED_DOWN, 0, 2),
        TicketGroup(6, UP, 0, 4),
        TicketGroup(14, UP, 4, 1),
        TicketGroup(16, DOWN, 0, 4),
        TicketGroup(24, UP, 5, 2),
        TicketGroup(28, DOWN, 4, 1),
        TicketGroup(30, DOWN, 5, 2),
        TicketGroup(34, SUM, 0, 17),
        TicketGroup(51, END, 0, 1),
    ]


def test_a_rank_without_tokens_still_works_for_the_others():
    sizes = Sizes(4, 1, 1, 64, 64, 64, 2)
    ids = [np.zeros((0, 1), dtype=np.int64), np.zeros((4, 1), dtype=np.int64)]
    first, second = plan_ranks(ids, sizes, Segments(1, 1))
    assert [group.kind for group in first.groups] == [UP, DOWN, END]
    assert [group.kind for group in second.groups] == [SHARED_UP, SHARED_DOWN, SUM, END]
    assert (first.rows, first.dispatch, first.down) == (4, 32, 1)
    assert (second.rows, second.dispatch, second.down) == (0, 0, 1)
    assert first.routes[:5].tolist() == [*(1 << ROUTE_BITS | token for token in range(4)), PADDING]


def tickets(plan: RankPlan, kind: int) -> dict[int, list[int]]:
    """First tickets of the groups that hold a block, by block."""
    found: dict[int, list[int]] = {}
    for group in plan.groups:
        if group.kind == kind:
            for block in range(group.block, group.block + group.blocks):
                found.setdefault(block, []).append(group.ticket)
    return found


@given(routings())
def test_every_tile_is_there_once_and_waits_only_for_lower_tickets(
    case: tuple[list[np.ndarray], Sizes, Segments],
):
    ids, sizes, segments = case
    for plan in plan_ranks(ids, sizes, segments):
        assert [one.ticket for one in plan.groups] == sorted({one.ticket for one in plan.groups})
        up, down = tickets(plan, UP), tickets(plan, DOWN)
        wanted = list(range(len(plan.blocks)))
        assert sorted(up) == sorted(down) == wanted
        assert all(len(found) == 1 for found in (*up.values(), *down.values()))
        assert all(up[block] < down[block] for block in wanted)
        assert plan.groups[-1].kind == END


def test_ids_of_another_shape_are_refused():
    sizes = Sizes(4, 2, 3, 64, 64, 0, 1)
    with pytest.raises(InputError, match="2 arrays of ids for 1 ranks"):
        plan_ranks([np.zeros((1, 2)), np.zeros((1, 2))], sizes, Segments(1, 2))
    for shape in ((5, 2), (4, 3), (4,)):
        with pytest.raises(InputError, match=r"allowed: \[0 to 4, 2\]"):
            plan_ranks([np.zeros(shape)], sizes, Segments(1, 2))
