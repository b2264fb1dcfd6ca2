"""Digests on their way into a step: taken at once, fetched from the devices at the step's end.

A tensor on a CUDA device is digested there by a kernel on torch's current stream, without waiting,
so later changes in place are not seen; the lanes stay on the device until the border of the step,
where they are copied without waiting, too, and read when the next step ends. Tensors elsewhere are
digested on the host, at once. No digest is taken from an earlier one because a tensor looks
unchanged to torch: what was met is read again, since to see writes that no counter sees is what
recordings are for.
"""

from __future__ import annotations

import itertools
import operator
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mok.launching import raw_stream
from verify.device_inputs import Place, in_few_parts
from verify.device_kernel import loaded
from verify.device_parts import ITEM_BYTES
from verify.errors import VerifyError
from verify.hashing import integer_view, plain_tensor
from verify.tracing.definitions import LANES_BYTES, Whole
from verify.tracing.device_launches import MOST, LaneRows, StreamLaunches
from verify.tracing.host_lanes import HostLanes, Lanes, places_of
from verify.tracing.repeats import RepeatedDigests
from verify.tracing.small_tensors import LARGEST, SmallDigests
from verify.tracing.tensors import PLAIN_TYPES

_LANES = struct.Struct("<4Q")
_NO_LANES = bytes(LANES_BYTES)
_ADDRESS, _BYTES = Tensor.data_ptr, operator.attrgetter("nbytes")
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_WRONG = (
    "the digest kernel gives other lanes on cuda:{} than the host does, or did not run, so nothing "
    "can be recorded there; run verify controls"
)


