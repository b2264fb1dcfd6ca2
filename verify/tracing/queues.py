"""Digests on their way into a step: taken at once, fetched from the devices at the step's end.

A tensor on a CUDA device is digested there by a kernel on torch's current stream, without waiting,
so later changes in place are not seen; the lanes stay on the device until the border of the step,
where they are copied without waiting, too, and read when the next step ends. Tensors elsewhere are
digested on the host, at once. No digest is taken from an earlier one because a tensor looks
unchanged to torch: what was met is read again, since to see writes that no counter sees is what
recordings are for.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mok.launching import raw_stream
from verify.device_dense import DenseMemory, dense_memory
from verify.device_inputs import Place, in_few_parts
from verify.device_kernel import loaded
from verify.errors import VerifyError
from verify.hashing import integer_view, plain_tensor
from verify.tracing.definitions import LANES_BYTES, Whole
from verify.tracing.device_launches import MOST, LaneRows, StreamLaunches
from verify.tracing.host_lanes import HostLanes, Lanes, places_of
from verify.tracing.repeats import RepeatedDigests
from verify.tracing.small_tensors import LARGEST, SmallDigests

_LANES = struct.Struct("<4Q")
_WRONG = (
    "the digest kernel gives other lanes on cuda:{} than the host does, or did not run, so nothing "
    "can be recorded there; run verify controls"
)


@dataclass
class _OnDevice:
    """What one device has for the step: lanes, int64 [n, 4] each, and the streams they come of.

    room: by the stream's number, rows that wait for launches.
    """

    lanes: list[Tensor] = field(default_factory=list)
    room: dict[int, LaneRows] = field(default_factory=dict)
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)
    waiting: list[tuple[Tensor, Whole | None, int]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Of all lanes. Counted, since Ctrl-C may come between two changes."""
        return sum(map(len, self.lanes))


class DigestQueue:
    """The digests of a step in their order. Not for several threads at a time."""

    def __init__(self) -> None:
        self._host, self._repeats, self._small = HostLanes(), RepeatedDigests(), SmallDigests()
        self._lanes = bytearray()
        self._devices: dict[int, _OnDevice] = {}
        self._fetched: list[tuple[int, int, int, int]] = []  # entry, device, first row, rows
        self._known: list[tuple[int, int, Lanes]] = []  # device, row, and what it has to be
        self._launches: dict[tuple[int, int], StreamLaunches] = {}  # by device and stream

    def put(self, t: Tensor, whole: Whole | None, *, again: bool = False) -> None:
        """Appends a digest. UnsupportedError for what has none; then nothing is appended.

        again: whether this very tensor is likely to come again within the step.

        After the last tensor of a place in the program, call `launch`.
        """
        plain = plain_tensor(t)
        if plain.is_cuda and _has_kernel(plain):
            if not plain.numel():
                self._lanes += bytes(LANES_BYTES)
                return
            if plain.is_neg() and not (plain.is_floating_point() or plain.is_complex()):
                plain = plain.resolve_neg()
            if in_few_parts(plain, None):
                on = self._devices.setdefault(plain.get_device(), _OnDevice())
                on.waiting.append((plain, whole, len(self._lanes)))
                self._lanes += bytes(LANES_BYTES)
                return
        if whole is None and plain.device.type == "cpu":
            packed = self._host.packed(plain)
            if packed is not None:  # at the price of seeing whether it is as it was
                self._lanes += packed
                return
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

    def put_rows(
        self,
        index: int,
        rows: Tensor,
        places: Sequence[tuple[int, int] | bytes],
        expected: Lanes,
    ) -> None:
        """Appends digests that device `index` has, or will have when its current stream is there.

        rows: int64 [n, 4]. places: of each digest, the first of its rows and how many add up, or
        its lanes, 32 bytes, for one that is not among them. expected: of the first row, if there is
        one; what fetches the step's digests raises VerifyError if it has others.
        """
        on = self._devices.setdefault(index, _OnDevice())
        before = on.rows
        for one in places:
            if isinstance(one, bytes):
                self._lanes += one
            else:
                self._fetched.append((len(self._lanes), index, before + one[0], one[1]))
                self._lanes += bytes(LANES_BYTES)
        on.lanes.append(rows)
        if len(rows):
            self._known.append((index, before, expected))
        _remember_stream(index, on)

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
                waiting, on.waiting = on.waiting, []
                tensors = [t for t, whole, _ in waiting if whole is None]
                usual = len(tensors) == len(waiting) <= MOST
                dense = dense_memory(tensors) if usual else None
                if dense is None:
                    _launch(index, on, waiting, self._fetched)
                else:
                    first = self._launch_dense(on, tensors, dense)
                    for at, (_, _, entry) in enumerate(waiting, first):
                        self._fetched.append((entry, index, at, 1))

    def _launch_dense(self, on: _OnDevice, tensors: list[Tensor], dense: DenseMemory) -> int:
        """Digests whole tensors whose bytes lie together; the number of the first one's row."""
        index = dense.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self._launch_dense(on, tensors, dense)
        handle, device = raw_stream(index), torch.device("cuda", index)
        if handle not in on.room:
            _remember_stream(index, on)
            on.room[handle] = LaneRows(device)
        launches = self._launches.get((index, handle))
        if launches is None:
            launches = StreamLaunches(loaded(index), device)
            out, row = on.room[handle].take(1, on.lanes)
            # Seen when the step's digests are fetched: nothing waits for the device before.
            self._known.append((index, row, launches.launch_known(out)))
            self._launches[index, handle] = launches
        out, first = on.room[handle].take(len(tensors), on.lanes)
        launches.launch(dense, out)
        if handle:  # memory may be another stream's, and is not kept
            stream = torch.cuda.current_stream(index)
            for t in tensors:
                t.record_stream(stream)
        return first

    def drain(self) -> tuple[bool, Callable[[], bytes]]:
        """Begins to fetch all digests of the step; whether that takes time, and what gives them.

        The queue is empty then, and takes the next step's.
        """
        self._repeats.forget()
        self._small.finish(self._lanes)
        lanes, fetched, devices, known = self._lanes, self._fetched, self._devices, self._known
        self._lanes, self._fetched, self._devices, self._known = bytearray(), [], {}, []
        copies = {index: _copied(index, on) for index, on in devices.items() if on.lanes}

        def finish() -> bytes:
            for index, (staged, event) in copies.items():
                event.synchronize()
                words = staged.numpy().view(np.uint64)
                for at, row, expected in known:
                    if at == index and (*map(int, words[row]),) != expected:
                        raise VerifyError(_WRONG.format(index))
                fill(lanes, words, [one for one in fetched if one[1] == index])
            return bytes(lanes)

        return bool(copies), finish

    def close(self) -> None:
        """Ends the threads of the host's digests."""
        self._host.close()


