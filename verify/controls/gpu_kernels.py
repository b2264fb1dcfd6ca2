"""Planted faults as CUDA kernels, and what calls them: the same code with the fault and without.

Every function takes fp32 tensors on one CUDA device, contiguous, and `fault`: True compiles the
kernel with its fault, False its clean twin. What they compute is said here, so that a test can
compare both with torch. Everything is launched on torch's current stream, and bounded.
"""

from __future__ import annotations

from ctypes import c_uint32
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mok.jit import Kernel

CHUNKS = 64  # partial sums, where their number is fixed
SPLITS, EDGE = 8, 32  # of K, and of a tile: csrc/conditions/faults/split_k.cu
TILE_ROWS = 64  # csrc/conditions/faults/tail.cu
BLOCKS = 32  # of the sum whose last block adds up
PAUSE = 100_000  # cycles until a block has made its part of the tile: about 50 us
WORK = 160_000  # cycles of the reader: halfway, as a ratio, between one round of blocks and two
ODDS = 30  # the reader looks ahead of the barrier once in so many draws
TILE = 32  # values; csrc/conditions/faults/handover.cu
STARVED = 0x7FFFDEAD  # bits of a tile whose parts never came; the same file
SLOW = 1_000_000  # cycles, about half a millisecond


def kernel(source: str, entry: str, device: torch.device, *, fault: bool | None = None) -> Kernel:
    """An entry of csrc/conditions/faults/SOURCE.cu, compiled with or without its fault; None for a
    source that has none. Raises mok.jit.JitError."""
    from mok import jit

    macros = {} if fault is None else {"FAULT": int(fault)}
    return jit.load(f"conditions/faults/{source}.cu", entry, macros=macros, device=device)


