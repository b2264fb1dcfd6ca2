"""Digests on their way into a step: taken at once, fetched from the devices at the step's end.

A tensor on a CUDA device is digested there by a kernel on torch's current stream, without waiting,
so later changes in place are not seen; the lanes stay on the device until the border of the step,
where they are copied without waiting, too, and read when the next step ends. Tensors elsewhere are
digested on the host, at once.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verify.device_inputs import Place, in_few_parts
from verify.hashing import integer_view, plain_tensor
from verify.tracing.definitions import LANES_BYTES, Whole
from verify.tracing.host_lanes import HostLanes, places_of
from verify.tracing.repeats import RepeatedDigests
from verify.tracing.small_tensors import LARGEST, SmallDigests

_LANES = struct.Struct("<4Q")


@dataclass
class _OnDevice:
    """What one device has for the step: lanes, int64 [n, 4] each, and the streams they come of."""

    lanes: list[Tensor] = field(default_factory=list)
    rows: int = 0
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)
    waiting: list[tuple[Tensor, Whole | None, int]] = field(default_factory=list)


class DigestQueue:
    """The digests of a step in their order. Not for several threads at a time."""

    def __init__(self) -> None:
        self._host, self._repeats, self._small = HostLanes(), RepeatedDigests(), SmallDigests()
        self._lanes = bytearray()
        self._devices: dict[int, _OnDevice] = {}
        self._fetched: list[tuple[int, int, int, int]] = []  # entry, device, first row, rows

    def put(self, t: Tensor, whole: Whole | None, *, again: bool = False) -> None:
        """Appends a digest. UnsupportedError for what has none; then nothing is appended.

        again: whether this very tensor is likely to come again within the step.

        After the last tensor of a place in the program, call `launch`.
        """
        plain = plain_tensor(t)
        if plain.is_cuda and _has_kernel(plain):
            if plain.is_neg() and not (plain.is_floating_point() or plain.is_complex()):
                plain = plain.resolve_neg()
            if in_few_parts(plain, None):
                on = self._devices.setdefault(plain.get_device(), _OnDevice())
                on.waiting.append((plain, whole, len(self._lanes)))
                self._lanes += bytes(LANES_BYTES)
                return
        if whole is None and plain.device.type == "cpu":
            if plain.nbytes <= LARGEST and sys.byteorder == "little":
                data = integer_view(plain).contiguous().numpy().reshape(-1).view(np.uint8)
                self._lanes += bytes(LANES_BYTES)
                self._small.add(data, len(self._lanes) - LANES_BYTES, self._lanes)
                return
            if again:
                lanes = self._repeats.of(t, plain, lambda: self._host.of(plain, None))
            else:
                lanes = self._host.of(plain, None)
        else:
            lanes = self._host.of(plain, whole)
        self._lanes += _LANES.pack(*lanes)

    def keep(self, count: int) -> None:
        """Drops what came after the first `count` digests, and what was left half done."""
        size = count * LANES_BYTES
        del self._lanes[size:]
        self._small.keep(size)
        self._fetched = [one for one in self._fetched if one[0] < size]
        for on in self._devices.values():
            on.waiting = [one for one in on.waiting if one[2] < size]

    def launch(self) -> None:
        """Digests what waits on devices: one launch a device, without waiting for it."""
        for index, on in self._devices.items():
            if on.waiting:
                _launch(index, on, self._fetched)

    def drain(self) -> tuple[bool, Callable[[], bytes]]:
        """Begins to fetch all digests of the step; whether that takes time, and what gives them.

        The queue is empty then, and takes the next step's.
        """
        self._repeats.forget()
        self._small.finish(self._lanes)
        lanes, fetched, devices = self._lanes, self._fetched, self._devices
        self._lanes, self._fetched, self._devices = bytearray(), [], {}
        copies = {index: _copied(index, on) for index, on in devices.items() if on.lanes}

        def finish() -> bytes:
            for index, (staged, event) in copies.items():
                event.synchronize()
                words = staged.numpy().view(np.uint64)
                for entry, device, first, rows in fetched:
                    if device == index:
                        total = words[first : first + rows].sum(axis=0, dtype=np.uint64)
                        lanes[entry : entry + LANES_BYTES] = total.astype("<u8").tobytes()
            return bytes(lanes)

        return bool(copies), finish

    def close(self) -> None:
        """Ends the threads of the host's digests."""
        self._host.close()


def _has_kernel(t: Tensor) -> bool:
    from verify.device_kernel import loaded

    return loaded(t.get_device()).kernel is not None


def _launch(index: int, on: _OnDevice, fetched: list[tuple[int, int, int, int]]) -> None:
    from verify.device_digests import DigestPlan

    waiting, on.waiting = on.waiting, []
    tensors: list[Tensor] = []
    layouts: dict[str, Place | None] = {}
    for t, whole, entry in waiting:
        pieces = list(places_of(t, whole))
        fetched.append((entry, index, on.rows + len(tensors), len(pieces)))
        for piece, place in pieces:
            if place is not None:
                layouts[str(len(tensors))] = place
            tensors.append(piece)
    if not tensors:
        return
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index)
        if stream.stream_id not in on.streams:
            on.streams[stream.stream_id] = stream
        plan = DigestPlan(tensors, layouts=layouts)
        plan.launch()
        if stream != torch.cuda.default_stream(index):
            for t in tensors:  # its memory may be another stream's, and is not kept
                t.record_stream(stream)
    on.lanes.append(plan.lanes)
    on.rows += len(tensors)


def _copied(index: int, on: _OnDevice) -> tuple[Tensor, torch.cuda.Event]:
    """The lanes on their way into pinned memory, int64 [n, 4], and what tells their arrival."""
    with torch.cuda.device(index):
        current = torch.cuda.current_stream(index)
        for stream in on.streams.values():
            if stream != current:
                current.wait_stream(stream)
        together = torch.cat(on.lanes)
        staged = torch.empty(together.shape, dtype=torch.int64, pin_memory=True)
        staged.copy_(together, non_blocking=True)
        event = torch.cuda.Event()
        event.record(current)
        for lanes in on.lanes:
            lanes.record_stream(current)
    return staged, event
