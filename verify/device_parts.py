"""How tensors are told to the digest kernel: which bytes lie where, and where they count.

A part is a range of bytes of a whole tensor that one description covers: contiguous memory, or up
to eight dimensions with strides. A tensor is one part, a shard one or a few, and a tensor of more
than eight dimensions that do not merge several. Addresses, sizes and strides are read once; no
value is. `csrc/digest/digest.cu` reads what `pack` writes, and tests interpret it the same way.

Refuses what it cannot describe without a copy: lazily negated integers, and a layout that would
need too many parts.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verify.errors import UnsupportedError

MAX_DIMS = 8
FIELDS = 30  # of 8 bytes, of a packed part
MAX_PARTS = 1 << 16  # of one tensor
QUAD_BYTES = 16
PART_TILES = 8  # about what a part costs besides reading it, in tiles; a launch counts them in
FEW_ROWS = 64  # a shard of at most so many rows is one part a row, and read at full speed
NO_CUT = MAX_DIMS

ITEM_BYTES = {
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.float8_e8m0fnu), 1),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), 1),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), 1),
    **dict.fromkeys((torch.uint16, torch.int16, torch.float16, torch.bfloat16), 2),
    **dict.fromkeys((torch.uint32, torch.int32, torch.float32), 4),
    **dict.fromkeys((torch.uint64, torch.int64, torch.float64), 8),
}
"""Element sizes of the real dtypes that a digest takes."""


class TooManyParts(UnsupportedError):
    """A tensor's dimensions do not merge, and it would need more than MAX_PARTS parts."""


