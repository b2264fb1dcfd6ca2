"""What a debug build of the forward launch logs of its tickets, held to the order rules.

It exists because the simulation of the protocol shows that the rules are right, not that the kernel
keeps them. Finds: a ticket never, twice or wrongly run, one that started before what it waits for
was done, a CTA that took tickets out of order. Refuses nothing: a log that breaks rules is what it
is for.

The log has one record of four 32-bit words for each event:

    rank << 24 | cta,  kind << 28 | ticket,  event << 24 | column,  ticks

ticks are the low 32 bits of globaltimer / 32 ns; kind is GROUP_* of rank.cuh or `DISPATCH`; column
is the column tile, 0 for dispatch and sums; ticket is the number in its queue. Events of a ticket:
`DRAWN`, read after it was drawn and before its first wait; `STARTED`, read after its waits were
satisfied and before anything is loaded; `DONE`, read when all warps are done with it and before its
release. Times read on these sides of
the waits make the rules hold whatever happens in between. Tickets from the end on are not logged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mok.hopper.protocol import (
    DISPATCH,
    KINDS,
    SUM,
    Need,
    Task,
    Work,
    counted,
    find_task,
    needs,
)

DRAWN, STARTED, DONE = range(3)
EVENTS = ("drawn", "started", "done")

Record = tuple[int, int, int, int]


@dataclass(frozen=True)
class Replay:
    """What a log says. findings: broken rules, in words; none if the launch kept them all.

    wraps_x, wraps_h: per rank, how often a ring began anew. longest_ns: per kind, the longest wait,
    from drawn to started.
    """

    findings: tuple[str, ...]
    records: int
    wraps_x: tuple[int, ...]
    wraps_h: tuple[int, ...]
    longest_ns: dict[str, int]


@dataclass(frozen=True)
class _Event:
    rank: int
    cta: int
    kind: int
    ticket: int
    event: int
    column: int
    time: int

    def __str__(self) -> str:
        kind = KINDS.get(self.kind, f"kind {self.kind}")
        return f"rank {self.rank} CTA {self.cta}: {kind} ticket {self.ticket}"


_Seen = dict[int, list[_Event]]  # by event, in order of time


def replay(
    log: Sequence[Record], works: Sequence[Work], *, one_clock: bool = True, slack: int = 2
) -> Replay:
    """Hold the log of one launch of all ranks to the rules. See the module for its records.

    log: in any order; all of it, since what is missing is a finding. works: of each rank, with the
    groups read back from its table. one_clock: the ranks share a GPU, so that their times can be
    compared. slack: ticks of 32 ns by which the clocks of two multiprocessors may differ. That a
    peer had entered before its rows were read cannot be seen here: it is no ticket.
    """
    events = _unpacked(log)
    findings = [f"{event}: no such rank" for event in events if event.rank >= len(works)]
    times: dict[tuple[int, bool, int], _Seen] = {}
    for event in events:
        seen = times.setdefault((event.rank, event.kind == DISPATCH, event.ticket), {})
        if event.event >= len(EVENTS):
            findings.append(f"{event}: unknown event {event.event}")
        else:
            seen.setdefault(event.event, []).append(event)
    longest: dict[str, int] = {}
    last_results: list[int | None] = []
    for rank, work in enumerate(works):
        tasks = dict(_tasks(work))
        finished: dict[tuple[str, int], list[int]] = {}
        for key, task in tasks.items():
            seen = times.get((rank, *key), {})
            findings += _of_one_ticket(rank, key[1], task, seen, slack)
            if DONE in seen:
                for counter in counted(task):
                    finished.setdefault(counter, []).append(seen[DONE][-1].time)
            if DRAWN in seen and STARTED in seen:
                name = KINDS[task.kind]
                waited = (seen[STARTED][0].time - seen[DRAWN][0].time) * 32
                longest[name] = max(longest.get(name, 0), waited)
        for moments in finished.values():
            moments.sort()
        for (of_rank, dispatch, ticket), seen in times.items():
            if seen and of_rank == rank and (dispatch, ticket) not in tasks:
                findings.append(f"{next(iter(seen.values()))[0]}: beyond the end")
        for key, task in tasks.items():
            for begun in times.get((rank, *key), {}).get(STARTED, []):
                findings += _waits(begun, needs(work, task), finished, slack)
        last_results.append(max(finished.get(("results", 0), []), default=None))
    if one_clock:
        findings += _sums_after_peers(events, last_results, slack)
    findings += _in_order(events)
    return Replay(
        tuple(findings),
        len(events),
        tuple(max(0, work.blocks - 1) // max(1, work.ring_x) for work in works),
        tuple(max(0, work.blocks - 1) // max(1, work.ring_h) for work in works),
        longest,
    )


def _unpacked(log: Sequence[Record]) -> list[_Event]:
    """Events in order of time; the clock's 32 bits are continued across their wrap."""
    origin = log[0][3] if log else 0
    events = []
    for who, what, where, tick in log:
        since = (tick - origin + 2**31) % 2**32 - 2**31
        split = (what >> 28, what & 0xFFFFFFF, where >> 24, where & 0xFFFFFF)
        events.append(_Event(who >> 24, who & 0xFFFFFF, *split, since))
    return sorted(events, key=lambda event: (event.time, event.event))


