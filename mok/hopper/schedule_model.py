"""What the schedule's kernels must leave behind, computed on the host in the plainest way.

It exists so that tests and debugging can compare the device's tables word by word. The kernels of
csrc/moe/schedule.cu and enter.cu use prefix sums and bit masks; this walks over tokens and experts
one after the other. numpy only, and nothing here runs in a forward pass. Refuses a routing that no
group of ranks can have: slots that differ, more tokens than a workspace is made for.

Legend: T tokens of a rank, K slots, E experts of a rank, B blocks, R valid rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mok.errors import InputError
from mok.hopper.layout import Segments, Sizes, ceil_div, down_columns, up_columns
from mok.hopper.records import BLOCK, PADDING, ROUTE_BITS, SUM_TOKENS, TICKET_ROWS

UNUSED = -1

UP, DOWN, SHARED_UP, SHARED_DOWN, SUM, END = range(6)
"""Kinds of groups, with the numbers of csrc/moe/rank.cuh."""


@dataclass(frozen=True)
class TicketGroup:
    """A run of tickets of one kind, with the fields of `Group` in csrc/moe/rank.cuh."""

    ticket: int
    kind: int
    block: int
    blocks: int


@dataclass(frozen=True)
class RankPlan:
    """The tables of one rank after `place` and `enter`.

    ids: int32 [1 + T * K], what its peers read. bad: ids that became unused. expert_rows: uint32
    [E]. routes: uint32 [B * 128]. blocks: uint32 [B], expert << 16 | valid rows. rows: R. dispatch,
    down: PLAN_DISPATCH and PLAN_DOWN. groups: END included.
    """

    ids: np.ndarray
    bad: int
    expert_rows: np.ndarray
    routes: np.ndarray
    blocks: np.ndarray
    rows: int
    dispatch: int
    down: int
    groups: tuple[TicketGroup, ...]


def clean_ids(topk_TK: np.ndarray, num_experts: int) -> tuple[np.ndarray, int]:
    """Ids as int32 with every bad one replaced by -1, and how many those were.

    Bad as in mok.dispatch.clean_topk: below -1, num_experts or above (of all ranks), or equal to an
    earlier slot's id of the same token.
    """
    cleaned = np.full(topk_TK.shape, UNUSED, dtype=np.int32)
    bad = 0
    for token, given in enumerate(topk_TK.tolist()):
        seen: set[int] = set()
        for slot, expert in enumerate(given):
            if expert == UNUSED:
                continue
            if not 0 <= expert < num_experts or expert in seen:
                bad += 1
                continue
            seen.add(expert)
            cleaned[token, slot] = expert
    return cleaned, bad


def plan_ranks(
    topk_of_ranks: Sequence[np.ndarray], sizes: Sizes, segments: Segments
) -> tuple[RankPlan, ...]:
    """The tables of every rank. topk_of_ranks: integers [T, K] of each rank, T may differ.

    Raises InputError for a number of arrays or a shape that does not fit the sizes.
    """
    _check(topk_of_ranks, sizes)
    cleaned = [clean_ids(topk, sizes.ranks * sizes.experts) for topk in topk_of_ranks]
    rows: list[list[int]] = [[] for _ in range(sizes.ranks * sizes.experts)]
    for source, (ids, _) in enumerate(cleaned):
        for route, expert in enumerate(ids.reshape(-1).tolist()):
            if expert != UNUSED:
                rows[expert].append(source << ROUTE_BITS | route)
    plans = []
    for rank, (ids, bad) in enumerate(cleaned):
        mine = rows[rank * sizes.experts : (rank + 1) * sizes.experts]
        plans.append(_plan_rank(ids, bad, mine, sizes, segments))
    return tuple(plans)


def cut_segments(
    blocks_E: Sequence[int], segments: Segments, uncut: int | None = None
) -> list[tuple[int, int]]:
    """Runs of blocks as (first block, number of blocks), ascending and without gaps.

    Experts are joined until a segment has `least` blocks, never beyond `most`; an expert above
    `most` is alone, and above `uncut` (`most` if None) in as few parts of at most `most` as
    possible, as equal as possible, the larger ones first.
    """
    found: list[tuple[int, int]] = []
    first = here = 0

    def close() -> None:
        nonlocal first, here
        if here:
            found.append((first, here))
        first, here = first + here, 0

    for blocks in blocks_E:
        if here + blocks > segments.most:
            close()
        if blocks > segments.most:
            parts = ceil_div(blocks, segments.most) if blocks > (uncut or 0) else 1
            for part in range(parts):
                here = blocks // parts + (part < blocks % parts)
                close()
            continue
        here += blocks
        if here >= segments.least:
            close()
    close()
    return found


def list_groups(runs: Sequence[tuple[int, int]], tokens: int, sizes: Sizes) -> list[TicketGroup]:
    """The order of a launch's tiles. runs: of cut_segments. tokens: T of this rank."""
    up, down = up_columns(sizes.width), down_columns(sizes.hidden)
    wanted: list[tuple[int, tuple[int, int], int]] = []
    if tokens and sizes.shared_width:
        shared = (0, ceil_div(tokens, BLOCK))
        wanted.append((SHARED_UP, shared, up_columns(sizes.shared_width)))
        wanted.append((SHARED_DOWN, shared, down))
    for index, run in enumerate(runs):
        wanted.append((UP, run, up))
        if index:
            wanted.append((DOWN, runs[index - 1], down))
    if runs:
        wanted.append((DOWN, runs[-1], down))
    if tokens:
        wanted.append((SUM, (0, ceil_div(tokens, SUM_TOKENS)), 1))
    groups: list[TicketGroup] = []
    ticket = 0
    for kind, (first, blocks), columns in wanted:
        groups.append(TicketGroup(ticket, kind, first, blocks))
        ticket += blocks * columns
    return [*groups, TicketGroup(ticket, END, 0, 1)]


