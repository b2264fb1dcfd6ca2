"""What the simulation of the protocol is given: its rules, the work, and how it is run.

A block has 4 rows and 2 dispatch tickets there.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.hopper.backward_protocol import Columns
from mok.hopper.layout import Segments

BLOCK_ROWS = 4
TICKET_ROWS = 2
PER_BLOCK = BLOCK_ROWS // TICKET_ROWS


@dataclass(frozen=True)
class Rules:
    """The protocol; every value that is not the default is a planted fault."""

    sum_waits_for_pushed: bool = True
    exit_waits_for_pulled: bool = False
    dispatch_waits_for_entered: bool = True
    hidden_waits_for_ring: bool = True
    x_waits_for_ring: bool = True
    ids_buffers: int = 2
    tickets: bool = True  # False: CTA c runs c, c + grid, c + 2 grid, ...
    flags_are_epochs: bool = True  # False: flags hold 1 and a launch zeroes its own as it starts
    flags_compare_at_least: bool = True  # False: a wait ends only at its own epoch
    counters_zeroed_by_enter: bool = True  # False: by the forward launch, beside its first CTAs
    pushed_told_by_last_tile: bool = True  # False: when the launch ends
    down_first: bool = False
    release_at_once: bool = True  # False: a tile is released when the next one's data is there
    failed_ranks_stay_silent: bool = True
    # Of the backward only:
    used_counts_weights: bool = True  # False: a place of the ring is free after INPUT
    weights_wait_for_hidden: bool = True
    input_waits_for_hidden: bool = True
    hidden_waits_for_again: bool = True
    parts_come_in_turn: bool = True  # False: parts of a cut expert do not wait for COUNT_CUT
    weights_first: bool = False


@dataclass(frozen=True)
class Routing:
    """One schedule, used by `launches` launches.

    tokens: per rank. rows: per rank, per block, BLOCK_ROWS of (owner, route), None for padding.
    segments: blocks of each, per rank. backward: launches are of the backward, whose segments
    follow from expert_rows: the rows of each expert of each rank.
    """

    tokens: tuple[int, ...]
    rows: tuple[tuple[tuple[tuple[int, int] | None, ...], ...], ...]
    segments: tuple[tuple[int, ...], ...]
    launches: int
    expert_rows: tuple[tuple[int, ...], ...] = ()
    backward: bool = False


@dataclass(frozen=True)
class BackwardSetting:
    """What launches of the backward have beside. extra_ring: blocks beyond the least."""

    segments: Segments
    uncut: int
    columns: Columns
    saved_blocks: int = 0
    extra_ring: int = 0


@dataclass(frozen=True)
class Setting:
    """How it is run.

    extra_x, extra_h: blocks of the rings beyond the least. resident: CTAs of a rank at a time, of
    `grid`; with `local` the CTAs of all ranks share `resident` places, and each step of the host is
    one launch for all ranks. depth: tiles loaded ahead of the consumers. shared: there is a shared
    expert. policy: random, newest, oldest, or starve or favour rank `chosen`.
    """

    slots: int
    columns_up: int
    columns_down: int
    shared: bool
    extra_x: int
    extra_h: int
    resident: int
    grid: int
    movers: int
    depth: int
    local: bool
    policy: str
    chosen: int
    seed: int
    backward: BackwardSetting | None = None


PLAIN = Setting(
    slots=2,
    columns_up=2,
    columns_down=2,
    shared=False,
    extra_x=0,
    extra_h=0,
    resident=1,
    grid=1,
    movers=3,
    depth=1,
    local=False,
    policy="random",
    chosen=0,
    seed=0,
)
