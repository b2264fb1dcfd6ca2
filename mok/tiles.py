"""GEMMs whose bits depend on nothing but their own rows: fixed tiles, one thread per GEMM.

Why: BLAS picks its algorithm by size, ISA and thread count, so a whole GEMM changes a row's bits
when the number of rows changes (measured at M = 1, 2, 3, 5, 7). Here every GEMM over rows has
exactly `TILE_ROWS` rows, zero-padded, with fp32 operands in buffers of their own (alignment is
therefore the allocator's, 64 bytes), and runs on one BLAS thread. Parallelism comes from Python
threads over independent pieces of work, since BLAS and the element-wise kernels release the GIL.

Refuses: a K split, a tile height that depends on the problem, and reduced-precision fp32 matmul.
The worker threads are the one process-wide object here. They are made at the first call, hold no
data, and keep a BLAS thread count of 1 for themselves; the caller's count is neither used for bits
nor changed (a test checks both).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch

from mok.errors import UnsupportedError

TILE_ROWS = 64
STRIP_ROWS = 512
"""Rows that the element-wise operations take at once: fewer and longer operations mean fewer
hand-overs of the GIL (measured: 5 % of the forward). Bits do not depend on it."""

ROWS_PER_PIECE = 256

Piece = Callable[[], None]


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The worker threads of this process; keyed by pid because threads do not survive a fork."""
    del pid
    lock = threading.Lock()

    def single_threaded() -> None:
        # torch.set_num_threads sets this thread's OpenMP and MKL counts, and also the count that
        # later new threads start with. The latter is put back from a helper thread.
        with lock:
            inherited = torch.get_num_threads()
            torch.set_num_threads(1)
            helper = threading.Thread(target=torch.set_num_threads, args=(inherited,))
            helper.start()
            helper.join()

    workers = max(2, os.cpu_count() or 1)
    return ThreadPoolExecutor(workers, thread_name_prefix="mok", initializer=single_threaded)


def run_pieces(pieces: Sequence[Piece], device: torch.device) -> None:
    """Run independent pieces of work, each on one thread; return when all are done.

    At most torch.get_num_threads() of the caller run at once. On devices other than the CPU they
    run one after another on the caller's thread, hence on its current stream. The first exception
    of a piece is raised after all threads have stopped.
    """
    if device.type != "cpu":
        with torch.no_grad():
            for piece in pieces:
                piece()
        return
    inference = torch.is_inference_mode_enabled()
    queue = iter(pieces)
    lock = threading.Lock()

    def next_piece() -> Piece | None:
        with lock:
            return next(queue, None)

    def drain() -> None:
        # Gradient and inference mode are thread-local, so the caller's do not reach this thread.
        with torch.inference_mode(inference), torch.no_grad():
            while (piece := next_piece()) is not None:
                piece()

    width = min(torch.get_num_threads(), len(pieces))
    futures = [_pool(os.getpid()).submit(drain) for _ in range(width)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def run_rows(count: int, work: Callable[[int, int], None], device: torch.device) -> None:
    """Run work(start, stop) over all rows, for work that treats each row on its own.

    On a CPU in pieces of ROWS_PER_PIECE: an operation with many OpenMP threads on the caller's
    thread would leave them spinning beside the workers (measured: 5 ms of a 27 ms forward).
    """
    step = ROWS_PER_PIECE if device.type == "cpu" else max(count, 1)
    run_pieces(
        [partial(work, start, min(start + step, count)) for start in range(0, count, step)], device
    )


def require_ieee_matmul(device: torch.device) -> None:
    """Refuse a process-wide setting under which an fp32 GEMM is not fp32.

    Raises UnsupportedError; changing the setting here would change it for every thread.
    """
    backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    given = str(backend.matmul.fp32_precision)
    if given not in ("none", "ieee"):
        raise UnsupportedError(
            f"fp32 matrix products on {device.type} are set to {given!r}; the portable backend "
            "needs 'ieee'. Call torch.set_float32_matmul_precision('highest') before this layer."
        )


def strips(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The (first, last + 1) rows of each strip between two rows; start is a tile border."""
    for first in range(start, stop, STRIP_ROWS):
        yield first, min(first + STRIP_ROWS, stop)


def multiply(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32, one GEMM per tile of TILE_ROWS rows; M is a multiple of TILE_ROWS.

    With MKL one call multiplies all tiles: its batched GEMM gives each tile the bits of a GEMM of
    its own, whatever their number (a test compares them), and costs one hand-over of the GIL.
    """
    height, width = left_MK.shape[0], right_KN.shape[1]
    result = torch.empty((height, width), dtype=torch.float32, device=left_MK.device)
    if result.device.type == "cpu" and torch.backends.mkl.is_available():
        tiles = height // TILE_ROWS
        torch.bmm(
            left_MK.view(tiles, TILE_ROWS, left_MK.shape[1]),
            right_KN.expand(tiles, -1, -1),
            out=result.view(tiles, TILE_ROWS, width),
        )
        return result
    for rows, out in zip(left_MK.split(TILE_ROWS), result.split(TILE_ROWS), strict=True):
        torch.mm(rows, right_KN, out=out)
    return result


def padded(rows: torch.Tensor) -> torch.Tensor:
    """All rows widened to fp32 in a fresh buffer, zero-padded to a multiple of TILE_ROWS rows."""
    count = rows.shape[0]
    height = -(-count // TILE_ROWS) * TILE_ROWS
    result = torch.empty((height, *rows.shape[1:]), dtype=torch.float32, device=rows.device)
    result[:count].copy_(rows)
    result[count:].zero_()
    return result


def widened(weight: torch.Tensor) -> torch.Tensor:
    """A weight matrix in fp32, in a contiguous buffer of its own."""
    return weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two weight matrices of equal shape, widened, one above the other in one fresh buffer."""
    height = first.shape[0]
    result = torch.empty((2 * height, first.shape[1]), dtype=torch.float32, device=first.device)
    result[:height].copy_(first)
    result[height:].copy_(second)
    return result