class ShardLike(Protocol):
    """A tensor that is the entries `start ...` of dimension `dim` of a whole."""

    @property
    def dim(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def full_shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Range:
    """A tensor that is the elements `offset ...` of a flattened whole of `full_shape`."""

    offset: int
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A tensor that is the entries `start ...` of dimension `dim` of a whole of `full_shape`."""

    dim: int
    start: int
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """Bytes of the whole that a CTA takes at a time: a tile of contiguous memory, and a step
    through strided memory, a multiple of 16."""

    tile_bytes: int
    gather_bytes: int


@dataclass(frozen=True)
class Axis:
    """One dimension of a part, in units. kept: entries that are there, of `size` in the whole."""

    size: int
    stride: int
    kept: int

    @property
    def cut(self) -> bool:
        return self.kept < self.size


@dataclass(frozen=True)
class Part:
    """A range of bytes [offset, offset + num_bytes) of a whole.

    address: of its first byte. unit: bytes that lie together, 1, 2, 4 or 8; 0 when all do. axes:
    slowest first, at most one of them cut, and that not the first; empty when contiguous. flip:
    bits to invert in the words 0 .. 3 (mod 4) of the whole.
    """

    address: int
    offset: int
    num_bytes: int
    unit: int = 0
    axes: tuple[Axis, ...] = ()
    flip: tuple[int, int, int, int] = (0, 0, 0, 0)


def parts_of(t: Tensor, place: Range | ShardLike | None = None) -> list[Part]:
    """The parts of a plain strided tensor; none for an empty one.

    Lazily conjugated and negated tensors are described as they are, without a copy. ValueError when
    it does not lie in the whole that `place` says; UnsupportedError as the module says, of the kind
    TooManyParts for a layout that would need too many.
    """
    item = t.element_size()
    shape = tuple(t.shape)
    axes = [Axis(size, stride, size) for size, stride in zip(shape, t.stride(), strict=True)]
    offset = 0
    if isinstance(place, Range):
        check_range(place, t.numel())
        offset = place.offset * item
    elif place is not None:
        dim = check_shard(place, shape)
        full = place.full_shape
        axes[dim] = Axis(full[dim], axes[dim].stride, shape[dim])
        offset = place.start * math.prod(full[dim + 1 :]) * item
    if t.numel() == 0:
        return []
    unit = min(item, 8)
    address = t.data_ptr()
    if address % min(unit, 4):  # memory from elsewhere
        unit = address & -address
    if unit < item:
        axes = [replace(axis, stride=axis.stride * (item // unit)) for axis in axes]
        axes.append(Axis(item // unit, 1, item // unit))
    whole = Part(address, offset, 0, unit, merged(axes), _flips(t))
    return [_finished(part) for part in _divided(whole)]


def merged(axes: list[Axis]) -> tuple[Axis, ...]:
    """The same elements in the same order with as few axes as possible."""
    found: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        last = found[-1] if found else None
        if last is not None and not axis.cut and last.stride == axis.size * axis.stride:
            found[-1] = Axis(last.size * axis.size, axis.stride, last.kept * axis.size)
        else:
            found.append(axis)
    return tuple(found)


def check_range(place: Range, count: int) -> None:
    """ValueError unless `count` elements from the range's offset on are in its whole."""
    if place.offset < 0 or place.offset + count > math.prod(place.full_shape):
        raise ValueError(
            f"elements {place.offset} .. {place.offset + count - 1} are not all in a tensor of "
            f"shape {place.full_shape}; give the offset in elements of the flattened whole, and "
            "its shape as full_shape"
        )


def check_shard(place: ShardLike, shape: tuple[int, ...]) -> int:
    """The dimension, counted from 0, that a shard of `shape` cuts; ValueError if it cannot."""
    full, dim, start = tuple(place.full_shape), place.dim, place.start
    if not -len(full) <= dim < len(full):
        raise ValueError(f"dim {dim} is not a dimension of a tensor of shape {full}")
    dim %= len(full)
    size = shape[dim] if len(shape) == len(full) else -1
    fits = 0 <= start <= full[dim] - size
    if (*full[:dim], size, *full[dim + 1 :]) != shape or not fits:
        raise ValueError(f"a shard {shape} from {start} on does not lie in {full} along dim {dim}")
    return dim


def _flips(t: Tensor) -> tuple[int, int, int, int]:
    """Sign bits that a lazy conjugate or negative inverts, by word mod 4 of the whole."""
    conjugated, negated = t.is_conj(), t.is_neg()
    if not (conjugated or negated):
        return (0, 0, 0, 0)
    if not (t.is_floating_point() or t.is_complex()):
        raise UnsupportedError(
            f"a lazily negated tensor of {t.dtype} has no bits of its own: give t.resolve_neg()"
        )
    width = t.element_size() // (2 if t.is_complex() else 1)  # bytes of a number with a sign
    bits = 0
    for number in range(16 // width):
        imaginary = t.is_complex() and number % 2 == 1
        if negated != (conjugated and imaginary):
            bits |= 1 << (8 * width * (number + 1) - 1)
    a, b, c, d = (bits >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96))
    return (a, b, c, d)


def _divided(part: Part) -> Iterator[Part]:
    """The part, or those for each entry of its first axes if that is needed or pays."""
    axes = part.axes
    cut = next((at for at, axis in enumerate(axes) if axis.cut), 0)
    rows = math.prod(axis.size for axis in axes[:cut])
    leading = cut if rows <= FEW_ROWS else 0
    leading = max(leading, len(axes) - MAX_DIMS)
    outer, inner = axes[:leading], axes[leading:]
    count = math.prod(axis.kept for axis in outer)
    if count > MAX_PARTS:
        raise TooManyParts(
            f"a tensor of {len(axes)} dimensions that do not merge would need {count} parts, and "
            f"{MAX_PARTS} are the most: give t.contiguous()"
        )
    if inner and inner[0].cut:
        inner = (Axis(inner[0].kept, inner[0].stride, inner[0].kept), *inner[1:])
    # distances in the whole of neighbours along each axis, in units
    steps = [math.prod(axis.size for axis in axes[at + 1 :]) for at in range(leading)]
    for index in itertools.product(*(range(axis.kept) for axis in outer)):
        place = sum(i * axis.stride for i, axis in zip(index, outer, strict=True))
        step = sum(i * far for i, far in zip(index, steps, strict=True))
        yield replace(
            part,
            address=part.address + place * part.unit,
            offset=part.offset + step * part.unit,
            axes=inner,
        )


def _finished(part: Part) -> Part:
    """With its number of bytes, up to the last that is there; and contiguous if it is."""
    last, inner = 0, 1
    for axis in reversed(part.axes):
        last += (axis.kept - 1) * inner
        inner *= axis.size
    num_bytes = (last + 1) * part.unit
    dense = not part.axes or (len(part.axes) == 1 and part.axes[0].stride == 1)
    if dense and not any(part.flip):
        return replace(part, num_bytes=num_bytes, unit=0, axes=())
    return replace(part, num_bytes=num_bytes, axes=part.axes or (Axis(1, 1, 1),))


@dataclass(frozen=True)
class Lines:
    """How strided memory is visited in its own order: 16 aligned bytes of the whole (a quad) by a
    thread, and neighbouring threads along the dimension whose entries are neighbours in memory.

    lines: entries of that dimension. num_bytes: how far they are apart in the whole; a quad belongs
    to the line in which it begins. quads: of a line, at most. visits: quads of the whole part; some
    may be none.
    """

    lines: int
    num_bytes: int
    quads: int
    visits: int


def lines_of(part: Part) -> Lines | None:
    """None where the order of the whole is the better one, or nearly so."""
    axes = part.axes
    if not axes or axes[-1].stride in (0, 1):
        return None
    nearest = min(range(len(axes)), key=lambda at: (axes[at].stride or math.inf, -axes[at].size))
    lines = axes[nearest].size
    num_bytes = math.prod(axis.size for axis in axes[nearest + 1 :]) * part.unit
    if nearest == len(axes) - 1 or num_bytes < QUAD_BYTES:
        return None
    quads = -(-num_bytes // QUAD_BYTES) + (part.offset % QUAD_BYTES != 0)
    return Lines(lines, num_bytes, quads, -(-part.num_bytes // (lines * num_bytes)) * lines * quads)


class PartTable:
    """Parts in the order of their outputs, and packed as the kernel reads them."""

    def __init__(self) -> None:
        # addresses, offsets, bytes, bytes of a group, slots
        self._columns = tuple(array("Q") for _ in range(5))
        self._strided: dict[int, Part] = {}
        self._grouped = False

    def __len__(self) -> int:
        return len(self._columns[0])

    @property
    def plain(self) -> bool:
        """Whether all memory is contiguous, with one output a part."""
        return not self._strided and not self._grouped

    def add_contiguous(
        self, address: int, num_bytes: int, slot: int, offset: int = 0, group: int = 0
    ) -> None:
        """Bytes that lie together. group: bytes of an output; 0 is all of them."""
        self._grouped |= group != 0
        values = (address, offset, num_bytes, group or num_bytes, slot)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def add(self, part: Part, slot: int, group: int = 0) -> None:
        """Any part; the same arguments."""
        if part.axes:
            self._strided[len(self)] = part
        self.add_contiguous(part.address, part.num_bytes, slot, part.offset, group)

    def pack(
        self, geometry: Geometry, rows: npt.NDArray[np.uint64] | None = None
    ) -> tuple[npt.NDArray[np.uint64], int]:
        """The kernel's array of parts, uint64 [parts, 30], and the number of tiles of the launch.

        Columns: address, offset, bytes, group, first tile, tiles of a group, kept, slot and unit,
        axes and cut axis, flips (two columns), sizes (8), strides (8), and lines, their bytes and
        quads; pairs in one column are 32 bits each, the first one low. Of several parts each has
        PART_TILES tiles behind its own that hold nothing, so that few small ones meet in one CTA.
        rows: an array of that shape to be overwritten; None makes one.
        """
        count = len(self)
        packed = np.empty((count, FIELDS), np.uint64) if rows is None else rows
        packed.fill(0)
        columns = [np.frombuffer(column, np.uint64) for column in self._columns]
        for at, column in zip((0, 1, 2, 3, 7), columns, strict=True):
            packed[:, at] = column
        _, offset, size, group, _ = columns
        one = np.uint64(1)
        step: np.uint64 | npt.NDArray[np.uint64] = np.uint64(geometry.tile_bytes)
        if self._strided:
            steps = np.full(count, step, np.uint64)
            steps[list(self._strided)] = geometry.gather_bytes
            step = steps
        spanned = (offset + size + (step - one)) // step - offset // step
        packed[:, 5] = spanned
        if self._grouped:
            groups = (size + group - one) // group
            even = (offset % step == 0) & (group % step == 0)
            each = np.where(even, group // step, (group + step - one) // step + one)
            packed[:, 5] = np.where(groups == one, spanned, each)
            spanned = packed[:, 5] * groups
        for row, part in self._strided.items():
            whole = packed[row, 3] == packed[row, 2]  # a group takes a range of the whole
            if whole and (lines := lines_of(part)):
                packed[row, 27:] = lines.lines, lines.num_bytes, lines.quads
                tiles = -(-lines.visits * QUAD_BYTES // geometry.gather_bytes)
                spanned[row] = packed[row, 5] = tiles
        if count > 1:
            spanned = spanned + np.uint64(PART_TILES)
        ends = np.cumsum(spanned, dtype=np.uint64)
        packed[:, 4] = ends - spanned
        for row, part in self._strided.items():
            _pack_axes(packed[row], part)
        return packed, int(ends[-1]) if count else 0


def _pack_axes(row: npt.NDArray[np.uint64], part: Part) -> None:
    cut = next((at for at, axis in enumerate(part.axes) if axis.cut), NO_CUT)
    a, b, c, d = part.flip
    row[6] = part.axes[cut].kept if cut != NO_CUT else 0
    row[7] = int(row[7]) | part.unit << 32
    row[8] = len(part.axes) | cut << 32
    row[9:11] = a | b << 32, c | d << 32
    for at, axis in enumerate(part.axes):
        row[11 + at], row[11 + MAX_DIMS + at] = axis.size, axis.stride
