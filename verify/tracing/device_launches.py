"""Launches of the digest kernel for a recording: one call of the driver if a step is like the last.

A recording launches hundreds of times a step, behind every module, so what a launch costs beside
reading the tensors decides what recording costs. What the kernel is told of a tensor is where its
bytes lie and how many there are, and torch's allocator gives a step's tensors the places of the
last step's. So the rows of the kernel's table stay on the device, found by places and sizes alone,
and the lanes come from a chunk that was zeroed at once: nothing is copied, allocated or waited for.
No tensor is taken for another: equal rows tell of the same bytes, which are read at every launch.

Rows belong to the stream that brought them there, and so do the lanes' chunks. Not for several
threads at a time. Takes what `verify.device_dense.dense_memory` reads, and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verify.device_dense import DenseMemory, pack_wholes
from verify.device_kernel import Loaded
from verify.device_parts import FIELDS, PartTable, parts_of
from verify.lanes import DEFAULT_SEED, LaneSum, key_seeds
from verify.tracing.definitions import LANES_BYTES
from verify.tracing.host_lanes import Lanes

CHUNK = 8192  # rows of lanes, 256 KiB
PART_ROWS = 1 << 15  # of a stream's table, 8 MB on the device and as much pinned
MOST = 4096  # tensors of a launch
_SIZES_KEPT = 4096  # launches whose tiles are known by the sizes of their tensors
_PART_BYTES = 8 * FIELDS


def known_text(device: torch.device) -> tuple[Tensor, Lanes]:
    """int16 [257] on a device, made there without a copy, and the lanes that the host gives it."""
    with torch.inference_mode(False):
        text = torch.arange(1, 258, dtype=torch.int16, device=device)
    total = LaneSum(DEFAULT_SEED)
    total.add(np.arange(1, 258, dtype=np.int16).view(np.uint8), 0)
    return text, total.lanes()


Rows = tuple[int, int, int, Callable[[], None]]
"""Of a launch: the address of its rows of the table, how many, its tiles, and what launches."""


class StreamLaunches:
    """Launches on one stream of one device, which is current when this is made and used.

    found: the kernel, which is there. device: where tensors are made. pinned: whether memory on the
    host is pinned.
    """

    def __init__(
        self,
        found: Loaded,
        device: torch.device,
        *,
        pinned: bool = True,
        part_rows: int = PART_ROWS,
    ) -> None:
        self._found, self._device, self._pinned = found, device, pinned
        self._part_rows = part_rows
        self._known: dict[tuple[Any, ...], Rows] = {}
        self._used = part_rows  # of the table, which is made at the first launch
        self._table = self._staged = torch.empty(0, dtype=torch.int64, device="cpu")
        self._words = self._staged.numpy().view(np.uint64)  # of what is staged
        self._launches: dict[int, Any] = {}
        first, second = key_seeds(DEFAULT_SEED)
        # The arguments of all launches: the driver reads them before its call returns.
        self._parts, self._out = ctypes.c_void_p(), ctypes.c_void_p()
        self._count, self._tiles = ctypes.c_uint32(), ctypes.c_uint64()
        self._seeds = ctypes.c_uint64(first), ctypes.c_uint64(second)
        self._step = ctypes.c_uint32(1)

    def launch(self, dense: DenseMemory, out: int) -> None:
        """Adds the lanes of tensors, at most MOST, to zeroed rows of lanes at address `out`."""
        self.launch_at((*dense.addresses, *dense.sizes), out)

    def launch_at(self, memory: tuple[int, ...], out: int) -> None:
        """The same. memory: the addresses of all tensors, and then their sizes in bytes."""
        rows = self._known.get(memory)
        if rows is None:
            count = len(memory) // 2
            told = DenseMemory(0, [*memory[:count]], memory[count:])
            rows = self._known[memory] = self._bring(told)
        self._parts.value, self._count.value, self._tiles.value, launch = rows
        self._out.value = out
        launch()

    def rows_of(self, tensors: Sequence[Tensor]) -> Rows | None:
        """Rows that tell of plain tensors of any strides, one of lanes each, none of them empty;
        for `launch_rows`, before anything else is brought. None for too many parts to be kept."""
        key = (*map(_layout, tensors),)
        rows = self._known.get(key)
        if rows is None:
            table = PartTable()
            for slot, t in enumerate(tensors):
                for part in parts_of(t):
                    table.add(part, slot)
            if len(table) > min(MOST, self._part_rows):
                return None
            made, num_tiles = table.pack(self._found.tuning.geometry)
            rows = self._known[key] = self._brought(made, num_tiles)
        return rows

    def launch_rows(self, rows: Rows, out: int) -> None:
        """Adds the lanes that rows tell of to zeroed rows of lanes at address `out`."""
        self._parts.value, self._count.value, self._tiles.value, launch = rows
        self._out.value = out
        launch()

    def launch_known(self, out: int) -> Lanes:
        """Adds the lanes of a few known bytes to a zeroed row at address `out`; what they must be.

        Rows of lanes are zero before a launch, as are those of a tensor of zeros: a kernel that
        does not run would otherwise make all recordings equal.
        """
        sample, expected = known_text(self._device)
        self.launch(DenseMemory(0, [sample.data_ptr()], (sample.nbytes,)), out)
        return expected

    def _bring(self, dense: DenseMemory) -> Rows:
        """Copies the rows that tell of tensors behind those of the table."""
        kept, num_tiles = _packed(dense.sizes, self._found.tuning.geometry)
        made = kept.copy()
        made[:, 0] = np.frombuffer(array("Q", dense.addresses), np.uint64)
        return self._brought(made, num_tiles)

    def _brought(self, made: npt.NDArray[np.uint64], num_tiles: int) -> Rows:
        count = len(made)
        if self._used + count > self._part_rows:
            self._begin_table()
        at = self._used
        self._words[at : at + count] = made
        # Asynchronous, and from rows that are not written again; torch keeps the pinned memory
        # until it is done when this table makes room for the next one. A mode that sees operations
        # sees those of the program only.
        with torch._C._DisableTorchDispatch():
            staged = self._staged[at : at + count]
            self._table[at : at + count].copy_(staged, non_blocking=True)
        self._used += count
        grid = min(self._found.blocks, num_tiles)
        launch = self._launches.get(grid)
        if launch is None:
            launch = self._launches[grid] = self._prepared(grid)
        return self._table.data_ptr() + _PART_BYTES * at, count, num_tiles, launch

    def _begin_table(self) -> None:
        """A new table: launches that read the old one come before anything that takes its memory,
        since the stream is the same."""
        shape = (self._part_rows, FIELDS)
        with torch.inference_mode(False):
            self._table = torch.empty(shape, dtype=torch.int64, device=self._device)
            self._staged = torch.empty(
                shape, dtype=torch.int64, device="cpu", pin_memory=self._pinned
            )
        self._words = self._staged.numpy().view(np.uint64)
        self._known.clear()
        self._used = 0

    def _prepared(self, grid: int) -> Any:
        kernel, tuning = self._found.kernel, self._found.tuning
        assert kernel is not None
        return kernel.prepare(
            self._parts,
            self._count,
            self._tiles,
            *self._seeds,
            self._out,
            self._step,
            grid=grid,
            block=tuning.threads,
            shared=tuning.shared_bytes,
        )


class LaneRows:
    """Zeroed rows of lanes for the launches of one step on one stream, chunk by chunk."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first, self._address, self._used = 0, 0, CHUNK

    def take(self, count: int, chunks: list[Tensor]) -> tuple[int, int]:
        """Room for `count` rows: their address, and the first one's number among all chunks'.

        chunks: of the device, int64 [n, 4] each, where a new one goes.
        """
        if self._used + count > CHUNK:
            with torch.inference_mode(False):
                chunk = torch.zeros((CHUNK, 4), dtype=torch.int64, device=self._device)
            first = sum(map(len, chunks))
            chunks.append(chunk)
            self._first, self._address, self._used = first, chunk.data_ptr(), 0
        at = self._used
        self._used += count
        return self._address + LANES_BYTES * at, self._first + at


def _layout(t: Tensor) -> tuple[Any, ...]:
    """All that the rows of a tensor depend on."""
    return t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()


@functools.lru_cache(maxsize=_SIZES_KEPT)
def _packed(sizes: tuple[int, ...], geometry: Any) -> tuple[np.ndarray[Any, Any], int]:
    """The rows of tensors with these sizes, without their addresses, and the number of tiles."""
    made, num_tiles = pack_wholes([0] * len(sizes), sizes, geometry)
    made.setflags(write=False)
    return made, num_tiles
