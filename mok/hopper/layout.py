"""How much memory a Hopper workspace takes, and where everything lies in it: arithmetic only.

It exists so that `nbytes` is known before anything is allocated, and so that the sizes of rings and
tables are checked where no GPU is. All sizes follow from the shapes and the largest number of
tokens, never from a routing: any imbalance fits. Refuses shapes that the kernels' words cannot
hold.

Legend: T tokens, K slots, E experts of one rank, H hidden size, I width, S shared width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mok.errors import InputError
from mok.hopper.records import BLOCK, COUNTER_HEAD, FLAGS, MAX_RANKS, ROUTE_BITS

REGION_ALIGNMENT = 256
_TILES_IN_FLIGHT = 160  # a segment has at least so many tiles, so that every SM finds one
_LEAST_SEGMENT = 24
_BF16, _WORD = 2, 4


def ceil_div(value: int, unit: int) -> int:
    """value / unit, rounded up."""
    return -(-value // unit)


@dataclass(frozen=True)
class Segments:
    """Blocks of a segment: experts are merged below `least` and cut above `most`."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(
                f"segments of {self.least} to {self.most} blocks; allowed: 1 <= least <= most."
            )


def choose_segments(width: int, minibatch_blocks: int | None = None) -> Segments:
    """Segments for a width I; minibatch_blocks: the most that somebody wants, at least 8 count."""
    return segments_of(up_columns(width), minibatch_blocks)


def segments_of(columns: int, minibatch_blocks: int | None) -> Segments:
    """Segments for a block's number of column tiles; minibatch_blocks as in choose_segments."""
    least = ceil_div(_TILES_IN_FLIGHT, columns)
    if minibatch_blocks is None:
        return Segments(least, max(_LEAST_SEGMENT, least + 8))
    most = max(8, minibatch_blocks)
    return Segments(min(least, most), most)


def up_columns(width: int) -> int:
    """Column tiles of gate and up."""
    return ceil_div(width, 128)


def down_columns(hidden: int) -> int:
    """Column tiles of down."""
    return ceil_div(hidden, 256)


@dataclass(frozen=True)
class Sizes:
    """What a workspace is made for. shared_width 0: no shared expert. experts: of one rank.

    Raises InputError for sizes that the kernels cannot run.
    """

    max_tokens: int
    slots: int
    experts: int
    hidden: int
    width: int
    shared_width: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        problem = size_problem(**dataclasses.asdict(self))
        if problem is not None:
            raise InputError(problem)

    @property
    def max_rows(self) -> int:
        """Routes that can arrive at one rank: a token uses an expert once."""
        return self.ranks * self.max_tokens * min(self.slots, self.experts)


def size_problem(
    *,
    max_tokens: int,
    slots: int,
    experts: int,
    hidden: int,
    width: int,
    shared_width: int = 0,
    ranks: int = 1,
) -> str | None:
    """Why the kernels cannot run these sizes; None if they can."""
    tiled = "a multiple of 64"
    limits = (
        ("H", hidden, hidden >= 64 and hidden % 64 == 0, tiled),
        ("I", width, width >= 64 and width % 64 == 0, tiled),
        (
            "the shared expert's I",
            shared_width,
            shared_width >= 0 and shared_width % 64 == 0,
            tiled,
        ),
        ("K", slots, 1 <= slots <= 16, "1 to 16 slots"),
        ("E", experts, 1 <= experts <= 1024, "1 to 1024 experts a rank"),
        ("ranks", ranks, 1 <= ranks <= MAX_RANKS, f"1 to {MAX_RANKS}"),
        ("T", max_tokens, max_tokens >= 0, "0 or more"),
        (
            "T K",
            max_tokens * slots,
            max_tokens * slots < 1 << ROUTE_BITS,
            f"below 2^{ROUTE_BITS} routes a rank",
        ),
    )
    for name, value, fits, allowed in limits:
        if not fits:
            return f"{name} = {value}; the Hopper kernel takes {allowed}"
    return None


def bound_blocks(rows: int, experts: int) -> int:
    """Blocks that `rows` routes can fill: every expert may leave its last block all but empty."""
    return (rows + experts * (BLOCK - 1)) // BLOCK


def saved_rows(tokens: int, sizes: Sizes) -> int:
    """Rows of g and u that a forward keeps, a multiple of 128.

    One rank keeps all that can be. Several keep at most 1.25 times what a balanced routing brings;
    rows beyond are computed again by the backward.
    """
    if sizes.ranks == 1:
        return one_rank_saved_rows(tokens, sizes.slots, sizes.experts)
    every = BLOCK * bound_blocks(sizes.max_rows, sizes.experts)
    return min(every, group_saved_rows(tokens, sizes.slots, sizes.experts))


