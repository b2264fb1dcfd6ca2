"""Loads on a GPU: kernels on a stream of their own that work, or hold multiprocessors, meanwhile.

A load is one launch, dispatched before the execution and released through host-mapped memory. So it
also works where all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1): what comes
behind a kernel of which every block is running is not kept waiting. Nothing can hang: a block ends
by itself when its time is over. A case that waits for the whole device (torch.cuda.synchronize)
waits for that, too, and then has no overlap.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from mok import jit
from verify.conditions.overlap import HEAD, WORDS, Overlap, overlap_of, settled, traces_of

THREADS = 256
TIMEOUT = 5.0  # seconds, unless asked otherwise
START_TIMEOUT = 2.0  # seconds for a load's blocks to come up
SETTLE_TIMEOUT = 0.1  # seconds for a load's next sign of life; one comes every few microseconds
BUFFER = 256 * 2**20  # bytes; several times the L2 of any device
LEAST_BUFFER = 16 * 2**20
WORK = {"memory": 0, "fma": 1, "tensor": 2}
BUSY_SHARE = (3, 4)  # of the multiprocessors: kernels that need a whole one must find some


class LoadUnavailable(RuntimeError):
    """A load cannot be made here; the message says why and what to do."""


@dataclass
class Load:
    """A load on one device: `start`, `begin`, the execution, `overlap`, `release`; again if wanted.

    blocks: of the kernel, one a multiprocessor for one that holds them.
    """

    device: torch.device
    blocks: int
    _record: torch.Tensor
    _words: Any  # the record as numpy sees it
    _stopped: torch.Tensor
    _stream: torch.cuda.ExternalStream
    _launch: Callable[[torch.cuda.Stream], None]
    _stamps: tuple[Callable[[], None], Callable[[], None]]

    def start(self) -> int:
        """Launches it and waits until all blocks run, for START_TIMEOUT at most; how many do."""
        self._words[:] = 0
        with torch.cuda.stream(self._stream):
            self._stopped.zero_()
        self._launch(self._stream)
        until = time.monotonic() + START_TIMEOUT
        while (running := self._started()) < self.blocks and time.monotonic() < until:
            time.sleep(5e-5)
        return running

    def begin(self) -> None:
        """An execution begins here on torch's current stream of the device."""
        self._words[1] = self._words[2] = 0
        self._stamps[0]()

    def overlap(self) -> Overlap:
        """Waits for the execution, that is for the current stream, and measures. Load goes on."""
        self._stamps[1]()
        torch.cuda.current_stream(self.device).synchronize()
        end = int(self._words[2])
        until = time.monotonic() + SETTLE_TIMEOUT
        while True:
            traces = traces_of(self._words.tolist(), self.blocks)
            if settled(traces, self.blocks, end) or time.monotonic() > until:
                return overlap_of(traces, self.blocks, int(self._words[1]), end)
            time.sleep(5e-5)

    def release(self) -> None:
        """Ends the load, if it runs, and waits for that."""
        self._words[0] = 1
        self._stream.synchronize()

    def _started(self) -> int:
        firsts = self._words[HEAD::WORDS][: self.blocks]
        return int((firsts != 0).sum())


@contextmanager
def busy_stream(
    device: torch.device | int | None = None, *, work: str = "memory", timeout: float = TIMEOUT
) -> Iterator[Load]:
    """Three quarters of the multiprocessors at work on another stream; started, and ended after.

    work: "memory" (bandwidth), "fma" or "tensor". timeout: seconds after which it ends by itself.
    Raises LoadUnavailable, and mok.jit.JitError where kernels cannot be compiled or launched.
    """
    with opened(device, work=work, timeout=timeout) as load:
        load.start()
        yield load


@contextmanager
def held_multiprocessors(
    count: int,
    device: torch.device | int | None = None,
    *,
    hammer: bool = False,
    timeout: float = TIMEOUT,
) -> Iterator[Load]:
    """`count` multiprocessors on which nothing else finds room; started, and ended after.

    hammer: they use memory bandwidth meanwhile. Raises as `busy_stream` does.
    """
    with opened(device, held=count, work="memory" if hammer else "", timeout=timeout) as load:
        load.start()
        yield load


