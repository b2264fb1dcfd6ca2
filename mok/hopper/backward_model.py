"""What `enter_backward` must leave behind, computed on the host in the plainest way.

It exists so that tests and debugging can compare the device's tables word by word, as
mok/hopper/schedule_model.py does for the schedule, whose plans it goes on from. The kernel of
csrc/moe/enter_backward.cu finds every group's place by prefix sums; this lists one after another.
Nothing here runs in a backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok.errors import InputError
from mok.hopper.backward_protocol import (
    Columns,
    Group,
    list_segments,
    order_groups,
    used_targets,
)
from mok.hopper.gradient_records import WANT_DOWN, WANT_GATE, WANT_ROUTED, WANT_SHARED, WANT_UP
from mok.hopper.layout import Segments, Sizes, ceil_div
from mok.hopper.records import BLOCK, SUM_TOKENS
from mok.hopper.schedule_model import RankPlan, cut_segments

_SHARED_BIT = 3  # WANT_SHARED_* are WANT_* so many bits higher


@dataclass(frozen=True)
class Aims:
    """What a backward is asked for, as far as its order depends on it.

    wants: WANT_* of gradients that are computed. added: those of them that are added to fp32 memory
    instead of being written, in either dtype. saved_blocks: blocks of g and u that the forward
    kept. shared_again: those of the shared expert are computed again.
    """

    wants: int
    added: int = 0
    saved_blocks: int = 0
    shared_again: bool = False


@dataclass(frozen=True)
class BackwardPlan:
    """The tables of one rank after `enter_backward`.

    groups: END included. segment_of: uint32 [B]. used_target: uint32, one for each segment. down:
    PLAN_DOWN.
    """

    groups: tuple[Group, ...]
    segment_of: np.ndarray
    used_target: np.ndarray
    down: int


def count_tiles(wants: int, hidden: int, width: int) -> int:
    """Tiles of 128 x 256 of one expert's gradients. wants: WANT_GATE, WANT_UP, WANT_DOWN."""
    across = ceil_div(width, 128) * ceil_div(hidden, 256)
    down = ceil_div(hidden, 128) * ceil_div(width, 256)
    return across * (bool(wants & WANT_GATE) + bool(wants & WANT_UP)) + down * bool(
        wants & WANT_DOWN
    )


def plan_backward(
    plan: RankPlan, sizes: Sizes, segments: Segments, uncut: int, aims: Aims
) -> BackwardPlan:
    """The tables of a rank, whose schedule is `plan`. uncut: larger experts are cut.

    Raises InputError for `uncut` below segments.most.
    """
    if uncut < segments.most:
        raise InputError(
            f"experts above {uncut} blocks cannot be cut into parts of {segments.most}; uncut has "
            "to be segments.most or more"
        )
    rows = [int(count) for count in plan.expert_rows]
    tokens = int(plan.ids[0])
    own = ceil_div(tokens, BLOCK) if sizes.shared_width else 0
    columns = _columns(sizes, tokens, aims)
    runs = cut_segments([ceil_div(count, BLOCK) for count in rows], segments, uncut)
    found = list_segments(rows, runs, BLOCK)
    written = aims.wants & ~aims.added & WANT_ROUTED
    groups = order_groups(
        found,
        columns,
        saved_blocks=aims.saved_blocks,
        shared_blocks=own,
        sums=ceil_div(tokens, SUM_TOKENS),
        empty=[expert for expert, count in enumerate(rows) if count == 0] if written else (),
    )
    return BackwardPlan(
        groups,
        np.repeat(np.arange(len(found), dtype=np.uint32), [one.blocks for one in found]),
        np.array(used_targets(found, columns), dtype=np.uint32),
        columns.input * (len(plan.blocks) + own),
    )


def _columns(sizes: Sizes, tokens: int, aims: Aims) -> Columns:
    shared = sizes.shared_width
    # Without tokens the shared expert's gradients are zero; what is not added has to be written.
    there = shared and (tokens or aims.wants & ~aims.added & WANT_SHARED)
    return Columns(
        again=ceil_div(sizes.width, 128),
        hidden=ceil_div(sizes.width, 256),
        input=ceil_div(sizes.hidden, 256),
        weights=count_tiles(aims.wants, sizes.hidden, sizes.width),
        shared_again=ceil_div(shared, 128) if aims.shared_again else 0,
        shared_hidden=ceil_div(shared, 256),
        shared_weights=count_tiles(aims.wants >> _SHARED_BIT, sizes.hidden, shared) if there else 0,
    )
