"""The protocol of the backward launch: explored by simulation, and every fault of it is found."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import protocol_settings
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_backward import Backward
from protocol_cases import backward_cases, check_all_once, find_faults, make_routing
from protocol_scheduler import Broken
from protocol_settings import BackwardSetting, Routing, Rules, Setting
from protocol_simulation import Simulation

from mok.errors import InputError
from mok.hopper.backward_protocol import (
    BACK_AGAIN,
    BACK_END,
    BACK_HIDDEN,
    BACK_INPUT,
    BACK_SUM,
    BACK_WEIGHTS,
    DISPATCH,
    PART_NUMBER,
    WHOLE,
    Columns,
    Group,
    Task,
    Work,
    check_ring,
    find_task,
    least_ring,
    list_segments,
    needs,
    order_groups,
)
from mok.hopper.layout import Segments
from mok.hopper.protocol import Need
from mok.hopper.schedule_model import cut_segments

QUICK = [HealthCheck.too_slow]
COLUMNS = Columns(2, 1, 2, 3, 1, 1, 2)
PLAIN = replace(protocol_settings.PLAIN, backward=BackwardSetting(Segments(2, 2), 2, COLUMNS))
# Short segments and many CTAs, so that tiles of several segments are at work together.
BUSY = replace(
    PLAIN,
    resident=6,
    grid=6,
    depth=4,
    backward=BackwardSetting(Segments(1, 1), 1, Columns(1, 1, 1, 1, 1, 1, 2)),
)


def routed(*rows: int, launches: int = 1) -> tuple[Routing, ...]:
    """One rank with so many rows of its own for each expert."""
    blocks: list[tuple[tuple[int, int] | None, ...]] = []
    route = 0
    for count in rows:
        mine: list[tuple[int, int] | None] = [(0, route + row) for row in range(count)]
        route += count
        mine += [None] * (-count % 4)
        blocks += [tuple(mine[first : first + 4]) for first in range(0, len(mine), 4)]
    tokens = -(-route // 2)
    routing = Routing((tokens,), (tuple(blocks),), ((),), launches, (rows,), backward=True)
    return (routing,)


# --- the rules


def work_of(rows: tuple[int, ...], saved: int, uncut: int = 2) -> Work:
    """One rank without a shared expert; blocks of 4 rows, segments of 1 to 2 blocks."""
    runs = cut_segments([-(-count // 4) for count in rows], Segments(1, 2), uncut)
    segments = list_segments(rows, runs, 4)
    columns = replace(COLUMNS, shared_again=0, shared_hidden=0, shared_weights=0)
    groups = order_groups(segments, columns, saved_blocks=saved, sums=1)
    ring = least_ring([segment.blocks for segment in segments])
    return Work(segments, groups, columns, ring, saved)


def test_tasks_and_what_they_wait_for() -> None:
    work = work_of((5, 0, 17, 4), saved=1)  # the third expert in parts of 2, 2 and 1 blocks
    assert [segment.blocks for segment in work.segments] == [2, 2, 2, 1, 1]
    assert (work.blocks, work.ring, work.dispatches) == (8, 4, 256)
    assert (work.used_targets, work.results) == ((7, 7, 7, 5, 5), 16)
    tasks = [find_task(work, ticket) for ticket in range(work.tickets)]
    by_kind = Counter(task.kind for task in tasks)
    assert by_kind == {
        BACK_AGAIN: 14,
        BACK_HIDDEN: 8,
        BACK_INPUT: 16,
        BACK_WEIGHTS: 15,
        BACK_SUM: 1,
    }
    assert find_task(work, work.tickets).kind == find_task(work, 999).kind == BACK_END
    ready = Need("ready", 0, 32)
    assert needs(work, Task(DISPATCH, 3, 0)) == ()
    assert needs(work, Task(DISPATCH, 7, 0)) == (Need("used", 1, 7),)
    hidden = [task for task in tasks if task.kind == BACK_HIDDEN]
    assert needs(work, hidden[0]) == (ready,)
    assert needs(work, hidden[1]) == (Need("ready", 1, 32), Need("again", 1, 2))
    parts = [
        (task.group.segment, task.group.part & PART_NUMBER, needs(work, task))
        for task in tasks
        if task.kind == BACK_WEIGHTS and task.column == 0 and task.group is not None
    ]
    assert parts == [
        (0, 0, (Need("hidden", 0, 2),)),
        (1, 1, (Need("hidden", 1, 2), Need("cut", 0, 0))),
        (2, 2, (Need("hidden", 2, 2), Need("cut", 0, 3))),
        (3, 3, (Need("hidden", 3, 1), Need("cut", 0, 6))),
        (4, 0, (Need("hidden", 4, 1),)),
    ]


@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.integers(0, 30),
    st.integers(0, 3),
    st.integers(2, 30),
)
def test_every_tile_has_one_ticket_and_waits_for_lower_ones_only(
    rows: list[int], saved: int, weights: int, uncut: int
) -> None:
    columns = replace(COLUMNS, weights=weights)
    runs = cut_segments([-(-count // 4) for count in rows], Segments(1, 2), uncut)
    segments = list_segments(rows, runs, 4)
    empty = [expert for expert, count in enumerate(rows) if count == 0]
    groups = order_groups(
        segments, columns, saved_blocks=saved, shared_blocks=2, sums=1, empty=empty
    )
    work = Work(segments, groups, columns, 99, saved)
    tasks = [find_task(work, ticket) for ticket in range(work.tickets)]
    assert len(set(tasks)) == len(tasks)
    blocks = work.blocks
    found = Counter(task.kind for task in tasks)
    assert found[BACK_HIDDEN] == blocks * columns.hidden
    assert found[BACK_AGAIN] == max(0, blocks - saved) * columns.again
    assert found[BACK_INPUT] == blocks * columns.input
    portions = [portion for segment in segments for portion in segment.portions]
    assert sum(portion.blocks for portion in portions) == blocks
    assert found[BACK_WEIGHTS] == weights * (len(portions) + len(empty))
    counters: Counter[tuple[str, int]] = Counter()
    done = Backward(PLAIN, Rules(), Simulation(routed(1), PLAIN).memory)
    for task in tasks:
        for need in needs(work, task):
            # Rows are no tickets of this queue.
            assert need.counter == "ready" or counters[need.counter, need.index] >= need.at_least
        counters.update(done.counted(task))


def test_rings_that_are_too_small_are_refused() -> None:
    assert least_ring(()) == 0
    assert least_ring((4,)) == 4
    assert least_ring((3, 2, 4)) == 6
    work = work_of((8, 8, 4), saved=99)
    check_ring(work)
    with pytest.raises(InputError, match=r"a ring of 3 blocks; segments of .* need 4 or more"):
        check_ring(replace(work, ring=3))


def test_a_part_of_weights_knows_its_expert_and_its_rows() -> None:
    segments = list_segments((4, 8, 8, 20), [(0, 5), (5, 3), (8, 2)], 4)
    assert [[(one.expert, one.block, one.blocks) for one in s.portions] for s in segments] == [
        [(1, 1, 2), (2, 3, 2), (0, 0, 1)],
        [(3, 5, 3)],
        [(3, 8, 2)],
    ]
    parts = [portion.part for segment in segments for portion in segment.portions]
    assert parts == [WHOLE] * 3 + [0x40000001, 0x80000002]
    groups = order_groups(segments, replace(COLUMNS, shared_weights=0), saved_blocks=99)
    assert groups[0] == Group(0, BACK_HIDDEN, 0, 5, segment=0)
    assert groups[-1].ticket == 10 + 20 + 3 * 5


# --- the protocol holds


@settings(max_examples=100, deadline=None, suppress_health_check=QUICK)
@given(backward_cases())
def test_every_launch_ends_and_every_gradient_comes_once(
    case: tuple[tuple[Routing, ...], Setting],
) -> None:
    check_all_once(*case)


@settings(max_examples=50, deadline=None, suppress_health_check=QUICK)
@given(backward_cases(local=False), st.integers(0, 400))
def test_when_a_rank_dies_the_others_end_and_none_has_a_wrong_result(
    case: tuple[tuple[Routing, ...], Setting], dies_at: int
) -> None:
    routings, setting = case
    simulation = Simulation(routings, setting).run(dead=setting.chosen, dies_at=dies_at)
    launches = sum(routing.launches for routing in routings)
    for rank in simulation.ranks:
        assert rank.index == setting.chosen or rank.ended == launches


def test_a_forward_a_backward_and_a_forward_of_ranks_that_run_ahead() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        first, last = (make_routing(rng, 3, 2, 2, launches=1, tokens=9) for _ in range(2))
        routings = (first, replace(first, backward=True), last)
        setting = replace(
            PLAIN,
            shared=seed % 2 == 0,
            seed=seed,
            policy=("starve", "favour", "random")[seed % 3],
            chosen=rng.randrange(3),
        )
        Simulation(routings, setting).run().check_end()


def test_the_random_cases_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        routing = make_routing(rng, 1 + seed % 3, 2, 2, launches=1, tokens=14, most_experts=5)
        simulation = Simulation((replace(routing, backward=True),), PLAIN)
        for rank in simulation.ranks:
            work = simulation.passes[True].make_work(rank, routing)
            parts = [group.part & PART_NUMBER for group in work.groups]
            weights = [group for group in work.groups if group.kind == BACK_WEIGHTS]
            seen["wraps twice"] += work.blocks > 2 * work.ring > 0
            seen["cut in three"] += max(parts) >= 3
            cut = {group.expert for group in weights if group.part & PART_NUMBER}
            seen["two cut"] += len(cut) > 1
            joined = Counter(group.segment for group in weights if group.blocks)
            seen["experts joined"] += max(joined.values(), default=0) > 1
            seen["experts without rows"] += any(not group.blocks for group in weights)
            seen["no rows"] += not work.blocks
    missing = [name for name, count in seen.items() if count < 3]
    assert len(seen) == 6
    assert not missing, seen


# --- every fault is found


def test_a_ring_of_less_than_two_segments_deadlocks() -> None:
    assert PLAIN.backward is not None
    for movers in (1, 3):
        plain = replace(PLAIN, movers=movers)
        Simulation(routed(8, 8, 8), plain).run().check_end()
        short = replace(plain, backward=replace(PLAIN.backward, extra_ring=-1))
        with pytest.raises(Broken, match="deadlock"):
            Simulation(routed(8, 8, 8), short).run()


@pytest.mark.parametrize(
    ("rules", "rows", "expected"),
    [
        (Rules(used_counts_weights=False), (4, 4, 4, 4), "overwritten: dispatch"),
        (Rules(x_waits_for_ring=False), (4, 4, 4, 4), "overwritten: dispatch"),
        (Rules(x_waits_for_ring=False), (4, 4, 4, 4), "overwritten: again"),
        (Rules(weights_wait_for_hidden=False), (4, 4), "early read: weights"),
        (Rules(input_waits_for_hidden=False), (4, 4), "early read: input"),
        (Rules(hidden_waits_for_again=False), (4, 4), "early read: hidden"),
        (Rules(parts_come_in_turn=False), (16,), "early read: weights"),
        (Rules(parts_come_in_turn=False), (12, 12), "overwritten: weights"),
        (Rules(weights_first=True), (4, 4), "deadlock"),
        (Rules(release_at_once=False), (4,), "deadlock"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_one_rank_is_found(rules: Rules, rows: tuple[int, ...], expected: str) -> None:
    caught: Counter[str] = Counter()
    for seed in range(16):
        setting = replace(BUSY, seed=seed)
        if expected == "deadlock":
            setting = replace(setting, resident=1, depth=1)
        Simulation(routed(*rows), setting).run().check_end()
        simulation = Simulation(routed(*rows), setting, rules, keep_going=expected != "deadlock")
        try:
            simulation.run()
        except Broken as error:
            caught[str(error).split()[0]] += 1
        caught.update({f"{v.kind}: {v.where.split()[0]}" for v in simulation.memory.violations})
    assert caught[expected] >= 3, caught


def test_shared_tiles_wait_for_what_they_read() -> None:
    shared = replace(BUSY, shared=True)
    case = routed(8, 8)
    Simulation(case, shared).run().check_end()
    for rules, where in (
        (Rules(hidden_waits_for_again=False), "shared hidden"),
        (Rules(input_waits_for_hidden=False, weights_wait_for_hidden=False), "shared input"),
        (Rules(weights_wait_for_hidden=False), "shared weights"),
    ):
        found = []
        for seed in range(12):
            simulation = Simulation(case, replace(shared, seed=seed), rules, keep_going=True).run()
            found += [one.where for one in simulation.memory.violations]
        assert any(one.startswith(where) for one in found), where


MIXED = (False, True, False, True)


def test_the_protocol_is_clean_where_its_faults_are_looked_for() -> None:
    assert not find_faults(Rules(), PLAIN, backward=MIXED, runs=30)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(sum_waits_for_pushed=False), "early read: sum"),
        (Rules(dispatch_waits_for_entered=False), "early read: dispatch"),
        # A backward pushes d_x where the sum of the forward before still reads results.
        (Rules(dispatch_waits_for_entered=False), "overwritten: input"),
        (Rules(flags_compare_at_least=False), "deadlock"),
        (Rules(pushed_told_by_last_tile=False), "deadlock"),
        (Rules(counters_zeroed_by_enter=False), "not once: sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_between_ranks_is_found(rules: Rules, expected: str) -> None:
    keep_going = expected != "deadlock"
    kinds = find_faults(rules, PLAIN, backward=MIXED, runs=40, keep_going=keep_going)
    assert kinds[expected] >= 3, kinds