def group_saved_rows(tokens: int, slots: int, experts: int) -> int:
    """Rows of g and u for 1.25 times what a balanced routing brings to one of several ranks.

    Plain arithmetic, so that symbolic sizes pass through. tokens: of this rank.
    """
    return (5 * bound_blocks(tokens * slots, experts) // 4 + 1) * BLOCK


def one_rank_saved_rows(tokens: int, slots: int, experts: int) -> int:
    """saved_rows of one rank; plain arithmetic, so that symbolic sizes pass through.

    Every expert that has rows may end in a block of its own.
    """
    routes = tokens * slots
    return (routes + min(experts, routes) * (BLOCK - 1)) // BLOCK * BLOCK


@dataclass(frozen=True)
class Region:
    """A piece of one arena: bytes [offset, offset + nbytes)."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Sizes of rings and tables, and the regions of two arenas.

    local: memory of the rank alone. symmetric: what peers read and write, at the same offsets on
    every rank. control: the local bytes, from 0 on, that have to be zero before the first launch;
    so have the symmetric regions "flags" and "ids".
    """

    sizes: Sizes
    segments: Segments
    max_blocks: int
    max_shared_blocks: int
    max_groups: int
    max_chunks: int
    ring_x: int
    ring_h: int
    local: Mapping[str, Region]
    symmetric: Mapping[str, Region]
    control: int
    local_bytes: int
    symmetric_bytes: int

    @property
    def nbytes(self) -> int:
        """Device bytes of the workspace; out, g and u of a call come on top."""
        return self.local_bytes + self.symmetric_bytes


def make_layout(sizes: Sizes, segments: Segments | None = None) -> Layout:
    """The layout of one rank's workspace. segments None: choose_segments of the width."""
    wanted = segments or choose_segments(sizes.width)
    max_blocks = max(1, bound_blocks(sizes.max_rows, min(sizes.experts, max(1, sizes.max_rows))))
    max_shared = ceil_div(sizes.max_tokens, BLOCK) if sizes.shared_width else 0
    # A segment ends at an expert's border or where an expert is cut.
    max_groups = 2 * (sizes.experts + max_blocks // wanted.most) + 4
    chunks = sizes.ranks * max(1, ceil_div(sizes.max_tokens, BLOCK))
    ring_x = min(2 * wanted.most, max_blocks)
    ring_h = min(3 * wanted.most, max_blocks)
    tokens = max(1, sizes.max_tokens)  # no region is empty: every pointer is one
    routes = tokens * sizes.slots
    small = {
        "counters": _WORD * (COUNTER_HEAD + 3 * max_blocks + max_shared),
        "expert_rows": _WORD * sizes.experts,
        "blocks": _WORD * max_blocks,
        "groups": 4 * _WORD * max_groups,
        "peers": 4 * 8 * sizes.ranks,
        # `enter` uses it as scratch too: a word for every block.
        "counts": _WORD * max(sizes.experts * chunks, max_blocks),
        "routes": _WORD * max_blocks * BLOCK,
    }
    large = {
        "x_ring": _BF16 * ring_x * BLOCK * sizes.hidden,
        "hidden": _BF16 * ring_h * BLOCK * sizes.width,
    }
    if sizes.shared_width:
        large["shared_y"] = _BF16 * tokens * sizes.hidden
        large["shared_hidden"] = _BF16 * tokens * sizes.shared_width
    shared = {
        "flags": _WORD * FLAGS * MAX_RANKS,
        "ids": _WORD * 2 * (1 + sizes.max_tokens * sizes.slots),
        "y": _BF16 * routes * sizes.hidden,
    }
    if sizes.ranks > 1:  # one rank reads its own x where it is
        shared["x"] = _BF16 * tokens * sizes.hidden
    local, local_bytes = arrange({**small, **large})
    symmetric, symmetric_bytes = arrange(shared)
    return Layout(
        sizes,
        wanted,
        max_blocks,
        max_shared,
        max_groups,
        chunks,
        ring_x,
        ring_h,
        local,
        symmetric,
        local["x_ring"].offset,
        local_bytes,
        symmetric_bytes,
    )


def arrange(wanted: Mapping[str, int]) -> tuple[Mapping[str, Region], int]:
    """Regions of so many bytes one behind another, aligned, and the bytes of all."""
    regions: dict[str, Region] = {}
    end = 0
    for name, nbytes in wanted.items():
        regions[name] = Region(end, nbytes)
        end = ceil_div(end + nbytes, REGION_ALIGNMENT) * REGION_ALIGNMENT
    return MappingProxyType(regions), end
