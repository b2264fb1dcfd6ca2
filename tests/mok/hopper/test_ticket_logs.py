"""A log of tickets is held to the rules: silent on runs that keep them, loud on each broken one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_cases import cases
from protocol_settings import Routing, Rules, Setting
from protocol_simulation import Simulation

from mok.hopper.protocol import DISPATCH, DOWN, SUM, UP, Work
from mok.hopper.ticket_logs import DONE, DRAWN, STARTED, Record, Replay, replay


def run(
    case: tuple[tuple[Routing, ...], Setting], rules: Rules | None = None
) -> tuple[list[Record], list[Work]]:
    """The log of the last launch, and what its ranks had to do."""
    simulation = Simulation(*case, rules, keep_going=True).run()
    epoch = max(rank.epoch for rank in simulation.ranks)
    works = [rank.work for rank in simulation.ranks if rank.work is not None]
    return simulation.logs.get(epoch, []), works


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from((0, 2**32 - 100)), st.randoms(use_true_random=False))
def test_a_launch_that_keeps_the_rules_has_no_findings(
    case: tuple[tuple[Routing, ...], Setting], clock: int, rng: random.Random
) -> None:
    log, works = run(case)
    shifted = [(*words, (time + clock) % 2**32) for *words, time in log]
    rng.shuffle(shifted)
    result = replay(shifted, works, slack=0)  # type: ignore[arg-type]
    assert result.findings == ()
    assert result.records == len(log) == 3 * sum(work.tickets + work.dispatches for work in works)


def two_ranks(segments: tuple[int, ...] = (2, 2, 2)) -> tuple[tuple[Routing, ...], Setting]:
    """Two ranks that send each other all their rows."""
    blocks = sum(segments)
    rows = tuple(
        tuple(tuple((1 - rank, 4 * block + row) for row in range(4)) for block in range(blocks))
        for rank in range(2)
    )
    routing = Routing((2 * blocks,) * 2, rows, (segments,) * 2, 1)
    setting = Setting(2, 2, 2, False, 0, 0, 2, 2, 3, 1, False, "random", 0, 7)
    return (routing,), setting


def changed(
    log: list[Record], kind: int, ticket: int, event: int, change: Callable[[Record], list[Record]]
) -> list[Record]:
    """The log with the records of one event of rank 0 replaced."""
    found = []
    for record in log:
        mine = record[0] >> 24 == 0 and record[1] == kind << 28 | ticket
        found += change(record) if mine and record[2] >> 24 == event else [record]
    assert found != log
    return found


def moved(by: int) -> Callable[[Record], list[Record]]:
    return lambda record: [(record[0], record[1], record[2], record[3] + by)]


FAULTS: dict[str, tuple[int, int, int, Callable[[Record], list[Record]], str]] = {
    "lost": (UP, 3, DRAWN, lambda record: [], "rank 0: up ticket 3: never drawn"),
    "never done": (UP, 3, DONE, lambda record: [], "rank 0: up ticket 3: never done"),
    "twice": (UP, 3, STARTED, lambda r: [r, r], "up ticket 3: started 2 times, not 1"),
    "column": (UP, 3, DONE, lambda r: [(r[0], r[1], r[2] + 5, r[3])], "column 6; the ticket"),
    "kind": (UP, 3, DONE, lambda r: [(r[0], SUM << 28 | 3, *r[2:])], "sum ticket 3: column 1; the"),
    "two CTAs": (
        UP,
        3,
        DONE,
        lambda r: [(r[0] ^ 1, *r[1:])],
        "rank 0: up ticket 3: run by more than one CTA",
    ),
    "backwards": (UP, 3, DONE, moved(-10_000), "rank 0: up ticket 3: done before it was started"),
    "beyond": (UP, 3, DONE, lambda r: [r, (r[0], 999, r[2], r[3])], "ticket 999: beyond the end"),
    "event": (UP, 3, DONE, lambda r: [r, (r[0], r[1], 9 << 24, r[3])], "unknown event 9"),
    "event beyond": (UP, 3, DONE, lambda r: [r, (r[0], 999, 9 << 24, r[3])], "unknown event 9"),
    "rank": (UP, 3, DONE, lambda r: [r, (5 << 24, *r[1:])], "rank 5 CTA 0: up ticket 3: no such"),
    "rows": (UP, 3, STARTED, moved(-10_000), "started when ready[1] was 0; it waits for 2"),
    "hidden": (DOWN, 8, STARTED, moved(-10_000), "started when up[0] was 0; it waits for 2"),
    "ring of x": (DISPATCH, 5, STARTED, moved(-10_000), "started when up[0] was 0; it waits"),
    "ring of hidden": (UP, 12, STARTED, moved(-10_000), "started when down[0] was 0; it waits"),
    "results": (SUM, 24, STARTED, moved(-10_000), "started when results[0] was 0; it waits"),
    "order": (UP, 0, STARTED, moved(10_000), "started after ticket"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_broken_rule_is_found(fault: str) -> None:
    log, works = run(two_ranks())
    assert replay(log, works, slack=0).findings == ()
    kind, ticket, event, change, expected = FAULTS[fault]
    findings = replay(changed(log, kind, ticket, event, change), works, slack=0).findings
    assert any(expected in finding for finding in findings), findings


def test_a_sum_before_a_peers_last_result_is_found_if_ranks_share_a_clock() -> None:
    routings, setting = two_ranks()
    case = (routings, replace(setting, policy="starve", chosen=1))
    log, works = run(case, Rules(sum_waits_for_pushed=False))
    findings = replay(log, works, slack=0).findings
    assert findings
    assert all("started before the last result of rank 1" in finding for finding in findings)
    assert replay(log, works, slack=0, one_clock=False).findings == ()


def test_a_kernel_that_does_not_wait_for_its_ring_is_found() -> None:
    routings, setting = two_ranks()
    case = (routings, replace(setting, policy="newest", extra_h=-3))
    log, works = run(case, Rules(hidden_waits_for_ring=False))
    assert any("started when down[" in finding for finding in replay(log, works, slack=0).findings)


def test_slack_forgives_clocks_that_differ_by_no_more() -> None:
    log, works = run(two_ranks())
    begun = next(time for _, what, where, time in log if what == 3 and where >> 24 == STARTED)
    ready = max(
        time
        for who, what, where, time in log
        if who >> 24 == 0 and what in (DISPATCH << 28 | 2, DISPATCH << 28 | 3) and where >> 24 == 2
    )
    early = changed(log, UP, 3, STARTED, moved(ready - begun - 3))
    waits = [f for f in replay(early, works, slack=2).findings if "ready[1]" in f]
    assert len(waits) == 1
    assert not [f for f in replay(early, works, slack=3).findings if "ready[1]" in f]


def test_the_summary_says_how_often_rings_wrapped_and_how_long_tickets_waited() -> None:
    log, works = run(two_ranks((2, 2, 2, 2)))
    result = replay(log, works)
    assert (result.wraps_x, result.wraps_h) == ((3, 3), (1, 1))
    assert set(result.longest_ns) == {"dispatch", "up", "down", "sum"}
    assert all(waited > 0 and waited % 32 == 0 for waited in result.longest_ns.values())


def test_no_log_of_no_work_is_no_finding_and_no_log_of_work_is_many() -> None:
    nothing = Routing((0,), ((),), ((),), 1)
    setting = two_ranks()[1]
    log, works = run(((nothing,), setting))
    assert replay(log, works) == Replay((), 0, (0,), (0,), {})
    _, works = run(two_ranks())
    assert len(replay([], works).findings) == 3 * sum(w.tickets + w.dispatches for w in works)
