"""What an execution takes from torch's CUDA allocator: on which devices, and for which streams.

A case may work on a GPU although none of its tensors lies there before or after, and on a stream
that is not torch's current one. Conditions have to know. Looking makes no CUDA context; without
CUDA in use nothing is found. What allocates past torch's allocator is not seen, nor is a stream
that gets only memory which torch held for it already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

COUNTER = "allocation.all.allocated"  # how often memory was asked for: it only grows


@dataclass(frozen=True)
class Look:
    """Allocations so far by device, and the allocator's segments as (device, stream, address)."""

    counts: Mapping[int, int]
    segments: frozenset[tuple[int, int, int]]


def look() -> Look:
    """What torch's CUDA allocator has given until now."""
    if not torch.cuda.is_initialized():
        return Look({}, frozenset())
    devices = range(torch.cuda.device_count())
    counts = {one: int(torch.cuda.memory_stats(one).get(COUNTER, 0)) for one in devices}
    try:
        snapshot = torch.cuda.memory_snapshot()
    except RuntimeError:  # cudaMallocAsync has no segments
        snapshot = []
    return Look(counts, segments_of(snapshot))


def give_back() -> None:
    """Frees what torch's CUDA allocator holds unused: a stream that gets memory then shows."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # after a CUDA error nothing can be freed any more
            torch.cuda.empty_cache()


def segments_of(snapshot: Iterable[Any]) -> frozenset[tuple[int, int, int]]:
    """The segments outside private pools (of CUDA graphs), from torch.cuda.memory_snapshot()."""
    return frozenset(
        (int(one["device"]), int(one["stream"]), int(one["address"]))
        for one in snapshot
        if tuple(one.get("segment_pool_id", (0, 0))) == (0, 0)
    )


def devices_used(before: Look, after: Look) -> tuple[int, ...]:
    """Devices on which memory was asked for between two looks, ascending."""
    return tuple(d for d, n in sorted(after.counts.items()) if n != before.counts.get(d, 0))


def other_streams(before: Look, after: Look) -> int:
    """How many streams, other than torch's current ones, got new segments between two looks."""
    fresh = {(device, stream) for device, stream, _ in after.segments - before.segments}
    current = {d: torch.cuda.current_stream(d).cuda_stream for d in {d for d, _ in fresh}}
    return sum(stream != current[device] for device, stream in fresh)