@dataclass
class _OnDevice:
    """What one device has for the step: lanes, int64 [n, 4] each, and the streams they come of.

    room: by the stream's number, rows that wait for launches, and what launches there. dense,
    places: tensors that wait for a launch whose bytes lie together, and where in the step's lanes
    each belongs. waiting: the others.
    """

    lanes: list[Tensor] = field(default_factory=list)
    room: dict[int, tuple[LaneRows, StreamLaunches]] = field(default_factory=dict)
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)
    dense: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
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
        dense = whole is None and type(t) in PLAIN_TYPES and _is_dense(t)
        if dense and t.is_cuda:
            on = self._devices.get(t.get_device())
            if on is None:  # of the first tensor of a step it is asked whether there is a kernel
                on = self._on(t)
            if on is not None:
                on.places.append(len(self._lanes))
                on.dense.append(t)
                self._lanes += _NO_LANES
                return
        plain = t if dense else plain_tensor(t)
        if plain.is_cuda and _has_kernel(plain):
            if not plain.numel():
                self._lanes += _NO_LANES
                return
            if plain.is_neg() and not (plain.is_floating_point() or plain.is_complex()):
                plain = plain.resolve_neg()
            if in_few_parts(plain, None):
                on = self._devices.setdefault(plain.get_device(), _OnDevice())
                on.waiting.append((plain, whole, len(self._lanes)))
                self._lanes += _NO_LANES
                return
        if whole is None and plain.is_cpu:
            packed = self._host.packed(plain)
            if packed is not None:  # at the price of seeing whether it is as it was
                self._lanes += packed
                return
            if plain.nbytes <= LARGEST and sys.byteorder == "little":
                data = integer_view(plain).contiguous().numpy().reshape(-1).view(np.uint8)
                self._lanes += _NO_LANES
                self._small.add(data, len(self._lanes) - LANES_BYTES, self._lanes)
                return
            if again:
                lanes = self._repeats.of(t, plain, lambda: self._host.of(plain, None))
            else:
                lanes = self._host.of(plain, None)
        else:
            lanes = self._host.of(plain, whole)
        self._lanes += _LANES.pack(*lanes)

    def _on(self, t: Tensor) -> _OnDevice | None:
        """What the device of a tensor has for the step; None if there is no kernel for it."""
        if not _has_kernel(t):
            return None
        return self._devices.setdefault(t.get_device(), _OnDevice())

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
            on.places = [place for place in on.places if place < size]
            del on.dense[len(on.places) :]

    def launch(self) -> None:
        """Digests what waits on devices: one launch a device and kind, without waiting for it."""
        for index, on in self._devices.items():
            if on.dense:
                dense, places = on.dense, on.places
                on.dense, on.places = [], []
                if _current_device() == index:
                    self._launch_dense(index, on, dense, places)
                else:
                    with torch.cuda.device(index):
                        self._launch_dense(index, on, dense, places)
            if on.waiting:
                waiting, on.waiting = on.waiting, []
                with torch.cuda.device(index):
                    self._launch_others(index, on, waiting)

    def _launch_dense(
        self, index: int, on: _OnDevice, tensors: list[Tensor], places: list[int]
    ) -> None:
        """Digests whole tensors whose bytes lie together, on the current device. Nothing runs
        between two of them, so the same bytes are read once."""
        handle = raw_stream(index)
        room, launches = on.room.get(handle) or self._begun(index, on, handle)
        if len(tensors) == 1:
            (t,) = tensors
            out, row = room.take(1, on.lanes)
            launches.launch_at((t.data_ptr(), t.nbytes), out)
            self._fetched.append((places[0], index, row, 1))
        else:
            found = [*zip(map(_ADDRESS, tensors), map(_BYTES, tensors), strict=True)]
            once = [*dict.fromkeys(found)]
            rows: dict[tuple[int, int], int] = {}
            for at in range(0, len(once), MOST):
                some = once[at : at + MOST]
                addresses, sizes = zip(*some, strict=True)
                out, row = room.take(len(some), on.lanes)
                launches.launch_at((*addresses, *sizes), out)
                rows.update(zip(some, itertools.count(row)))
            told = zip(places, found, strict=True)
            self._fetched += [(place, index, rows[one], 1) for place, one in told]
        if handle:  # memory may be another stream's, and is not kept
            stream = torch.cuda.current_stream(index)
            for t in tensors:
                t.record_stream(stream)

    def _launch_others(
        self, index: int, on: _OnDevice, waiting: list[tuple[Tensor, Whole | None, int]]
    ) -> None:
        """Digests shards, and tensors whose bytes do not lie together, on the current device."""
        handle = raw_stream(index)
        room, launches = on.room.get(handle) or self._begun(index, on, handle)
        tensors = [t for t, whole, _ in waiting if whole is None]
        rows = launches.rows_of(tensors) if len(tensors) == len(waiting) else None
        if rows is None:
            _launch(index, on, waiting, self._fetched)
            return
        out, first = room.take(len(tensors), on.lanes)
        launches.launch_rows(rows, out)
        self._fetched += [(one[2], index, row, 1) for row, one in enumerate(waiting, first)]
        if handle:
            stream = torch.cuda.current_stream(index)
            for t in tensors:
                t.record_stream(stream)

    def _begun(self, index: int, on: _OnDevice, handle: int) -> tuple[LaneRows, StreamLaunches]:
        """The first launch of a step on a stream, which is current."""
        device = torch.device("cuda", index)
        _remember_stream(index, on)
        room = LaneRows(device)
        launches = self._launches.get((index, handle))
        if launches is None:
            launches = StreamLaunches(loaded(index), device)
            out, row = room.take(1, on.lanes)
            # Seen when the step's digests are fetched: nothing waits for the device before.
            self._known.append((index, row, launches.launch_known(out)))
            self._launches[index, handle] = launches
        on.room[handle] = room, launches
        return room, launches

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


def _is_dense(t: Tensor) -> bool:
    """Whether the bytes of a tensor of torch's own classes are there and lie together as a digest
    reads them: then `plain_tensor`, which takes longer, refuses nothing and changes nothing."""
    return (
        (t.is_cuda or t.is_cpu)
        and t.layout is torch.strided
        and t.dtype in ITEM_BYTES
        and not t.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not t._is_zerotensor()
        and not t.is_neg()
        and t.is_contiguous()
        and t.nbytes != 0
        and t.untyped_storage().nbytes() != 0
    )


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
    # What the border of a step computes is no operation of the program, for a mode that sees them.
    with torch.cuda.device(index), torch._C._DisableTorchDispatch():
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
