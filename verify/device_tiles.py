"""Digests of the tiles of a tensor: which part of it differs, without keeping the tensor.

A tile is a stated number of elements in row-major order (rows times columns for a block of whole
rows); the last one may be shorter. Each tile's digest is taken at its place in the whole, so the
digests of all tiles add up to the digest of the tensor. On a CUDA device all tiles take one launch
that reads the tensor once; tiles whose bytes are a multiple of 16 KiB are read at full speed.

Refuses tiles of other sizes or of other tensors to be compared: they say nothing about a place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from verify.device_digests import DigestPlan
from verify.device_kernel import DEFAULT_TUNING, Tuning, loaded
from verify.device_parts import PartTable, Range, parts_of
from verify.digests import Digest
from verify.hashing import digest_on_host, dtype_name, integer_view, plain_tensor, settled
from verify.lanes import DEFAULT_SEED


@dataclass(frozen=True, eq=False)
class TileDigests:
    """Digests of consecutive tiles of one tensor.

    dtype, shape: of the tensor, as in Digest. tile_elements: elements of a tile. seed: of the keys.
    lanes: uint64 [tiles, 4].
    """

    dtype: str
    shape: tuple[int, ...]
    tile_elements: int
    seed: int
    lanes: npt.NDArray[np.uint64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.lanes)

    def elements(self, tile: int) -> range:
        """The elements of a tile, counted in the flattened tensor. IndexError if there is none."""
        if not 0 <= tile < len(self):
            raise IndexError(f"tile {tile} of {len(self)}")
        start = tile * self.tile_elements
        return range(start, min(start + self.tile_elements, math.prod(self.shape)))

    def digest(self, tile: int) -> Digest:
        """The digest of one tile, a part of the tensor's."""
        count = len(self.elements(tile))
        a, b, c, d = self.lanes[tile].tolist()
        return Digest(self.dtype, self.shape, count, (a, b, c, d))

    def total(self) -> Digest:
        """The digest of the tensor."""
        a, b, c, d = self.lanes.sum(0, dtype=np.uint64).tolist()
        return Digest(self.dtype, self.shape, math.prod(self.shape), (a, b, c, d))

    def differing(self, other: TileDigests) -> list[int]:
        """Numbers of the tiles whose digests differ, ascending.

        ValueError when dtype, shape, tile size or seed differ.
        """
        mine, theirs = (
            (tiles.dtype, tiles.shape, tiles.tile_elements, tiles.seed) for tiles in (self, other)
        )
        if mine != theirs:
            raise ValueError(
                "tiles can be compared when dtype, shape, elements of a tile and seed are the same;"
                f" they are {mine} and {theirs}"
            )
        return np.flatnonzero((self.lanes != other.lanes).any(1)).tolist()


def tile_digests(
    t: Tensor, tile_elements: int, *, seed: int = DEFAULT_SEED, tuning: Tuning = DEFAULT_TUNING
) -> TileDigests:
    """Digests of every tile of `t`, of any dtype, shape, strides and device; waits for them.

    ValueError when `tile_elements` is below 1; UnsupportedError as for `digest_tensor`.
    """
    if tile_elements < 1:
        raise ValueError(f"a tile has at least one element, not {tile_elements}")
    plain = plain_tensor(t)
    shape = tuple(plain.shape)
    count = math.ceil(plain.numel() / tile_elements)
    if count and plain.is_cuda and loaded(plain.get_device(), tuning).kernel is not None:
        lanes = _on_device(plain, tile_elements, count, seed, tuning)
    else:
        lanes = _on_host(plain, tile_elements, count, seed)
    return TileDigests(dtype_name(t.dtype), shape, tile_elements, seed, lanes)


def _on_device(
    t: Tensor, tile_elements: int, count: int, seed: int, tuning: Tuning
) -> npt.NDArray[np.uint64]:
    if t.is_neg() and not (t.is_floating_point() or t.is_complex()):
        t = t.resolve_neg()
    parts = parts_of(t)
    if len(parts) > 1:  # more dimensions than one part can have
        t = settled(t).contiguous()  # torch's own copy may change the bits of conjugated NaNs
        parts = parts_of(t)
    table = PartTable()
    for part in parts:
        table.add(part, 0, group=min(tile_elements * t.element_size(), part.num_bytes))
    plan = DigestPlan.of_table(t, table, count, seed, tuning)
    plan.launch()
    return plan.lanes.cpu().numpy().view(np.uint64)


def _on_host(t: Tensor, tile_elements: int, count: int, seed: int) -> npt.NDArray[np.uint64]:
    # bits, which a complex element has two of: resolving a lazy conjugate would not keep NaNs
    flat, each = integer_view(t).cpu().reshape(-1), 2 if t.is_complex() else 1
    lanes = np.zeros((count, 4), np.uint64)
    for tile in range(count):
        start = each * tile * tile_elements
        part = flat[start : start + each * tile_elements]
        lanes[tile] = digest_on_host(part, Range(start, tuple(flat.shape)), seed).lanes
    return lanes


def differing_tiles(a: Tensor, b: Tensor, tile_elements: int) -> list[int]:
    """Numbers of the tiles in which two tensors of one dtype and shape differ, ascending.

    The tensors may be on different devices. ValueError when dtype or shape differ.
    """
    return tile_digests(a, tile_elements).differing(tile_digests(b, tile_elements))
