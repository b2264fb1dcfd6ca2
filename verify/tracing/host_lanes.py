"""Digests of tensors in the host's memory, by as many threads as torch computes with.

The sum of `verify.lanes` over ranges of the bytes, which add up: numpy lets go of the interpreter's
lock inside, so large tensors are cut into one range a thread. Small ones are not worth a thread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verify.device_parts import Range, Shard
from verify.hashing import digest_on_host, integer_view
from verify.lanes import BLOCK, DEFAULT_SEED, LaneSum
from verify.tracing.definitions import Whole

_MASK = (1 << 64) - 1
_LARGE_BYTES = 1 << 18  # 65,536 words take 0.1 ms; a thread is woken in 0.02 ms
_BLOCK_BYTES = 4 * BLOCK
Lanes = tuple[int, int, int, int]


def places_of(t: Tensor, whole: Whole | None) -> Iterator[tuple[Tensor, Range | Shard | None]]:
    """The tensor as pieces that a digest takes, which add up; one if one dimension is cut at most.

    Of a tensor that is cut along several dimensions each row is a range of the flattened whole.
    """
    cuts = []
    if whole is not None:
        cuts = [
            dim
            for dim, (size, (start, stop)) in enumerate(zip(whole.shape, whole.ranges, strict=True))
            if stop - start < size
        ]
    if whole is None or not cuts:
        yield t, None
    elif len(cuts) == 1:
        dim = cuts[0]
        yield t, Shard(dim, whole.ranges[dim][0], whole.shape)
    elif t.numel():
        last = cuts[-1]
        steps = [math.prod(whole.shape[dim + 1 :]) for dim in range(last + 1)]
        starts = [start for start, _ in whole.ranges]
        first = sum(start * step for start, step in zip(starts, steps, strict=False))
        for index in np.ndindex(tuple(t.shape[:last])):
            offset = first + sum(i * step for i, step in zip(index, steps, strict=False))
            yield t[index], Range(offset, whole.shape)


class HostLanes:
    """Digests on the host, with threads that `close` ends."""

    def __init__(self) -> None:
        self._threads = max(1, torch.get_num_threads())
        self._pool: ThreadPoolExecutor | None = None

    def of(self, t: Tensor, whole: Whole | None) -> Lanes:
        """The lanes of a plain tensor, at its place in a whole if that is given.

        UnsupportedError as `verify.hashing.digest_on_host` raises.
        """
        if whole is None and t.device.type == "cpu" and sys.byteorder == "little":
            bits = integer_view(t)
            if bits.is_contiguous():  # the usual case, without what the others need
                data = bits.numpy().reshape(-1).view(np.uint8)
                large = self._threads > 1 and data.size >= _LARGE_BYTES
                return self._in_threads(data) if large else _sum(data, 0)
        found = [digest_on_host(piece, place) for piece, place in places_of(t, whole)]
        return added([one.lanes for one in found])

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _in_threads(self, data: npt.NDArray[np.uint8]) -> Lanes:
        if self._pool is None:  # this thread computes, too
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="verify-digest")
        blocks = -(-data.size // _BLOCK_BYTES)
        step = -(-blocks // self._threads) * _BLOCK_BYTES
        offsets = range(step, data.size, step)
        others = [self._pool.submit(_sum, data[at : at + step], at) for at in offsets]
        mine = _sum(data[:step], 0)
        return added([mine, *(one.result() for one in others)])


def added(lanes: Sequence[Lanes]) -> Lanes:
    """The lanes of disjoint parts together."""
    a, b, c, d = (sum(column) & _MASK for column in zip((0, 0, 0, 0), *lanes, strict=True))
    return a, b, c, d


def _sum(data: npt.NDArray[np.uint8], offset: int) -> Lanes:
    total = LaneSum(DEFAULT_SEED)
    total.add(data, offset)
    return total.lanes()