def _plan_rank(
    ids_TK: np.ndarray, bad: int, rows: list[list[int]], sizes: Sizes, segments: Segments
) -> RankPlan:
    tokens = ids_TK.shape[0]
    routes: list[int] = []
    blocks: list[int] = []
    for expert, mine in enumerate(rows):
        routes += mine + [PADDING] * (-len(mine) % BLOCK)
        for row in range(0, len(mine), BLOCK):
            blocks.append(expert << 16 | min(BLOCK, len(mine) - row))
    runs = cut_segments([ceil_div(len(mine), BLOCK) for mine in rows], segments)
    groups = list_groups(runs, tokens, sizes)
    down_blocks = sum(group.blocks for group in groups if group.kind in (DOWN, SHARED_DOWN))
    return RankPlan(
        ids=np.concatenate([[tokens], ids_TK.reshape(-1)]).astype(np.int32),
        bad=bad,
        expert_rows=np.array([len(mine) for mine in rows], dtype=np.uint32),
        routes=np.array(routes, dtype=np.uint32),
        blocks=np.array(blocks, dtype=np.uint32),
        rows=sum(map(len, rows)),
        dispatch=len(blocks) * (BLOCK // TICKET_ROWS),
        down=down_columns(sizes.hidden) * down_blocks,
        groups=tuple(groups),
    )


def _check(topk_of_ranks: Sequence[np.ndarray], sizes: Sizes) -> None:
    if len(topk_of_ranks) != sizes.ranks:
        raise InputError(
            f"{len(topk_of_ranks)} arrays of ids for {sizes.ranks} ranks; give one for each rank"
        )
    for rank, topk in enumerate(topk_of_ranks):
        if topk.ndim != 2 or topk.shape[1] != sizes.slots or topk.shape[0] > sizes.max_tokens:
            raise InputError(
                f"the ids of rank {rank} have shape {topk.shape}; allowed: [0 to "
                f"{sizes.max_tokens}, {sizes.slots}]"
            )
