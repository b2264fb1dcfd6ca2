"""How much memory a backward takes beside its forward's workspace, and where everything lies in it.

It exists so that the size is known before anything is allocated, and so that the ring and the
limits of segments are checked where no GPU is. As in `layout`, all follows from shapes, never from
a routing. What decides is an expert that all tokens of all ranks choose: either the ring holds
twice its rows, or the sums of its weights' gradients can go through memory and its rows come in
parts; the cheaper of both is taken. Refuses nothing: the workspace's sizes have been checked.

Legend: H hidden size, I width, S shared width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mok.hopper.gradient_records import BACK_HEAD, BACK_TABLES
from mok.hopper.layout import BLOCK, Layout, Region, Segments, Sizes, arrange, ceil_div, segments_of

_BF16, _WORD, _ADDRESS = 2, 4, 8
_RING = 3  # segments: one is written while two are read
_TILE_SUMS = 128 * 256 * _WORD  # bytes of the sums of a tile of a weight's gradient


@dataclass(frozen=True)
class BackwardLayout:
    """Sizes of the ring and of tables, and the regions of two arenas; see Layout.

    ring: blocks. uncut: experts with more blocks are cut. Nothing has to be zero before the first
    launch. g and u that are computed again lie where d_gate and d_up will.
    """

    segments: Segments
    ring: int
    uncut: int
    max_groups: int
    local: Mapping[str, Region]
    symmetric: Mapping[str, Region]
    local_bytes: int
    symmetric_bytes: int

    @property
    def nbytes(self) -> int:
        """Device bytes; the gradients of a call come on top."""
        return self.local_bytes + self.symmetric_bytes


def hidden_columns(width: int) -> int:
    """Column tiles of d_out w_down."""
    return ceil_div(width, 256)


def choose_backward_segments(width: int, minibatch_blocks: int | None = None) -> Segments:
    """Segments for a width I; minibatch_blocks: the most that somebody wants, at least 8 count."""
    return segments_of(hidden_columns(width), minibatch_blocks)


def weight_tiles(hidden: int, width: int) -> int:
    """Tiles of the gradients of one expert's gate, up and down, 128 x 256 each."""
    gate = ceil_div(width, 128) * ceil_div(hidden, 256)
    return 2 * gate + ceil_div(hidden, 128) * ceil_div(width, 256)


def largest_expert(sizes: Sizes) -> int:
    """Blocks that one expert can have: a token uses an expert once."""
    return ceil_div(sizes.ranks * sizes.max_tokens, BLOCK)


def make_backward_layout(layout: Layout, segments: Segments | None = None) -> BackwardLayout:
    """The layout of one rank's memory beside its workspace of `layout`.

    segments None: choose_backward_segments of the width.
    """
    sizes = layout.sizes
    wanted = segments or choose_backward_segments(sizes.width)
    largest = max(wanted.most, largest_expert(sizes))
    # Two neighbouring segments, each of up to `uncut` blocks, have to fit, unless all rows do.
    short = min(_RING * wanted.most, layout.max_blocks)
    long = min(max(_RING * wanted.most, 2 * largest), layout.max_blocks)
    scratch = _TILE_SUMS * weight_tiles(sizes.hidden, sizes.width)
    block = sum(_ring_bytes(sizes).values()) * BLOCK
    cut = short < long and short * block + scratch < long * block
    ring = short if cut else long
    parts = layout.max_blocks // wanted.most if cut else 0
    # A segment ends at an expert's border or where an expert is cut; an expert has a group of
    # WEIGHTS, or one for each part.
    max_groups = 4 * (sizes.experts + parts) + 6
    small = {
        "counters": _WORD * (BACK_HEAD + BACK_TABLES * layout.max_blocks),
        "segment_of": _WORD * layout.max_blocks,
        "used_target": _WORD * layout.max_blocks,
        "groups": 8 * _WORD * max_groups,
        "peers": 5 * _ADDRESS * sizes.ranks,
    }
    rings = {name: nbytes * ring * BLOCK for name, nbytes in _ring_bytes(sizes).items()}
    large = {**rings, **({"scratch": scratch} if cut else {}), **_shared_bytes(sizes)}
    local, local_bytes = arrange({**small, **large})
    symmetric, symmetric_bytes = arrange(_symmetric_bytes(sizes))
    return BackwardLayout(
        wanted,
        ring,
        ring // 2 if cut else largest,
        max_groups,
        local,
        symmetric,
        local_bytes,
        symmetric_bytes,
    )


def _ring_bytes(sizes: Sizes) -> dict[str, int]:
    """Bytes of one row in each ring."""
    hidden, width = _BF16 * sizes.hidden, _BF16 * sizes.width
    return {
        "d_ring": hidden,
        "x_ring": hidden,
        "d_gate": width,
        "d_up": width,
        "weighted": width,
        "row_weights": _WORD,
        "partials": _WORD * (sizes.width // 64),
    }


def _shared_bytes(sizes: Sizes) -> dict[str, int]:
    if not sizes.shared_width:
        return {}
    tokens = max(1, sizes.max_tokens)  # no region is empty: every pointer is one
    names = ("shared_d_gate", "shared_d_up", "shared_weighted")
    found = dict.fromkeys(names, _BF16 * tokens * sizes.shared_width)
    return {"shared_d_x": _BF16 * tokens * sizes.hidden, **found}


def _symmetric_bytes(sizes: Sizes) -> dict[str, int]:
    """What the forward's memory has no place for; one rank reads its own rows in place."""
    tokens = max(1, sizes.max_tokens)
    routes = _WORD * tokens * sizes.slots
    if sizes.ranks == 1:
        return {"d_router": routes}
    return {"d_router": routes, "router": routes, "d_out": _BF16 * tokens * sizes.hidden}
