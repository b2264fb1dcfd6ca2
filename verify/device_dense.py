"""The usual tensors of a plan, contiguous on one CUDA device, told to the digest kernel quickly.

A plan of 64 tensors costs more on the host than on the device if each is looked at in turn: here
all are read in a few passes without bytecode, half a microsecond a tensor, and then packed.
`verify.device_parts` describes any tensor; for these the result is the same, by test.

Refuses nothing: what is not of this kind is None, and is described the other way.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from verify.device_parts import FIELDS, ITEM_BYTES, PART_TILES, Geometry
from verify.hashing import PLAIN

_FACTS = operator.attrgetter("dtype", "is_nested", "is_cuda", "nbytes")
_BYTES = operator.attrgetter("nbytes")
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
        dtypes, nested, on_cuda, sizes = zip(*map(_FACTS, tensors), strict=True)
        devices = {*map(Tensor.get_device, tensors)}
        if any(nested) or not all(on_cuda) or len(devices) != 1 or 0 in sizes:
            return None
        if not _REAL.issuperset(dtypes) or not all(map(Tensor.is_contiguous, tensors)):
            return None
        if any(map(Tensor.is_neg, tensors)):
            return None
        return DenseMemory(devices.pop(), [*map(Tensor.data_ptr, tensors)], sizes)
    except RuntimeError:  # sparse, or inside a transform: plain_tensor says what to do about it
        return None


def unchanged(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether tensors that `dense_memory` read are as large and as contiguous as then."""
    return tuple(map(_BYTES, tensors)) == tuple(sizes) and all(map(Tensor.is_contiguous, tensors))


def pack_wholes(
    addresses: Sequence[int], sizes: Sequence[int], geometry: Geometry
) -> tuple[npt.NDArray[np.uint64], int]:
    """What PartTable.pack gives for tensors whose bytes lie together, none of them empty, one an
    output in their order; in a few passes, since most plans are of such tensors."""
    packed = np.zeros((len(sizes), FIELDS), np.uint64)
    packed[:, 0] = np.frombuffer(array("Q", addresses), np.uint64)
    size = np.frombuffer(array("Q", sizes), np.uint64)
    packed[:, 2] = packed[:, 3] = size
    spanned = (size + np.uint64(geometry.tile_bytes - 1)) // np.uint64(geometry.tile_bytes)
    packed[:, 5] = spanned
    if len(sizes) > 1:
        packed[:, 7] = np.arange(len(sizes))
        spanned += np.uint64(PART_TILES)
    ends = np.cumsum(spanned)
    packed[:, 4] = ends - spanned
    return packed, int(ends[-1])
