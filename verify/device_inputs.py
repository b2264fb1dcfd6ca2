"""Reads the tensors that a plan of digests is given: names, device, parts and headers.

Refuses, with what to do instead, tensors of several devices or of none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from verify.device_parts import (
    MAX_DIMS,
    PartTable,
    Range,
    ShardLike,
    TooManyParts,
    parts_of,
)
from verify.errors import UnsupportedError
from verify.hashing import dtype_name, plain_tensor

Place = Range | ShardLike
Header = tuple[str, tuple[int, ...], int]
"""dtype, shape and count of a Digest."""


def form_of(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, in elements."""
    return tuple(t.shape), t.stride()


def header_of(t: Tensor, place: Place | None) -> Header:
    shape = tuple(t.shape)
    whole = shape if place is None else tuple(place.full_shape)
    return dtype_name(t.dtype), whole, math.prod(shape)


def named(
    tensors: Mapping[str, Tensor] | Sequence[Tensor],
) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    if isinstance(tensors, Tensor):
        raise UnsupportedError('give tensors by name or in a list, such as {"x": x} or [x]')
    if isinstance(tensors, Mapping):
        return tuple(tensors), tuple(tensors.values())
    return tuple(map(str, range(len(tensors)))), tuple(tensors)


def device_of(tensors: Sequence[Tensor]) -> int:
    if not tensors:
        raise UnsupportedError("a DigestPlan of no tensors has no device: give at least one")
    first = tensors[0]
    index = first.get_device() if isinstance(first, Tensor) else -1
    if index < 0 or not first.is_cuda:
        raise UnsupportedError(
            f"a DigestPlan takes tensors on one CUDA device, not {_where(first)}; digest_tensors "
            "takes any"
        )
    return index


def in_few_parts(t: Tensor, place: Place | None) -> bool:
    """Whether the kernel can be told a plain tensor; errors are those of `parts_of`, but one."""
    if t.dim() < MAX_DIMS:  # numbers wider than a unit take one axis more
        return True
    try:
        parts_of(t, place)
    except TooManyParts:
        return False
    return True


def fill(
    table: PartTable, tensors: Sequence[Tensor], places: Sequence[Place | None], index: int
) -> list[int]:
    """Adds the parts of all tensors, whatever they are; their addresses."""
    addresses = []
    for slot, given in enumerate(tensors):
        t = plain_tensor(given)
        if t.get_device() != index or not t.is_cuda:
            raise UnsupportedError(
                f"a DigestPlan takes tensors on one device, cuda:{index}, and tensor {slot} is "
                f"{_where(t)}; digest_tensors takes any"
            )
        for part in parts_of(t, places[slot]):
            table.add(part, slot)
        addresses.append(given.data_ptr())
    return addresses


def _where(t: object) -> str:
    return f"on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
