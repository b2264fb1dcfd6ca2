"""Digests of tensors that are met again unchanged: a module's output is its parent's, and the next
one's input.

By numpy a digest costs 2 ns a word, and most tensors of a model are met twice or more. (Compiled
code reads them again in as much time as this takes, and this is not asked.) One is taken for
unchanged if it is the same object, its version counter has not moved, and the sums over its
rows and its columns are what they were. The counter alone would not do: foreign code and `.data`
write past it, and to see what such code does is what recordings are for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.hashing import integer_view
from verify.tracing.host_lanes import Lanes

_COLUMNS = 4096


@dataclass(frozen=True)
class _Met:
    tensor: weakref.ref[Tensor]
    version: int
    sums: Tensor
    lanes: Lanes


class RepeatedDigests:
    """Digests by tensor, as long as that lives, between two calls of `forget`."""

    def __init__(self) -> None:
        self._met: dict[int, _Met] = {}

    def forget(self) -> None:
        self._met.clear()

    def of(self, t: Tensor, plain: Tensor, digest: Callable[[], Lanes]) -> Lanes:
        """The lanes of `t`, from before or from `digest`. plain: `t` without its subclass."""
        if t.is_inference() or not plain.is_contiguous():
            return digest()
        sums = sums_of(plain)
        if sums is None:
            return digest()
        met = self._met.get(id(t))
        same = met is not None and met.tensor() is t and met.version == t._version
        if met is not None and same and torch.equal(met.sums, sums):
            return met.lanes
        lanes = digest()
        self._met[id(t)] = _Met(weakref.ref(t), t._version, sums, lanes)
        return lanes


def sums_of(t: Tensor) -> Tensor | None:
    """Sums over rows and columns of a contiguous tensor's memory as 64-bit numbers, mod 2**64, and
    what is left over; None if its memory cannot be read so."""
    if t.is_conj() or t.is_neg() or t.nbytes % 8 or t.storage_offset() * t.element_size() % 8:
        return None
    words = integer_view(t).reshape(-1).view(torch.int64)
    rows = words.numel() // _COLUMNS
    table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    return torch.cat([table.sum(0), table.sum(1), words[rows * _COLUMNS :]])
