"""Arrays of numpy as tensors that digests are taken of.

A tensor has the array's memory where torch can have it, else a copy of the values: of strides that
torch refuses, of another byte order. What an array is made of is told apart by its path: the fields
of a structured array, the mask of a masked one, the unit of dates and times. Text is no number and
has no tensors, as in Python's own values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUMBERS, _TIMES, _TEXT, _OBJECTS = "biufc", "mM", "SUT", "O"  # numpy's kinds of dtypes
Part = tuple[str | int | None, Any]


@dataclass(frozen=True)
class NoDigest:
    """Stands for a value that has no digest. reason: what it is, why, and what to give instead."""

    reason: str


def parts_of(value: npt.NDArray[Any]) -> Iterator[Part]:
    """What an array holds: tensors, NoDigest, arrays and objects, each with its key, None where the
    array itself is meant."""
    array = np.asarray(value)  # without its subclass
    kind = array.dtype.kind
    if isinstance(value, np.ma.MaskedArray):
        yield None, array
        yield "mask", np.ma.getmaskarray(value)
    elif array.dtype.names is not None:
        yield from ((name, array[name]) for name in array.dtype.names)
    elif kind == _OBJECTS:
        yield from enumerate(array.flat)
    elif kind in _TIMES:  # a unit is a part of the value
        yield array.dtype.name, _tensor(_native(array).view(np.int64))
    elif kind in _NUMBERS:
        yield None, _tensor(_native(array))
    elif kind not in _TEXT:
        yield None, _without(array)


def _native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array in this machine's byte order."""
    if array.dtype.isnative:
        return array
    return array.byteswap().view(array.dtype.newbyteorder("="))


def _tensor(array: npt.NDArray[Any]) -> Tensor | NoDigest:
    """Of an array of numbers: of the same memory, or of a copy where torch takes no such array."""
    flags, size = array.flags, array.itemsize
    odd = any(step < 0 or step % size for step in array.strides)
    if odd or not (flags.writeable and flags.aligned):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return _without(array)


def _without(array: npt.NDArray[Any]) -> NoDigest:
    return NoDigest(
        f"no digest of an array of numpy's {array.dtype.name}: torch has no such dtype; give "
        "another, such as float64"
    )
