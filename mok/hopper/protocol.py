"""The order rules of the forward launch: tickets, and what each one waits for.

It exists because the protocol between warps, CTAs and ranks cannot be tested by running it: a fault
needs a schedule that a GPU may never choose. Tests explore these rules in a discrete simulation;
mok/hopper/ticket_logs.py holds what a GPU did to the same rules. Words and layout are those of
csrc/moe/rank.cuh. Needs neither torch nor a GPU, and knows nothing of values.

Why no launch can get stuck, for any number of resident CTAs from one per rank up: dispatch and
tiles wait for lower tickets of their own rank and for peers to have entered; sums, which come last,
also for the tiles of peers; and a peer enters when its launch before has ended. So the earliest
ticket that is not done can run. That holds if rings are not smaller than `least_rings` says: the
tickets of a segment come column by column, and a block's place is free only after its last
column.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mok.errors import InputError

UP, DOWN, SHARED_UP, SHARED_DOWN, SUM, END = range(6)
DISPATCH = 8
KINDS = {UP: "up", DOWN: "down", SHARED_UP: "shared up", SHARED_DOWN: "shared down"} | {
    SUM: "sum",
    END: "end",
    DISPATCH: "dispatch",
}
DISPATCH_PER_BLOCK = 32  # 128 rows, 4 a ticket


@dataclass(frozen=True)
class Group:
    """A run of tickets of one kind, as the device's table has it."""

    ticket: int
    kind: int
    block: int
    blocks: int


@dataclass(frozen=True)
class Task:
    """What a ticket stands for. block: of routed or shared rows; for a sum its number."""

    kind: int
    block: int
    column: int


@dataclass(frozen=True)
class Need:
    """A wait: `counter` at `index` must have reached `at_least`, counted in finished tickets.

    counter: "ready" (dispatch tickets of a block), "up", "down", "shared" (tiles of a block),
    "results" (all tiles that write results; index 0).
    """

    counter: str
    index: int
    at_least: int


@dataclass(frozen=True)
class Work:
    """One rank's launch: its table of groups, rings in blocks, and column tiles of each kind.

    columns_up = ceil(I / 128), columns_shared = ceil(S / 128), columns_down = ceil(H / 256).
    """

    groups: tuple[Group, ...]
    ring_x: int
    ring_h: int
    columns_up: int
    columns_down: int
    columns_shared: int = 0
    dispatch_per_block: int = DISPATCH_PER_BLOCK

    @property
    def tickets(self) -> int:
        """Compute tickets before the end."""
        return self.groups[-1].ticket

    @property
    def segments(self) -> tuple[int, ...]:
        """Blocks of each segment, in the order of their first tickets."""
        return tuple(group.blocks for group in self.groups if group.kind == UP)

    @property
    def blocks(self) -> int:
        """Blocks of routed rows."""
        return sum(self.segments)

    @property
    def results(self) -> int:
        """Tiles that write results: what "results" ends at."""
        down = sum(group.blocks for group in self.groups if group.kind in (DOWN, SHARED_DOWN))
        return down * self.columns_down

    @property
    def dispatches(self) -> int:
        """Dispatch tickets."""
        return self.blocks * self.dispatch_per_block


def order_groups(
    segments: Sequence[int],
    *,
    shared_blocks: int,
    sums: int,
    columns_up: int,
    columns_down: int,
    columns_shared: int,
) -> tuple[Group, ...]:
    """The table of groups: shared up and down, up 0, up 1, down 0, up 2, down 1, ..., sum, end.

    segments: blocks of each, positive. A kind without tickets has no group, the end always has.
    """
    starts = [sum(segments[:index]) for index in range(len(segments))]
    runs = [(SHARED_UP, 0, shared_blocks, columns_shared)]
    runs.append((SHARED_DOWN, 0, shared_blocks, columns_down))
    for index in range(len(segments) + 1):
        if index < len(segments):
            runs.append((UP, starts[index], segments[index], columns_up))
        if index > 0:
            runs.append((DOWN, starts[index - 1], segments[index - 1], columns_down))
    runs.append((SUM, 0, sums, 1))
    groups: list[Group] = []
    ticket = 0
    for kind, block, blocks, columns in runs:
        if blocks * columns:
            groups.append(Group(ticket, kind, block, blocks))
            ticket += blocks * columns
    return (*groups, Group(ticket, END, 0, 1))


def least_rings(segments: Sequence[int]) -> tuple[int, int]:
    """The smallest (ring_x, ring_h) in blocks that cannot deadlock with one resident CTA.

    x: a segment, because its first column needs all its blocks before its last column frees one.
    hidden: two neighbouring segments, because up i + 1 comes before down i. A third segment is not
    needed for progress; it keeps up i + 1 from waiting for the tail of down i - 1.
    """
    pairs = [left + right for left, right in pairwise(segments)]
    return max(segments, default=0), max([*pairs, *segments], default=0)


def check_rings(work: Work) -> None:
    """Raise InputError if a ring is smaller than `least_rings`."""
    for name, given, least in zip(
        ("ring_x", "ring_h"), (work.ring_x, work.ring_h), least_rings(work.segments), strict=True
    ):
        if given < least:
            raise InputError(
                f"{name} = {given} blocks; segments of {work.segments} blocks need {least} or "
                "more, or the launch can wait for itself. Use a larger ring or smaller segments."
            )


def find_task(work: Work, ticket: int) -> Task:
    """The task of a compute ticket; of kind END from the end on."""
    place = bisect_right(work.groups, ticket, key=lambda group: group.ticket) - 1
    group = work.groups[place]
    if group.kind == END:
        return Task(END, 0, 0)
    column, block = divmod(ticket - group.ticket, group.blocks)
    return Task(group.kind, group.block + block, column)


def needs(work: Work, task: Task) -> tuple[Need, ...]:
    """The waits of a task on its own rank. What it waits for from peers:

    dispatch: ENTERED of each rank that its rows come from. sum: PUSHED of every peer, also of those
    that had no row of this rank; since a peer pushes last what it pulled first, this is also what
    lets the next launch overwrite x.
    """
    block = task.block
    found: list[Need] = []
    if task.kind == DISPATCH and block >= work.ring_x:
        found.append(Need("up", block - work.ring_x, work.columns_up))
    elif task.kind == UP:
        found.append(Need("ready", block, work.dispatch_per_block))
        if block >= work.ring_h:
            found.append(Need("down", block - work.ring_h, work.columns_down))
    elif task.kind == DOWN:
        found.append(Need("up", block, work.columns_up))
    elif task.kind == SHARED_DOWN:
        found.append(Need("shared", block, work.columns_shared))
    elif task.kind == SUM:
        found.append(Need("results", 0, work.results))
    return tuple(found)


def counted(task: Task) -> tuple[tuple[str, int], ...]:
    """The counters (name, index) that a finished task adds one to."""
    if task.kind == DISPATCH:
        return (("ready", task.block),)
    if task.kind == UP:
        return (("up", task.block),)
    if task.kind == SHARED_UP:
        return (("shared", task.block),)
    if task.kind == DOWN:
        return (("down", task.block), ("results", 0))
    return (("results", 0),) if task.kind == SHARED_DOWN else ()