def column_sums(g: Tensor, *, fault: bool) -> Tensor:
    """Sums over dimension 0 of g [rows, columns], as [columns].

    The fault adds partial sums by atomics, in order of arrival.
    """
    rows, columns = g.shape
    out = torch.zeros(columns, device=g.device)
    parts = out if fault else g.new_empty(CHUNKS, columns)
    first = kernel("column_sums", "planted_column_parts", g.device, fault=fault)
    first.launch(
        g,
        out,
        parts,
        c_uint32(rows),
        c_uint32(columns),
        grid=(-(-columns // 128), CHUNKS),
        block=128,
    )
    if not fault:
        tree = kernel("column_sums", "planted_column_tree", g.device, fault=False)
        tree.launch(parts, out, c_uint32(columns), grid=columns, block=CHUNKS)
    return out


class _Biased(torch.autograd.Function):
    """x + bias, with the gradient of bias by `column_sums`."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, bias: Tensor, fault: bool
    ) -> Tensor:
        ctx.fault = fault  # type: ignore[attr-defined]
        return x + bias

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor
    ) -> tuple[None, Tensor, None]:
        return None, column_sums(upstream[0].contiguous(), fault=ctx.fault), None  # type: ignore[attr-defined]


def add_bias(x: Tensor, bias: Tensor, *, fault: bool) -> Tensor:
    """x [rows, columns] + bias [columns]; the fault is in the gradient of bias."""
    out: Tensor = _Biased.apply(x, bias, fault)
    return out


def split_product(a: Tensor, b: Tensor, *, fault: bool) -> Tensor:
    """a [m, k] times b [k, n]; m and n multiples of EDGE, k of EDGE * SPLITS.

    The fault adds the partial products of the splits in the order in which they were finished.
    """
    (m, k), n = a.shape, b.shape[1]
    tiles = m // EDGE * (n // EDGE)
    workspace = a.new_empty(tiles, SPLITS, EDGE * EDGE)
    counters = torch.zeros(tiles, 2, dtype=torch.int32, device=a.device)
    out = a.new_empty(m, n)
    kernel("split_k", "planted_split_k", a.device, fault=fault).launch(
        a, b, out, workspace, counters, c_uint32(n), c_uint32(k), grid=(tiles, SPLITS), block=256
    )
    return out


def hand_over(
    values: Tensor,
    *,
    fault: bool,
    odds: int = ODDS,
    blocks: int | None = None,
    times: Tensor | None = None,
) -> Tensor:
    """2 t[i + 1] - t[i] around the tile t of TILE values that `blocks` blocks fill together.

    values: [rows, TILE]. blocks: at least 2; None is as many as run at once on the whole device.
    The fault reads the tile ahead of the barrier once in `odds` draws, always for 0. times: int64
    [2], gets the cycles until the tile was filled and until the reader had done its own work.
    Where the blocks were kept from running for two seconds, every value is the NaN of STARVED.
    """
    handover = kernel("handover", "planted_handover", values.device, fault=fault)
    # two blocks a multiprocessor: the one that waits for all others leaves room for them anywhere
    shared = handover.shared_limit // 2 - 1024
    grid = blocks or wave(handover, shared, values.device)
    out = values.new_empty(TILE)
    handover.launch(
        values,
        values.new_empty(grid - 1, TILE),
        out,
        torch.zeros(1, dtype=torch.int32, device=values.device),
        c_uint32(len(values)),
        c_uint32(PAUSE),
        c_uint32(WORK),
        c_uint32(odds),
        times,
        grid=grid,
        block=64,
        shared=shared,
    )
    return out


def wave(handover: Kernel, shared: int, device: torch.device) -> int:
    """How many blocks of a hand-over run at once on the whole device."""
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return count * max(1, handover.resident_blocks(64, shared))


def handed_over(values: Tensor, blocks: int) -> Tensor:
    """What `hand_over` must give with so many blocks: the same additions in the same order."""
    tile = torch.zeros(TILE, device=values.device)
    for part in range(blocks - 1):
        tile = tile + values[part % len(values)]
    return 2 * tile.roll(-1) - tile


def padded_sums(x: Tensor, *, count: int, fault: bool) -> Tensor:
    """Sums over the first `count` rows of x [capacity, columns], columns at most 1024.

    They go through a workspace whose padding rows the fault leaves unwritten, and sums them too.
    """
    capacity, columns = x.shape
    workspace, out = torch.empty_like(x), x.new_empty(columns)
    kernel("padding", "planted_pack", x.device, fault=fault).launch(
        x, workspace, c_uint32(count), grid=capacity, block=columns
    )
    kernel("padding", "planted_column_fold", x.device, fault=fault).launch(
        workspace, out, c_uint32(capacity), c_uint32(columns), grid=-(-columns // 128), block=128
    )
    return out


def scaled_tiles(x: Tensor, *, fault: bool) -> Tensor:
    """1.5 x + 0.25 for x [rows, columns], columns at most 1024.

    The fault writes whole tiles of TILE_ROWS rows only.
    """
    rows, columns = x.shape
    out = torch.empty_like(x)
    kernel("tail", "planted_tiles", x.device, fault=fault).launch(
        x, out, c_uint32(rows), grid=-(-rows // TILE_ROWS), block=columns
    )
    return out


def grid_sums(x: Tensor, *, num_sms: int | None, fault: bool) -> Tensor:
    """Sums over dimension 0 of x [rows, columns], columns at most 1024, by `num_sms` blocks, one
    for every multiprocessor of the device when None.

    The fault keeps a partial sum for every block, so their number and their rows depend on it.
    """
    rows, columns = x.shape
    blocks = num_sms or torch.cuda.get_device_properties(x.device).multi_processor_count
    count = blocks if fault else CHUNKS
    parts, out = x.new_empty(count, columns), x.new_empty(columns)
    kernel("grid_sums", "planted_grid_parts", x.device, fault=fault).launch(
        x, parts, c_uint32(rows), c_uint32(CHUNKS), grid=blocks, block=columns
    )
    kernel("grid_sums", "planted_grid_fold", x.device, fault=fault).launch(
        parts, out, c_uint32(count), grid=1, block=columns
    )
    return out


def reachable_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors kernels on torch's current stream can use: those of its green
    context, or all. While a graph is recorded nothing is asked, and it is all."""
    total = int(torch.cuda.get_device_properties(device).multi_processor_count)
    stream = torch.cuda.current_stream(device).cuda_stream
    if stream == 0 or torch.cuda.is_current_stream_capturing():
        return total
    from cuda.bindings import driver

    status, context = driver.cuStreamGetGreenCtx(driver.CUstream(stream))
    if int(status) != 0 or int(context) == 0:
        return total
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    status, resource = driver.cuGreenCtxGetDevResource(context, kind)
    return int(resource.sm.smCount) if int(status) == 0 else total


@dataclass
class Calls:
    """How often a sum by its last block was called, on the host, and its counter on the device."""

    count: int = 0
    counter: Tensor | None = field(default=None, repr=False)


def last_block_sums(x: Tensor, calls: Calls, *, fault: bool) -> Tensor:
    """Sums over dimension 0 of x [rows, columns], columns at most 1024; the last block adds up.

    The fault knows the last block by the number of the call, which the host passes by value.
    """
    rows, columns = x.shape
    if calls.counter is None:
        calls.counter = torch.zeros(1, dtype=torch.int32, device=x.device)
    calls.count += 1
    parts, out = x.new_empty(BLOCKS, columns), x.new_empty(columns)
    kernel("epoch", "planted_last_block", x.device, fault=fault).launch(
        x,
        parts,
        out,
        calls.counter,
        c_uint32(calls.count),
        c_uint32(rows),
        grid=BLOCKS,
        block=columns,
    )
    return out


def doubled_plus_one(x: Tensor, *, fault: bool) -> Tensor:
    """2 x + 1 by a slow kernel and a quick one that reads what the first wrote; x [count].

    The fault launches the second on the device's default stream, whatever the current one is.
    """
    count = x.numel()
    doubled, out = torch.zeros_like(x), torch.empty_like(x)
    grid = -(-count // 256)
    kernel("two_streams", "planted_slow_double", x.device).launch(
        x, doubled, c_uint32(count), c_uint32(SLOW), grid=grid, block=256
    )
    kernel("two_streams", "planted_increment", x.device).launch(
        doubled,
        out,
        c_uint32(count),
        grid=grid,
        block=256,
        stream=torch.cuda.default_stream(x.device) if fault else None,
    )
    return out


class _Doubled(torch.autograd.Function):
    """2 x, whose gradient is 2 g by the same kernel."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, fault: bool) -> Tensor:
        ctx.fault = fault  # type: ignore[attr-defined]
        return _twice(x, None)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor
    ) -> tuple[Tensor, None]:
        (g,) = upstream
        aside = torch.cuda.default_stream(g.device) if ctx.fault else None  # type: ignore[attr-defined]
        return _twice(g.contiguous(), aside), None


def _twice(x: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    out = torch.empty_like(x)
    kernel("two_streams", "planted_slow_double", x.device).launch(
        x,
        out,
        c_uint32(x.numel()),
        c_uint32(0),
        grid=-(-x.numel() // 256),
        block=256,
        stream=stream,
    )
    return out


def doubled(x: Tensor, *, fault: bool) -> Tensor:
    """2 x for x [count]; the fault launches the kernel of its gradient on the default stream."""
    out: Tensor = _Doubled.apply(x, fault)
    return out
