"""What an execution takes from torch's CUDA allocator: on which devices, and for which streams.

A case may work on a GPU although none of its tensors lies there before or after, and on a stream
that is not torch's current one. Conditions have to know. Looking makes no CUDA context; without
CUDA in use nothing is found. What allocates past torch's allocator is not seen, nor is a stream
that gets nothing but memory which was held for it since before the case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

Segment = tuple[int, int, int]  # device, stream, address

COUNTER = "allocation.all.allocated"  # how often memory was asked for: it only grows


@dataclass(frozen=True)
class Look:
    """Allocations so far by device, and the allocator's segments as (device, stream, address)."""

    counts: Mapping[int, int]
    segments: frozenset[Segment]


# segments from before the case that tell nothing about it; give_back and leave fill it
_left: set[Segment] = set()


def look() -> Look:
    """What torch's CUDA allocator has given until now."""
    if not torch.cuda.is_initialized():
        return Look({}, frozenset())
    devices = range(torch.cuda.device_count())
    counts = {one: int(torch.cuda.memory_stats(one).get(COUNTER, 0)) for one in devices}
    return Look(counts, segments_of(_snapshot()))


def _snapshot() -> list[Any]:
    if not torch.cuda.is_initialized():
        return []
    try:
        return list(torch.cuda.memory_snapshot())
    except RuntimeError:  # cudaMallocAsync has no segments
        return []


def give_back() -> None:
    """Before a case is set up: frees what torch's CUDA allocator holds unused.

    What stays in use by others and has no room, such as the workspaces that cuBLAS keeps for each
    stream, is not counted for the case: it can take nothing from there.
    """
    free_unused()
    snapshot = _snapshot()
    _left.intersection_update(segments_of(snapshot))
    _left.update(segments_of(one for one in snapshot if is_full(one)))


def leave(device: torch.device, stream: torch.cuda.Stream) -> None:
    """What a stream that a condition made still holds is not counted for cases that come later."""
    held = segments_of(_snapshot())
    if held:
        _left.update(one for one in held if one[:2] == (device.index or 0, stream.cuda_stream))


def is_full(segment: Any) -> bool:
    """Whether all of a segment of torch.cuda.memory_snapshot() is in use."""
    return all(block["state"] == "active_allocated" for block in segment["blocks"])


def free_unused() -> None:
    """Frees what torch's CUDA allocator holds unused: a stream that gets memory then shows."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # after a CUDA error nothing can be freed any more
            torch.cuda.empty_cache()


def segments_of(snapshot: Iterable[Any]) -> frozenset[Segment]:
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
    """How many streams, other than torch's current ones, have segments at the second look.

    Not only new ones: from what the setup of a case left there an execution takes without a trace.
    Left out are those that were there at both looks and before the case.
    """
    counted = after.segments - (before.segments & _left)
    streams = {(device, stream) for device, stream, _ in counted}
    current = {d: torch.cuda.current_stream(d).cuda_stream for d in {d for d, _ in streams}}
    return sum(stream != current[device] for device, stream in streams)