def fill(
    lanes: bytearray, words: npt.NDArray[np.uint64], fetched: list[tuple[int, int, int, int]]
) -> None:
    """Puts digests at their places in the lanes of a step. words: [n, 4]. fetched: of each its
    place in bytes, its device, and its first row and how many add up."""
    single = np.array([(at, first) for at, _, first, rows in fetched if rows == 1], np.int64)
    if len(single):
        table = np.frombuffer(lanes, "<u8").reshape(-1, 4)
        table[single[:, 0] // LANES_BYTES] = words[single[:, 1]]
    for at, _, first, rows in fetched:
        if rows != 1:
            total = words[first : first + rows].sum(axis=0, dtype=np.uint64)
            lanes[at : at + LANES_BYTES] = total.astype("<u8").tobytes()


def _has_kernel(t: Tensor) -> bool:
    return loaded(t.get_device()).kernel is not None


def _remember_stream(index: int, on: _OnDevice) -> torch.cuda.Stream:
    stream = torch.cuda.current_stream(index)
    if stream.stream_id not in on.streams:
        on.streams[stream.stream_id] = stream
    return stream


def _launch(
    index: int,
    on: _OnDevice,
    waiting: list[tuple[Tensor, Whole | None, int]],
    fetched: list[tuple[int, int, int, int]],
) -> None:
    from verify.device_digests import DigestPlan

    before = on.rows
    tensors: list[Tensor] = []
    layouts: dict[str, Place | None] = {}
    for t, whole, entry in waiting:
        pieces = list(places_of(t, whole))
        fetched.append((entry, index, before + len(tensors), len(pieces)))
        for piece, place in pieces:
            if place is not None:
                layouts[str(len(tensors))] = place
            tensors.append(piece)
    if not tensors:
        return
    with torch.cuda.device(index):
        stream = _remember_stream(index, on)
        plan = DigestPlan(tensors, layouts=layouts)
        plan.launch()
        if stream != torch.cuda.default_stream(index):
            for t in tensors:  # its memory may be another stream's, and is not kept
                t.record_stream(stream)
    on.lanes.append(plan.lanes)


def _copied(index: int, on: _OnDevice) -> tuple[Tensor, torch.cuda.Event]:
    """The lanes on their way into pinned memory, int64 [n, 4], and what tells their arrival."""
    with torch.cuda.device(index):
        current = torch.cuda.current_stream(index)
        for stream in on.streams.values():
            if stream != current:
                current.wait_stream(stream)
        together = torch.cat(on.lanes)
        shape = together.shape
        staged = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
        staged.copy_(together, non_blocking=True)
        event = torch.cuda.Event()
        event.record(current)
        for lanes in on.lanes:
            lanes.record_stream(current)
    return staged, event
