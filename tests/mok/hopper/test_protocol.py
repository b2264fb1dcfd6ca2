"""The protocol of the forward launch: explored by simulation, and every fault of it is found."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_cases import cases, check_all_once, cut, find_faults, make_routing
from protocol_scheduler import Broken
from protocol_settings import PLAIN, Routing, Rules, Setting
from protocol_simulation import Simulation

from mok.errors import InputError
from mok.hopper.protocol import (
    DOWN,
    END,
    SHARED_DOWN,
    SHARED_UP,
    SUM,
    UP,
    Group,
    Task,
    Work,
    check_rings,
    find_task,
    least_rings,
    order_groups,
)

QUICK = [HealthCheck.too_slow]


# --- the rules


def test_groups_come_in_the_order_of_the_contract() -> None:
    groups = order_groups(
        (3, 2, 4), shared_blocks=2, sums=5, columns_up=2, columns_down=3, columns_shared=1
    )
    assert groups == (
        Group(0, SHARED_UP, 0, 2),
        Group(2, SHARED_DOWN, 0, 2),
        Group(8, UP, 0, 3),
        Group(14, UP, 3, 2),
        Group(18, DOWN, 0, 3),
        Group(27, UP, 5, 4),
        Group(35, DOWN, 3, 2),
        Group(41, DOWN, 5, 4),
        Group(53, SUM, 0, 5),
        Group(58, END, 0, 1),
    )
    work = Work(groups, 4, 12, 2, 3, 1)
    assert (work.segments, work.blocks, work.results, work.tickets) == ((3, 2, 4), 9, 33, 58)
    assert find_task(work, 17) == Task(UP, 4, 1)
    assert find_task(work, 57) == Task(SUM, 4, 0)
    assert find_task(work, 58) == find_task(work, 99) == Task(END, 0, 0)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 9), st.randoms())
def test_every_tile_has_one_ticket(
    blocks: int, most: int, shared: int, sums: int, rng: random.Random
) -> None:
    groups = order_groups(
        cut(rng, blocks, most),
        shared_blocks=shared,
        sums=sums,
        columns_up=3,
        columns_down=2,
        columns_shared=4,
    )
    work = Work(groups, most, 2 * most, 3, 2, 4)
    found = Counter(find_task(work, ticket) for ticket in range(work.tickets))
    wanted = {(UP, blocks, 3), (DOWN, blocks, 2), (SHARED_UP, shared, 4), (SHARED_DOWN, shared, 2)}
    assert found == Counter(
        Task(kind, block, column)
        for kind, count, columns in wanted | {(SUM, sums, 1)}
        for block in range(count)
        for column in range(columns)
    )


def test_rings_that_are_too_small_are_refused() -> None:
    assert least_rings(()) == (0, 0)
    assert least_rings((4,)) == (4, 4)
    assert least_rings((3, 2, 4)) == (4, 6)
    groups = order_groups(
        (3, 2, 4), shared_blocks=0, sums=1, columns_up=1, columns_down=1, columns_shared=0
    )
    check_rings(Work(groups, 4, 6, 1, 1))
    with pytest.raises(InputError, match=r"ring_x = 3 blocks; segments of .* need 4 or more"):
        check_rings(Work(groups, 3, 6, 1, 1))
    with pytest.raises(InputError, match=r"ring_h = 5 blocks; segments of .* need 6 or more"):
        check_rings(Work(groups, 4, 5, 1, 1))


# --- the protocol holds


@settings(max_examples=200, deadline=None, suppress_health_check=QUICK)
@given(cases())
def test_every_launch_ends_and_nothing_is_read_or_written_out_of_turn(
    case: tuple[tuple[Routing, ...], Setting],
) -> None:
    check_all_once(*case)


@settings(max_examples=80, deadline=None, suppress_health_check=QUICK)
@given(cases(local=False))
def test_a_rank_whose_peers_have_pushed_need_not_wait_until_they_have_pulled(
    case: tuple[tuple[Routing, ...], Setting],
) -> None:
    """FLAG_PULLED says nothing that FLAG_PUSHED does not: who has pushed all has pulled all."""
    Simulation(*case, Rules(exit_waits_for_pulled=False)).run().check_end()


@settings(max_examples=100, deadline=None, suppress_health_check=QUICK)
@given(cases(local=False), st.integers(0, 400))
def test_when_a_rank_dies_the_others_end_and_none_has_a_wrong_result(
    case: tuple[tuple[Routing, ...], Setting], dies_at: int
) -> None:
    routings, setting = case
    dead = setting.chosen
    simulation = Simulation(routings, setting).run(dead=dead, dies_at=dies_at)
    assert all(one.rank == dead for one in simulation.scheduler.running)
    launches = sum(routing.launches for routing in routings)
    for rank in simulation.ranks:
        assert rank.index == dead or rank.ended == launches


@settings(max_examples=100, deadline=None, suppress_health_check=QUICK)
@given(cases(local=False))
def test_when_ranks_give_up_too_early_none_of_the_others_has_a_wrong_result(
    case: tuple[tuple[Routing, ...], Setting],
) -> None:
    Simulation(*case).run(hasty=0.003)


def test_the_random_cases_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(80):
        rng = random.Random(seed)
        most = rng.randint(1, 3)
        routing = make_routing(rng, 3, 2, most, launches=1, tokens=9)
        for segments in routing.segments:
            least_x, least_h = least_rings(segments)
            seen["x wraps twice"] += sum(segments) > 2 * least_x > 0
            seen["hidden wraps"] += sum(segments) > least_h > 0
            seen["no rows"] += not segments
        seen["no tokens"] += 0 in routing.tokens
        seen["nobody routes"] += not any(routing.rows)
        seen["unequal tokens"] += len(set(routing.tokens)) > 1
        seen["one rank has all"] += sum(map(bool, routing.rows)) == 1
        seen["padding"] += any(None in b for blocks in routing.rows for b in blocks)
    missing = [name for name, count in seen.items() if count < 3]
    assert len(seen) == 8
    assert not missing


# --- every fault is found


def routed(blocks: int, segments: tuple[int, ...], launches: int = 1) -> tuple[Routing, ...]:
    """One rank, `blocks` blocks of its own rows."""
    rows = tuple(tuple((0, 4 * block + row) for row in range(4)) for block in range(blocks))
    return (Routing((2 * blocks,), (rows,), (segments,), launches),)


@pytest.mark.parametrize("movers", [1, 3])
def test_a_ring_one_block_below_the_least_deadlocks(movers: int) -> None:
    case = routed(7, (3, 2, 2))
    plain = replace(PLAIN, movers=movers)
    Simulation(case, plain).run().check_end()
    for short in (replace(plain, extra_x=-1), replace(plain, extra_h=-1)):
        with pytest.raises(Broken, match="deadlock"):
            Simulation(case, short).run()


def test_a_ring_that_nobody_waits_for_is_overwritten() -> None:
    case = routed(7, (3, 2, 2))
    busy = replace(PLAIN, resident=3, grid=3, policy="newest")
    Simulation(case, busy).run().check_end()
    with pytest.raises(Broken, match="overwritten: dispatch"):
        Simulation(case, replace(busy, extra_x=-1), Rules(x_waits_for_ring=False)).run()
    with pytest.raises(Broken, match="overwritten: up"):
        Simulation(case, replace(busy, extra_h=-3), Rules(hidden_waits_for_ring=False)).run()


def test_a_static_order_of_tasks_deadlocks_when_not_all_ctas_are_resident() -> None:
    case = routed(4, (2, 2))
    few, all_there = replace(PLAIN, grid=3), replace(PLAIN, grid=3, resident=3)
    Simulation(case, few).run().check_end()
    Simulation(case, all_there, Rules(tickets=False)).run().check_end()
    with pytest.raises(Broken, match="deadlock"):
        Simulation(case, few, Rules(tickets=False)).run()


def test_down_before_up_deadlocks() -> None:
    with pytest.raises(Broken, match="deadlock"):
        Simulation(routed(4, (2, 2)), PLAIN, Rules(down_first=True)).run()


def test_a_tile_that_is_released_only_with_the_next_one_deadlocks() -> None:
    with pytest.raises(Broken, match="deadlock"):
        Simulation(routed(4, (2, 2)), PLAIN, Rules(release_at_once=False)).run()


def test_ranks_of_one_launch_deadlock_if_one_has_no_resident_cta() -> None:
    together = replace(PLAIN, local=True, grid=2)
    assert not find_faults(Rules(), replace(together, resident=3), runs=20)
    assert find_faults(Rules(), replace(together, resident=2), runs=20)["deadlock"] > 5


def test_the_protocol_is_clean_where_its_faults_are_looked_for() -> None:
    assert not find_faults(Rules(), PLAIN)
    assert not find_faults(Rules(), replace(PLAIN, resident=2, grid=3))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(sum_waits_for_pushed=False), "early read: sum"),
        (Rules(dispatch_waits_for_entered=False), "early read: dispatch"),
        # A peer pushes while the sum of the launch before still reads.
        (Rules(dispatch_waits_for_entered=False), "overwritten: down"),
        (Rules(sum_waits_for_pushed=False, exit_waits_for_pulled=False), "overwritten: x"),
        (Rules(ids_buffers=1), "overwritten: ids"),
        (Rules(flags_are_epochs=False), "deadlock"),
        (Rules(flags_compare_at_least=False), "deadlock"),
        (Rules(pushed_told_by_last_tile=False), "deadlock"),
        (Rules(counters_zeroed_by_enter=False), "not once: sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_between_ranks_is_found(rules: Rules, expected: str) -> None:
    kinds = find_faults(rules, PLAIN, keep_going=expected != "deadlock")
    assert kinds[expected] >= 3, kinds


def test_a_failed_rank_that_still_tells_its_peers_gives_them_wrong_results() -> None:
    caught = 0
    for seed in range(120):
        rng = random.Random(seed)
        routings = (make_routing(rng, 3, 2, 2, launches=2, tokens=3),)
        rules = Rules(failed_ranks_stay_silent=False)
        try:
            Simulation(routings, replace(PLAIN, seed=seed), rules).run(hasty=0.01)
        except Broken:
            caught += 1
    assert caught >= 3