@contextmanager
def opened(
    device: torch.device | int | None = None,
    *,
    held: int = 0,
    work: str = "",
    timeout: float = TIMEOUT,
) -> Iterator[Load]:
    """A load that is not started yet, of the kind that `busy_stream` (held 0) or
    `held_multiprocessors` starts. Whatever happens, it has ended afterwards."""
    refuse_blocking(os.environ)
    there = device_of(device)
    total = torch.cuda.get_device_properties(there).multi_processor_count
    blocks = held or max(1, total * BUSY_SHARE[0] // BUSY_SHARE[1])
    if not 0 < blocks <= total:
        raise LoadUnavailable(f"{held} multiprocessors of {there} wanted; it has {total}")
    macros = {"HAMMER": int(work == "memory")} if held else {"WORK": WORK[work]}
    name = "hold" if held else "busy"
    with torch.cuda.device(there):
        kernel = jit.load(f"conditions/{name}.cu", name, macros=macros, device=there)
        stamp = jit.load("conditions/probe.cu", "stamp", device=there)
        shared = kernel.shared_limit if held else 0
        record = torch.zeros(HEAD + WORDS * blocks, dtype=torch.int64, pin_memory=True)
        stopped = torch.zeros(1, dtype=torch.int32, device=there)
        buffer = _buffer(there) if work == "memory" else stopped
        launch = kernel.prepare(
            record,
            stopped,
            ctypes.c_uint64(round(timeout * 1e9)),
            buffer,
            ctypes.c_uint64(buffer.nbytes // 16),
            grid=blocks,
            block=THREADS,
            shared=shared,
        )
        marks = [stamp.prepare(record[slot:], grid=1, block=32) for slot in (1, 2)]
        torch.cuda.current_stream().synchronize()
    # the case below may count on another current device
    with own_stream(there) as stream:
        marked = (marks[0], marks[1])
        load = Load(there, blocks, record, record.numpy(), stopped, stream, launch, marked)
        try:
            yield load
        finally:
            with suppress(RuntimeError):  # a CUDA error ended it, and has been raised elsewhere
                load.release()
                # a mark that is still to be written must not outlive the record
                torch.cuda.current_stream(there).synchronize()


def device_of(device: torch.device | int | None) -> torch.device:
    """A CUDA device with its index; None is torch's current one."""
    if isinstance(device, torch.device) and device.index is not None:
        return device
    index = device if isinstance(device, int) else torch.cuda.current_device()
    return torch.device("cuda", index)


def refuse_blocking(environment: Mapping[str, str]) -> None:
    """Raises LoadUnavailable where every launch waits for its kernel: nothing runs beside it."""
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise LoadUnavailable(
            "CUDA_LAUNCH_BLOCKING makes every launch wait for its kernel, so that nothing runs"
            " beside another; unset it"
        )


@contextmanager
def own_stream(device: torch.device) -> Iterator[torch.cuda.ExternalStream]:
    """A non-blocking stream that is none of torch's 32 pooled ones, which a case may be given."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context current in this thread
        status, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
    if int(status) != 0:
        raise LoadUnavailable(f"the driver makes no stream on {device}: {status.name}")
    stream = torch.cuda.ExternalStream(int(handle), device=device)
    try:
        yield stream
    finally:
        with suppress(RuntimeError):  # a CUDA error of the case must not be hidden by this
            stream.synchronize()
        with torch.cuda.device(device):
            driver.cuStreamDestroy(handle)


def _buffer(device: torch.device) -> torch.Tensor:
    free, _ = torch.cuda.mem_get_info(device)
    size = min(BUFFER, free // 4) // 16 * 16
    if size < LEAST_BUFFER:
        raise LoadUnavailable(
            f"a load on memory needs {4 * LEAST_BUFFER} bytes free on {device}; {free} are: use"
            " a smaller case"
        )
    return torch.empty(size, dtype=torch.uint8, device=device)
