"""Schedules as pure functions: every route once, canonical order, the same at every EP degree."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.dispatch import (
    arrival_order,
    clean_topk,
    combine,
    dispatch,
    give_back,
    make_schedule,
    plan_sends,
)


@st.composite
def routings(draw):
    """Cleaned ids [T, K], the number of experts, and the tokens of each of P ranks."""
    experts = draw(st.sampled_from([1, 2, 4, 8]))
    slots = draw(st.integers(1, min(4, experts)))
    tokens = draw(st.integers(0, 12))
    rows = [
        draw(st.lists(st.integers(0, experts - 1), min_size=slots, max_size=slots, unique=True))
        for _ in range(tokens)
    ]
    holes = draw(st.lists(st.booleans(), min_size=tokens * slots, max_size=tokens * slots))
    topk = torch.tensor(rows, dtype=torch.int64).reshape(tokens, slots)
    topk[torch.tensor(holes, dtype=torch.bool).reshape(tokens, slots)] = -1
    ranks = draw(st.sampled_from([p for p in (1, 2, 4) if experts % p == 0]))
    borders = sorted(draw(st.integers(0, tokens)) for _ in range(ranks - 1))
    return topk, experts, [0, *borders, tokens]


def _rows_of_experts(topk, experts, borders):
    """(token, slot) of the canonical rows of each expert, as P ranks would arrange them."""
    ranks = len(borders) - 1
    local = experts // ranks
    plans = [plan_sends(topk[a:b], local, ranks) for a, b in pairwise(borders)]
    result = []
    for rank in range(ranks):
        arrived = []
        for source, plan in enumerate(plans):
            ends = plan.counts_PE.sum(1).cumsum(0)
            start = int(ends[rank - 1]) if rank else 0
            stop = int(ends[rank])
            token = plan.token_S[start:stop] + borders[source]
            arrived += list(zip(token.tolist(), plan.slot_S[start:stop].tolist(), strict=True))
        counts_PE = torch.stack([plan.counts_PE[rank] for plan in plans])
        rows = [arrived[index] for index in arrival_order(counts_PE).tolist()]
        for count in counts_PE.sum(0).tolist():
            result.append(rows[:count])
            rows = rows[count:]
        assert rows == []
    return result


@settings(deadline=None, max_examples=60, derandomize=True)
@given(routings())
def test_every_route_once_in_canonical_order_at_every_degree(routing):
    topk, experts, borders = routing
    expected = [
        [tuple(place) for place in torch.nonzero(topk == expert).tolist()]
        for expert in range(experts)
    ]
    assert _rows_of_experts(topk, experts, borders) == expected


@settings(deadline=None, max_examples=60, derandomize=True)
@given(routings())
def test_positions_point_back_at_their_routes(routing):
    topk, experts, _ = routing
    plan = plan_sends(topk, experts, 1)
    assert torch.equal(plan.position_TK >= 0, topk >= 0)
    tokens, slots = torch.nonzero(topk >= 0, as_tuple=True)
    position = plan.position_TK[tokens, slots]
    assert torch.equal(plan.token_S[position], tokens)
    assert torch.equal(plan.slot_S[position], slots)
    assert torch.equal(topk[plan.token_S, plan.slot_S], topk[plan.token_S, plan.slot_S].sort()[0])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(routings())
def test_on_one_rank_send_order_is_canonical(routing):
    topk, experts, _ = routing
    schedule = make_schedule(topk, experts, None)
    rows = torch.arange(schedule.num_rows)
    assert torch.equal(schedule.arrival_R, rows)
    assert give_back(dispatch(rows, schedule, None), schedule, None) is rows


def test_bad_ids_become_unused():
    topk = torch.tensor([[0, 1, 0], [4, -1, -1], [-2, 3, 3], [2, 2, 2]])
    cleaned, bad = clean_topk(topk, 4)
    assert cleaned.tolist() == [[0, 1, -1], [-1, -1, -1], [-1, 3, -1], [2, -1, -1]]
    assert bad.int().tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 1], [0, 1, 1]]


def test_combine_rounds_product_and_sum_separately_and_skips_unused_slots():
    topk = torch.tensor([[1, 0], [0, -1], [-1, -1]])
    schedule = make_schedule(topk, 2, None)
    values = torch.tensor([[1.0078125], [3.0], [0.10009765625]]).bfloat16()
    weights = torch.tensor([[0.3, 0.7], [0.9, 5.0], [2.0, 2.0]])
    start = torch.tensor([[0.5], [-0.25], [-0.0]]).bfloat16()
    got = combine(start, values, schedule, weights)
    by_slot = {
        (t, k): values[schedule.position_TK[t, k]].float() for t, k in [(0, 0), (0, 1), (1, 0)]
    }
    first = start[0].float() + weights[0, 0] * by_slot[0, 0]
    first = first + weights[0, 1] * by_slot[0, 1]
    second = start[1].float() + weights[1, 0] * by_slot[1, 0]
    assert torch.equal(got[0], first.bfloat16())
    assert torch.equal(got[1], second.bfloat16())
    assert torch.signbit(got[2]).item()
