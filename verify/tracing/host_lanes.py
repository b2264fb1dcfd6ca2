"""Digests of tensors in the host's memory, by as many threads as torch computes with.

The sum of `verify.lanes` over ranges of the bytes, which add up: numpy and compiled code let go of
the interpreter's lock inside, so large tensors are cut into one range a thread. Small ones are not
worth a thread. A recording of a small model is over before a compiler would be: numpy computes
until it has taken so much that half a second is won back.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verify.device_parts import Range, Shard
from verify.hashing import digest_on_host, integer_view
from verify.host_kernel import HostKernel, host_kernel, kept_kernel
from verify.lanes import BLOCK, DEFAULT_SEED, LaneSum
from verify.tracing.definitions import Whole

_MASK = (1 << 64) - 1
_LANES = struct.Struct("<4Q")
_LARGE_BYTES = 1 << 18  # 65,536 words take 0.1 ms; a thread is woken in 0.02 ms
_LARGE_COMPILED = 1 << 23  # 0.8 ms, where torch's own threads still spin on the processors
_COPIED_BYTES = 1 << 26  # of a tensor whose bytes do not lie together, from which on numpy does it
COMPILE_FROM = 1 << 28  # bytes that numpy has taken, in 0.16 s
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
        self._kernel, self._taken = kept_kernel(), 0

    def packed(self, plain: Tensor) -> bytes | None:
        """The lanes of a plain tensor on the CPU by compiled code, 32 bytes, at half a microsecond
        and what its bytes take; None if there is no such code yet, and `of` will do it."""
        kernel = self._kernel
        if kernel is None:
            kernel = self._compiled(plain.nbytes)
            if kernel is None:
                return None
        if plain.is_conj() or plain.is_neg():
            plain = integer_view(plain)
        if not plain.is_contiguous():
            if plain.nbytes > _COPIED_BYTES:
                return None
            plain = plain.contiguous()
        size = plain.nbytes
        if size >= _LARGE_COMPILED and self._threads > 1:
            whole = plain  # held by what the threads run, since Ctrl-C may leave here before them

            def sum_of(at: int, count: int) -> Lanes:
                return kernel.sum(whole.data_ptr() + at, count, at)

            return _LANES.pack(*self._in_threads(size, sum_of))
        return kernel.packed(plain.data_ptr(), size)

    def of(self, t: Tensor, whole: Whole | None) -> Lanes:
        """The lanes of a plain tensor by numpy, at its place in a whole if that is given.

        UnsupportedError as `verify.hashing.digest_on_host` raises.
        """
        if whole is None and t.device.type == "cpu" and sys.byteorder == "little":
            bits = integer_view(t)
            if bits.is_contiguous():  # the usual case, without what the others need
                data = bits.numpy().reshape(-1).view(np.uint8)
                if self._threads == 1 or data.size < _LARGE_BYTES:
                    return _sum(data, 0)
                return self._in_threads(
                    data.size, lambda at, count: _sum(data[at : at + count], at)
                )
        found = [digest_on_host(piece, place) for piece, place in places_of(t, whole)]
        return added([one.lanes for one in found])

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _compiled(self, size: int) -> HostKernel | None:
        """The compiled sum, once numpy has taken enough. size: bytes that it is asked for now."""
        before = self._taken
        self._taken += size
        if before < COMPILE_FROM <= self._taken:
            self._kernel = host_kernel()
        return self._kernel

    def _in_threads(self, size: int, sum_of: Callable[[int, int], Lanes]) -> Lanes:
        """The sum over `size` bytes, by all threads. sum_of: of so many bytes from an offset on."""
        if self._pool is None:  # this thread computes, too
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="verify-digest")
        blocks = -(-size // _BLOCK_BYTES)
        step = -(-blocks // self._threads) * _BLOCK_BYTES
        others = [
            self._pool.submit(sum_of, at, min(step, size - at)) for at in range(step, size, step)
        ]
        mine = sum_of(0, min(step, size))
        return added([mine, *(one.result() for one in others)])


def added(lanes: Sequence[Lanes]) -> Lanes:
    """The lanes of disjoint parts together."""
    a, b, c, d = (sum(column) & _MASK for column in zip((0, 0, 0, 0), *lanes, strict=True))
    return a, b, c, d


def _sum(data: npt.NDArray[np.uint8], offset: int) -> Lanes:
    total = LaneSum(DEFAULT_SEED)
    total.add(data, offset)
    return total.lanes()
