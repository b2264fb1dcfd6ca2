"""Digests that are nodes of a CUDA graph: launched while it is captured, run by each replay.

A launch needs the table of its parts on the device, whenever the graph is replayed. Nothing may be
waited for inside of a capture, and memory of the graph's own pool would be overwritten by replays,
so chunks of memory are taken before the capture, the table is written on the host while it goes on,
and copied when it has ended. The lanes lie in the same chunks: zeroed before a replay that is
recorded, and copied behind it on the same stream. Where nobody records, replays add to lanes that
nobody reads.

What a digest reads has to be there as long as the graph is. Memory of the graph's pool is; a tensor
elsewhere is held, since the graph itself may not read what a module was merely given.

Refuses a device without the digest kernel, a tensor of another device, and more digests than were
provided for. The first digest is that of a known text: lanes are zero before a replay, so a kernel
that does not run would make all recordings equal.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mok.launching import raw_stream
from mok.toolchain import CompilerMissing, cuda_module
from verify.device_inputs import in_few_parts
from verify.device_kernel import loaded
from verify.device_parts import FIELDS, PartTable, parts_of
from verify.errors import UnsupportedError
from verify.hashing import plain_tensor
from verify.lanes import DEFAULT_SEED, key_seeds
from verify.tracing.definitions import LANES_BYTES, Whole
from verify.tracing.device_launches import known_text
from verify.tracing.host_lanes import places_of

ROWS = 1024  # of a chunk: 272 KiB
_PART_BYTES = 8 * FIELDS
_MOST_SNAPSHOTS = 64  # of one capture, 10 ms each; what is met later is held
# Chunks that no graph has any more, by device. They never go back to torch, which could not know
# that a replay still under way reads them; the next capture waits for the device and takes them.
_spare: dict[int, list[Chunk]] = {}


class Chunk:
    """Memory on a device for ROWS digests: lanes, int64 [ROWS, 4], and parts, int64 [ROWS, 30]."""

    def __init__(self, index: int) -> None:
        device = torch.device("cuda", index)
        with torch.inference_mode(False):
            self._block = torch.empty(ROWS * (4 + FIELDS), dtype=torch.int64, device=device)
        self.lanes = self._block[: ROWS * 4].view(ROWS, 4)
        self.parts = self._block[ROWS * 4 :].view(ROWS, FIELDS)


class PoolMemory:
    """Tells memory of the pool that a capture allocates from, by the segments of torch's allocator.

    snapshot: `torch.cuda.memory_snapshot`. own: an address in that pool.
    """

    def __init__(self, snapshot: Callable[[], Sequence[Mapping[str, Any]]], own: int) -> None:
        self._snapshot, self._left = snapshot, _MOST_SNAPSHOTS
        self._starts: list[int] = []
        self._segments: list[tuple[int, int, Any]] = []
        self._pool = self._pool_of(own)
        if self._pool in (None, (0, 0)):  # no private one, so nothing is known to stay
            self._pool, self._left = None, 0

    def holds(self, address: int) -> bool:
        """Whether memory at an address is of the pool, so that it is there as long as the graph."""
        return self._pool is not None and self._pool_of(address) == self._pool

    def _pool_of(self, address: int) -> Any:
        found = self._known(address)
        if found is None and self._left:
            self._left -= 1
            try:
                self._segments = sorted(
                    (one["address"], one["total_size"], tuple(one["segment_pool_id"]))
                    for one in self._snapshot()
                )
            except (RuntimeError, KeyError):  # another allocator than torch's own
                self._left = 0
            self._starts = [start for start, _, _ in self._segments]
            found = self._known(address)
        return found

    def _known(self, address: int) -> Any:
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._segments[at][0] + self._segments[at][1]:
            return self._segments[at][2]
        return None


class GraphDigests:
    """The digests of one graph. Make it directly before the capture, with the device current.

    rows: how many are provided for, with that of the known text. UnsupportedError where the kernel
    cannot run.
    """

    def __init__(self, rows: int) -> None:
        self.index = torch.cuda.current_device()
        found = loaded(self.index)
        if found.kernel is None:
            raise UnsupportedError(f"no digest on the device: {found.reason}")
        self._kernel, self._blocks, self._tuning = found.kernel, found.blocks, found.tuning
        torch.cuda.synchronize(self.index)  # replays of graphs that had the chunks before
        spare = _spare.setdefault(self.index, [])
        self._free = [
            spare.pop() if spare else Chunk(self.index) for _ in range(max(1, -(-rows // ROWS)))
        ]
        self._taken: list[Chunk] = []
        weakref.finalize(self, _give_back, self.index, self._free, self._taken).atexit = False
        self._hosts: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
        self._used: list[int] = []
        self._held: dict[int, Tensor] = {}
        self._pool: PoolMemory | None = None
        self._done: torch.cuda.Event | None = None
        # Not in the graph's pool; there before `finish` returns.
        self._text, self.expected = known_text(torch.device("cuda", self.index))

    def add(self, tensors: Sequence[tuple[Tensor, Whole | None]]) -> list[tuple[int, int]]:
        """Launches digests of tensors as they are at this place of the capture.

        Of each, the first of its rows in `lanes` and how many rows add up to its digest. tensors:
        that `takes`. UnsupportedError when there is no room for all of them.
        """
        if not self._used:
            known = PartTable()
            for part in parts_of(self._text, None):
                known.add(part, 0)
            self._launch(known, 1)  # row 0
        table, slots, counts, firsts = PartTable(), 0, [], []
        flat = []
        for t, whole in tensors:
            pieces = list(places_of(t, whole))
            firsts.append(slots)
            counts.append(len(pieces))
            for piece, place in pieces:
                for part in parts_of(piece, place):
                    table.add(part, slots)
                slots += 1
            flat.append(t)
        if max(len(table), slots) > ROWS and len(tensors) > 1:
            half = len(tensors) // 2
            return self.add(tensors[:half]) + self.add(tensors[half:])
        first = self._launch(table, slots)
        stream = torch.cuda.current_stream(self.index)
        for t in flat:
            _read_on(t, stream)
            self._hold(t)
        return [(first + at, count) for at, count in zip(firsts, counts, strict=True)]

    def takes(self, t: Tensor) -> Tensor:
        """The tensor as `add` takes it. UnsupportedError for what has no digest there."""
        plain = plain_tensor(t)
        if not plain.is_cuda or plain.get_device() != self.index:
            raise UnsupportedError(
                f"it is on {plain.device}, and the CUDA graph is captured on cuda:{self.index}"
            )
        if plain.is_neg() and not (plain.is_floating_point() or plain.is_complex()):
            plain = plain.resolve_neg()
        if not in_few_parts(plain, None):
            raise UnsupportedError("its memory lies in too many pieces for a digest in a graph")
        return plain

    def finish(self) -> None:
        """The capture has ended: brings the parts to the device, and waits until they are there."""
        while self._free:  # one by one: Ctrl-C must not leave one in both
            _spare[self.index].append(self._free.pop())
        if not self._used:
            return
        with torch.cuda.device(self.index), torch.inference_mode(False):
            for chunk, host, used in zip(self._taken, self._hosts, self._used, strict=True):
                shape = (used, FIELDS)
                staged = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
                staged.numpy().view(np.uint64)[:] = host[:used]
                chunk.parts[:used].copy_(staged, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
            self._done.synchronize()
        self._hosts = []

    def clear(self) -> None:
        """Before a replay on the current stream: zeroes the lanes, behind the last `lanes`."""
        with torch.cuda.device(self.index):
            if self._done is not None:
                torch.cuda.current_stream().wait_event(self._done)
            for chunk, used in zip(self._taken, self._used, strict=True):
                chunk.lanes[:used].zero_()

    def lanes(self) -> Tensor:
        """Behind a replay on the current stream: a copy of the lanes, int64 [rows, 4].

        The first row's, if there is one, are `expected` if the kernel is right, and did run.
        """
        with torch.cuda.device(self.index):
            if self._done is None:  # all events of the graph are of values on the host
                return torch.empty((0, 4), dtype=torch.int64, device="cuda")
            used = zip(self._taken, self._used, strict=True)
            found = torch.cat([chunk.lanes[:rows] for chunk, rows in used])
            self._done.record()
        return found

    def _launch(self, table: PartTable, slots: int) -> int:
        """Launches the parts of a table, with `slots` rows of lanes; the first one's number."""
        rows = max(len(table), slots)
        if not self._used or self._used[-1] + rows > ROWS:
            if rows > ROWS or not self._free:
                count = ROWS * (len(self._free) + len(self._taken)) - 1
                raise UnsupportedError(
                    f"a CUDA graph has room for {count} digests, and more are asked for: record at "
                    'level="module", or capture the step as several graphs'
                )
            self._taken.append(self._free.pop())
            self._hosts.append(np.zeros((ROWS, FIELDS), np.uint64))
            self._used.append(0)
        chunk, at = self._taken[-1], self._used[-1]
        if len(table):
            host = self._hosts[-1][at : at + len(table)]
            _, num_tiles = table.pack(self._tuning.geometry, host)
            self._kernel.launch(
                ctypes.c_void_p(chunk.parts.data_ptr() + _PART_BYTES * at),
                ctypes.c_uint32(len(table)),
                ctypes.c_uint64(num_tiles),
                *map(ctypes.c_uint64, key_seeds(DEFAULT_SEED)),
                ctypes.c_void_p(chunk.lanes.data_ptr() + LANES_BYTES * at),
                ctypes.c_uint32(1),
                grid=min(self._blocks, num_tiles),
                block=self._tuning.threads,
                shared=self._tuning.shared_bytes,
            )
        self._used[-1] = at + rows
        return sum(self._used[:-1]) + at

    def _hold(self, t: Tensor) -> None:
        address = t.untyped_storage().data_ptr()
        if not t.numel() or address in self._held:
            return
        if self._pool is None:
            own = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", self.index))
            self._pool = PoolMemory(torch.cuda.memory_snapshot, own.data_ptr())
        if not self._pool.holds(address):
            self._held[address] = t


def _read_on(t: Tensor, stream: torch.cuda.Stream) -> None:
    """Memory that another stream of the capture allocated is not to be used again too early."""
    t.record_stream(stream)


def capture_number() -> int | None:
    """The driver's number of the capture that torch's current stream takes part in, which no other
    capture of the process has; None outside of one, 0 where the driver cannot be asked."""
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        driver = cuda_module("cuda.bindings.driver")
    except CompilerMissing:  # then there are no digests on the device, either
        return 0
    found = driver.cuStreamGetCaptureInfo(raw_stream(torch.cuda.current_device()))
    return int(found[2]) if int(found[0]) == 0 else 0


def _give_back(index: int, *chunks: list[Chunk]) -> None:
    """No call of CUDA: the garbage collector comes at any time."""
    for some in chunks:
        _spare.setdefault(index, []).extend(some)
