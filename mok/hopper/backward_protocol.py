"""The order rules of the backward launch: its groups, and what each of their tickets waits for.

It exists for the same reason as mok/hopper/protocol.py, whose words it uses: tests explore these
rules in a simulation, and mok/hopper/backward_model.py has the device's tables from them. Kinds
and parts are those of csrc/moe/backward/record.cuh. Needs neither torch nor a GPU, and knows
nothing of values.

Why no launch can get stuck, for any number of resident CTAs from one per rank up: hidden tiles of a
segment wait for their rows, which wait for a place in the ring, which waits for the segment two or
more before, whose tickets are lower. All else waits for lower tickets of its own rank or, as in the
forward, for peers. That holds if two neighbouring segments fit into the ring (`least_ring`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mok.errors import InputError
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
    PART_NUMBER,
)
from mok.hopper.protocol import DISPATCH, DISPATCH_PER_BLOCK, Need

WHOLE = PART_FIRST | PART_LAST
KINDS = {
    BACK_HIDDEN: "hidden",
    BACK_INPUT: "input",
    BACK_WEIGHTS: "weights",
    BACK_SHARED_HIDDEN: "shared hidden",
    BACK_SHARED_INPUT: "shared input",
    BACK_SHARED_WEIGHTS: "shared weights",
    BACK_AGAIN: "again",
    BACK_SHARED_AGAIN: "shared again",
    BACK_SUM: "sum",
    BACK_END: "end",
    DISPATCH: "dispatch",
}


@dataclass(frozen=True)
class Columns:
    """Tiles of a block's columns, and of one expert's weights.

    again = ceil(I / 128), hidden = ceil(I / 256), input = ceil(H / 256), and the shared expert's.
    weights: 0 if none of their gradients is wanted. shared_again: 0 if nothing is computed again.
    """

    again: int
    hidden: int
    input: int
    weights: int
    shared_again: int = 0
    shared_hidden: int = 0
    shared_weights: int = 0


@dataclass(frozen=True)
class Group:
    """A run of tickets of one kind, as the device's table has it; see record.cuh."""

    ticket: int
    kind: int
    block: int
    blocks: int
    segment: int = 0
    wanted: int = 0
    expert: int = 0
    part: int = 0


@dataclass(frozen=True)
class Portion:
    """Rows of one expert in a segment: blocks from `block` on. part: as in Group."""

    expert: int
    block: int
    blocks: int
    part: int


@dataclass(frozen=True)
class Segment:
    """Blocks from `block` on. portions: of the experts in it, in the order of their WEIGHTS."""

    block: int
    blocks: int
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class Task:
    """What a ticket stands for. column: of a weights' task its tile. group: None for dispatch."""

    kind: int
    block: int
    column: int
    group: Group | None = None


@dataclass(frozen=True)
class Work:
    """One rank's launch: its segments, its table of groups, and the ring in blocks."""

    segments: tuple[Segment, ...]
    groups: tuple[Group, ...]
    columns: Columns
    ring: int
    saved_blocks: int
    dispatch_per_block: int = DISPATCH_PER_BLOCK

    @property
    def tickets(self) -> int:
        """Compute tickets before the end."""
        return self.groups[-1].ticket

    @property
    def blocks(self) -> int:
        """Blocks of routed rows."""
        return sum(segment.blocks for segment in self.segments)

    @property
    def results(self) -> int:
        """Tiles that write gradients of rows: what "results" ends at."""
        kinds = (BACK_INPUT, BACK_SHARED_INPUT)
        blocks = sum(group.blocks for group in self.groups if group.kind in kinds)
        return blocks * self.columns.input

    @property
    def dispatches(self) -> int:
        """Dispatch tickets."""
        return self.blocks * self.dispatch_per_block

    @cached_property
    def segment_of(self) -> tuple[int, ...]:
        """The segment of each block."""
        return tuple(i for i, segment in enumerate(self.segments) for _ in range(segment.blocks))

    @cached_property
    def used_targets(self) -> tuple[int, ...]:
        """By segment: the tiles that read its rows after the hidden ones."""
        return used_targets(self.segments, self.columns)


