"""The usual tensors of a plan, contiguous on one CUDA device, told to the digest kernel quickly.

A plan of 64 tensors costs more on the host than on the device if each is looked at in turn: here
all are read in a few passes without bytecode, half a microsecond a tensor, and then packed.
`verify.device_parts` describes any tensor; for these the result is the same, by test.

Refuses nothing: what is not of this kind is None, and is described the other way.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verify.device_parts import FIELDS, ITEM_BYTES, PART_TILES, Geometry
from verify.hashing import PLAIN

_ON_CUDA, _NESTED = operator.attrgetter("is_cuda"), operator.attrgetter("is_nested")
_DTYPE, _BYTES = operator.attrgetter("dtype"), operator.attrgetter("nbytes")
KEPT_PARTS = 1024  # of a plan: 240 KB of what is kept for the next one
_PLAIN, _REAL = frozenset(PLAIN), frozenset(ITEM_BYTES)


@dataclass(frozen=True)
class DenseMemory:
    """Where tensors lie on one device: addresses and bytes, in their order."""

    index: int
    addresses: list[int]
    sizes: tuple[int, ...]


def dense_memory(tensors: Sequence[Tensor]) -> DenseMemory | None:
    """If all are on one CUDA device and the bytes of each lie together as a digest reads them.

    The usual case in a few passes without bytecode: half a microsecond a tensor. None for all
    others, with empty tensors and those that a digest refuses among them.
    """
    if not tensors or not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        # one attribute at a time: a tuple for each tensor costs as much as another attribute
        if not all(map(_ON_CUDA, tensors)) or any(map(_NESTED, tensors)):
            return None
        index = tensors[0].get_device()
        if torch.cuda.device_count() > 1 and {*map(Tensor.get_device, tensors)} != {index}:
            return None
        if not _REAL.issuperset(map(_DTYPE, tensors)) or any(map(Tensor.is_neg, tensors)):
            return None
        sizes = (*map(_BYTES, tensors),)
        if 0 in sizes or not all(map(Tensor.is_contiguous, tensors)):
            return None
        return DenseMemory(index, [*map(Tensor.data_ptr, tensors)], sizes)
    except RuntimeError:  # sparse, or inside a transform: plain_tensor says what to do about it
        return None


def unchanged(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether tensors that `dense_memory` read are as large and as contiguous as then."""
    return tuple(map(_BYTES, tensors)) == tuple(sizes) and all(map(Tensor.is_contiguous, tensors))


def pack_wholes(
    addresses: Sequence[int],
    sizes: tuple[int, ...],
    geometry: Geometry,
    rows: npt.NDArray[np.uint64] | None = None,
) -> tuple[npt.NDArray[np.uint64], int]:
    """What PartTable.pack gives for tensors whose bytes lie together, none of them empty, one an
    output in their order; in a few passes, since most plans are of such tensors. rows: as there."""
    make = _kept if len(sizes) <= KEPT_PARTS else _without_addresses
    made, num_tiles = make(sizes, geometry.tile_bytes)
    packed = np.empty(made.shape, np.uint64) if rows is None else rows
    packed[...] = made
    packed[:, 0] = np.frombuffer(array("Q", addresses), np.uint64)
    return packed, num_tiles


def _without_addresses(
    sizes: tuple[int, ...], tile_bytes: int
) -> tuple[npt.NDArray[np.uint64], int]:
    """All that depends on the sizes only, and that nobody may write to."""
    packed = np.zeros((len(sizes), FIELDS), np.uint64)
    size = np.frombuffer(array("Q", sizes), np.uint64)
    packed[:, 2:4] = size[:, None]
    spanned = (size + np.uint64(tile_bytes - 1)) // np.uint64(tile_bytes)
    packed[:, 5] = spanned
    if len(sizes) > 1:
        packed[:, 7] = np.arange(len(sizes))
        spanned += np.uint64(PART_TILES)
    ends = np.add.accumulate(spanned)
    packed[:, 4] = ends - spanned
    packed.setflags(write=False)
    return packed, int(ends[-1])


_kept = functools.lru_cache(maxsize=8)(_without_addresses)
"""Results of the same case have the same sizes again."""


def forget_sizes() -> None:
    """Lets the next plan be the first of its sizes; for measurements."""
    _kept.cache_clear()