def _tasks(work: Work) -> Iterator[tuple[tuple[bool, int], Task]]:
    for ticket in range(work.tickets):
        yield (False, ticket), find_task(work, ticket)
    for ticket in range(work.dispatches):
        yield (True, ticket), Task(DISPATCH, ticket // work.dispatch_per_block, 0)


def _of_one_ticket(rank: int, ticket: int, task: Task, seen: _Seen, slack: int) -> Iterator[str]:
    name = f"rank {rank}: {KINDS[task.kind]} ticket {ticket}"
    for event in (DRAWN, STARTED, DONE):
        times = len(seen.get(event, []))
        if times == 0:
            yield f"{name}: never {EVENTS[event]}"
        elif times != 1:
            yield f"{name}: {EVENTS[event]} {times} times, not 1"
    logged = [one for events in seen.values() for one in events]
    for one in logged:
        if (one.kind, one.column) != (task.kind, task.column):
            yield f"{one}: column {one.column}; the ticket stands for {task}"
    if len({one.cta for one in logged}) > 1:
        yield f"{name}: run by more than one CTA"
    for before, after in ((DRAWN, STARTED), (STARTED, DONE)):
        if before in seen and after in seen and seen[after][0].time + slack < seen[before][-1].time:
            yield f"{name}: {EVENTS[after]} before it was {EVENTS[before]}"


def _waits(
    begun: _Event,
    waits: Sequence[Need],
    finished: dict[tuple[str, int], list[int]],
    slack: int,
) -> Iterator[str]:
    for need in waits:
        done = bisect_right(finished.get((need.counter, need.index), []), begun.time + slack)
        if done < need.at_least:
            yield (
                f"{begun}: started when {need.counter}[{need.index}] was {done}; "
                f"it waits for {need.at_least}"
            )


def _sums_after_peers(
    events: Sequence[_Event], last_results: Sequence[int | None], slack: int
) -> Iterator[str]:
    for event in events:
        if event.kind != SUM or event.event != STARTED:
            continue
        for rank, last in enumerate(last_results):
            if rank != event.rank and last is not None and last > event.time + slack:
                yield f"{event}: started before the last result of rank {rank}"


def _in_order(events: Sequence[_Event]) -> Iterator[str]:
    """A CTA's compute tickets are started in the order of their numbers."""
    latest: dict[tuple[int, int], int] = {}
    for event in events:
        if event.event == STARTED and event.kind != DISPATCH:
            place = (event.rank, event.cta)
            if event.ticket < latest.get(place, -1):
                yield f"{event}: started after ticket {latest[place]}"
            latest[place] = event.ticket