def used_targets(segments: Sequence[Segment], columns: Columns) -> tuple[int, ...]:
    """Of each segment the tiles of INPUT and WEIGHTS."""
    return tuple(
        segment.blocks * columns.input + len(segment.portions) * columns.weights
        for segment in segments
    )


def list_segments(
    rows_E: Sequence[int], runs: Sequence[tuple[int, int]], block_rows: int
) -> tuple[Segment, ...]:
    """Segments with what is in them. rows_E: of each expert. runs: (first block, blocks).

    Portions with more rows come first, of equal ones the lower expert; parts of experts that lie in
    several runs are numbered from 1 on.
    """
    owners = [expert for expert, rows in enumerate(rows_E) for _ in range(-(-rows // block_rows))]
    found: list[Segment] = []
    cut = 0
    for first, blocks in runs:
        portions = []
        for expert in dict.fromkeys(owners[first : first + blocks]):
            begin, count = owners.index(expert), owners.count(expert)
            here, end = max(begin, first), min(begin + count, first + blocks)
            part = (PART_FIRST if here == begin else 0) | (PART_LAST if end == begin + count else 0)
            if part != WHOLE:
                cut += 1
                part |= cut
            portions.append(Portion(expert, here, end - here, part))
        portions.sort(key=lambda one: (-rows_E[one.expert], one.expert))
        found.append(Segment(first, blocks, tuple(portions)))
    return tuple(found)


def order_groups(
    segments: Sequence[Segment],
    columns: Columns,
    *,
    saved_blocks: int = 0,
    shared_blocks: int = 0,
    sums: int = 0,
    empty: Sequence[int] = (),
) -> tuple[Group, ...]:
    """The table of groups, in the order that record.cuh tells.

    empty: experts without rows whose gradients are written all the same. A kind without tickets has
    no group, the end always has.
    """
    groups: list[Group] = []
    ticket = 0

    def add(kind: int, block: int, blocks: int, tiles: int, **more: int) -> None:
        nonlocal ticket
        if tiles:
            groups.append(Group(ticket, kind, block, blocks, **more))
            ticket += tiles

    def add_hidden(index: int) -> None:
        segment = segments[index]
        end = segment.block + segment.blocks
        first = min(end, max(segment.block, saved_blocks))
        blocks = end - first
        add(BACK_AGAIN, first, blocks, blocks * columns.again, segment=index)
        tiles = segment.blocks * columns.hidden
        add(BACK_HIDDEN, segment.block, segment.blocks, tiles, segment=index)

    def add_rest(index: int) -> None:
        segment = segments[index]
        blocks, wanted = segment.blocks, segment.blocks * columns.hidden
        more = {"segment": index, "wanted": wanted}
        add(BACK_INPUT, segment.block, blocks, blocks * columns.input, **more)
        for one in segment.portions:
            more |= {"expert": one.expert, "part": one.part}
            add(BACK_WEIGHTS, one.block, one.blocks, columns.weights, **more)

    again, hidden = shared_blocks * columns.shared_again, shared_blocks * columns.shared_hidden
    add(BACK_SHARED_AGAIN, 0, shared_blocks, again)
    add(BACK_SHARED_HIDDEN, 0, shared_blocks, hidden, wanted=again)
    if segments:
        add_hidden(0)
    add(BACK_SHARED_INPUT, 0, shared_blocks, shared_blocks * columns.input, wanted=hidden)
    shared = {"wanted": hidden, "part": WHOLE}
    add(BACK_SHARED_WEIGHTS, 0, shared_blocks, columns.shared_weights, **shared)
    for index in range(len(segments)):
        if index + 1 < len(segments):
            add_hidden(index + 1)
        add_rest(index)
    for expert in empty:
        add(BACK_WEIGHTS, 0, 0, columns.weights, expert=expert, part=WHOLE)
    add(BACK_SUM, 0, sums, sums)
    return (*groups, Group(ticket, BACK_END, 0, 1))


def least_ring(segments: Sequence[int]) -> int:
    """The smallest ring in blocks that cannot deadlock with one resident CTA.

    segments: blocks of each. Two neighbours: hidden i + 1 comes before what frees segment i.
    """
    return max([left + right for left, right in pairwise(segments)], default=sum(segments))


def check_ring(work: Work) -> None:
    """Raise InputError if the ring is smaller than `least_ring`."""
    segments = tuple(segment.blocks for segment in work.segments)
    least = least_ring(segments)
    if work.ring < least:
        raise InputError(
            f"a ring of {work.ring} blocks; segments of {segments} blocks need {least} or more, or "
            "the launch can wait for itself. Use a larger ring or smaller segments."
        )


def find_task(work: Work, ticket: int) -> Task:
    """The task of a compute ticket; of kind BACK_END from the end on."""
    place = bisect_right(work.groups, ticket, key=lambda group: group.ticket) - 1
    group = work.groups[place]
    if group.kind == BACK_END:
        return Task(BACK_END, 0, 0, group)
    local = ticket - group.ticket
    if group.kind in (BACK_WEIGHTS, BACK_SHARED_WEIGHTS):
        return Task(group.kind, group.block, local, group)
    column, block = divmod(local, group.blocks)
    return Task(group.kind, group.block + block, column, group)


def needs(work: Work, task: Task) -> tuple[Need, ...]:
    """The waits of a task on its own rank; those for peers are the forward's.

    Counters: "ready" and "again" by block; "hidden" and "used" by segment; "cut", "shared again",
    "shared hidden" and "results" at 0.
    """
    block, group = task.block, task.group
    if task.kind == DISPATCH:
        if block < work.ring:
            return ()
        segment = work.segment_of[block - work.ring]
        return (Need("used", segment, work.used_targets[segment]),)
    assert group is not None
    if task.kind == BACK_AGAIN:
        return (Need("ready", block, work.dispatch_per_block),)
    if task.kind == BACK_HIDDEN:
        ready = Need("ready", block, work.dispatch_per_block)
        if block < work.saved_blocks:
            return (ready,)
        return (ready, Need("again", block, work.columns.again))
    if task.kind == BACK_INPUT:
        return (Need("hidden", group.segment, group.wanted),)
    if task.kind == BACK_WEIGHTS and group.blocks:
        hidden = Need("hidden", group.segment, group.wanted)
        number = group.part & PART_NUMBER
        if number == 0:
            return (hidden,)
        return (hidden, Need("cut", 0, (number - 1) * work.columns.weights))
    if task.kind == BACK_SHARED_HIDDEN:
        return (Need("shared again", 0, group.wanted),)
    if task.kind in (BACK_SHARED_INPUT, BACK_SHARED_WEIGHTS):
        return (Need("shared hidden", 0, group.wanted),)
    if task.kind == BACK_SUM:
        return (Need("results", 0, work.results),)
    return ()


def counted(task: Task) -> tuple[tuple[str, int], ...]:
    """The counters (name, index) that a finished task adds one to, in that order."""
    group = task.group
    if task.kind == DISPATCH:
        return (("ready", task.block),)
    assert group is not None
    if task.kind == BACK_WEIGHTS and group.blocks:
        used = ("used", group.segment)
        return (used, ("cut", 0)) if group.part & PART_NUMBER else (used,)
    if task.kind == BACK_INPUT:
        return (("used", group.segment), ("results", 0))
    plain: dict[int, tuple[tuple[str, int], ...]] = {
        BACK_AGAIN: (("again", task.block),),
        BACK_HIDDEN: (("hidden", group.segment),),
        BACK_SHARED_AGAIN: (("shared again", 0),),
        BACK_SHARED_HIDDEN: (("shared hidden", 0),),
        BACK_SHARED_INPUT: (("results", 0),),
    }
    return plain.get(task.kind, ())
