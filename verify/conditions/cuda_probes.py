"""What is in effect on a GPU, measured: multiprocessors in reach, a late stream, a cold cache."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from mok import jit

LINE = 64  # 32-bit words between two reads of the chain: 256 bytes, so that no line serves two
HOPS = 512
NEAR = 16  # lines of the short chain: read again so soon that nobody else pushes them out of L2
FLUSHES = 4  # times the size of L2 that is written and read
COLD = 1.3  # a read from memory takes at least so many times as long as one from L2
_PER_MULTIPROCESSOR = 8
_SPIN = 50_000  # nanoseconds that a probing block stays


def reached_multiprocessors(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> set[int]:
    """The multiprocessors that blocks get on `stream` now, by launching many short ones."""
    count = torch.cuda.get_device_properties(device).multi_processor_count * _PER_MULTIPROCESSOR
    kernel = jit.load("conditions/probe.cu", "locate", device=device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        found = torch.zeros(count, dtype=torch.int32, device=device)
        kernel.launch(found, ctypes.c_uint64(_SPIN), grid=count, block=32, stream=stream)
        return {place - 1 for place in found.tolist() if place}


def delay_stream(device: torch.device, seconds: float) -> None:
    """Keeps torch's current stream of the device waiting, without the host."""
    kernel = jit.load("conditions/probe.cu", "delay", device=device)
    kernel.launch(ctypes.c_uint64(round(seconds * 1e9)), grid=1, block=32)


@dataclass(frozen=True)
class Cache:
    """What measures and empties the L2 of one device: chains of dependent reads, and a buffer.

    chain: every line is read once. near: a few lines, read again and again.
    """

    device: torch.device
    chain: torch.Tensor
    near: torch.Tensor
    result: torch.Tensor
    buffer: torch.Tensor

    def cycles(self, chain: torch.Tensor) -> int:
        """Clock cycles of a read of a chain, on average."""
        kernel = jit.load("conditions/probe.cu", "chase", device=self.device)
        kernel.launch(chain, ctypes.c_uint32(HOPS), self.result, grid=1, block=32)
        return round(int(self.result[0]) / HOPS)

    def flush(self) -> None:
        """Writes and reads more than L2 holds, on the current stream."""
        self.buffer.add_(1)

    def chill(self) -> tuple[int, int]:
        """Empties the cache; cycles of a read that L2 answers, and of one after that.

        What L2 answers in is read off the short chain: other processes on the device may push out
        the long one between any two of its reads.
        """
        with torch.cuda.device(self.device):
            self.cycles(self.chain)
            self.cycles(self.near)
            warm = self.cycles(self.near)
            self.flush()
            # the few lines of the chain are all that is read since
            return warm, self.cycles(self.chain)


def cache_of(device: torch.device) -> Cache:
    """For one device. Raises torch.OutOfMemoryError where four times its L2 is not free."""
    jit.load("conditions/probe.cu", "chase", device=device)
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return Cache(
        device,
        ring_of_lines(HOPS).to(device),
        ring_of_lines(NEAR).to(device),
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.zeros(FLUSHES * size // 8, dtype=torch.int64, device=device),
    )


def ring_of_lines(lines: int) -> torch.Tensor:
    """int32: word LINE i holds LINE j, the next place to read; visits all lines, from 0 on.

    An odd multiplier visits every line of a power of two once, in an order that no prefetcher
    follows.
    """
    order = [(171 * hop + 13) % lines for hop in range(lines)]
    at = order.index(0)
    order = order[at:] + order[:at]
    chain = torch.zeros(lines * LINE, dtype=torch.int32)
    for place, following in zip(order, order[1:] + order[:1], strict=True):
        chain[place * LINE] = following * LINE
    return chain
