"""Launches of a recording on a device, with a kernel made of numpy that reads the same table.

What the kernel itself computes is tested on a GPU; here it is what it is told: the rows of a step
that is like the last one, and of one that is not, and where the lanes are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import packed_parts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mok.jit import Kernel
from verify.device_dense import DenseMemory
from verify.device_kernel import DEFAULT_TUNING, Loaded
from verify.device_parts import FIELDS
from verify.hashing import digest_tensor
from verify.lanes import DEFAULT_SEED, LaneSum, key_seeds
from verify.tracing import device_launches
from verify.tracing.device_launches import LaneRows, StreamLaunches
from verify.tracing.queues import fill

CPU = torch.device("cpu")


class NumpyKernel:
    """Reads the table and adds lanes where it is told, as csrc/digest/digest.cu does."""

    def __init__(self) -> None:
        self.launches, self.prepared = 0, 0

    def prepare(self, *args: Any, grid: int, block: int, shared: int) -> Callable[[], None]:
        self.prepared += 1
        parts, count, tiles, first, second, out, step = args
        widths = (ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64)
        assert (type(count), type(tiles), type(first)) == widths
        assert (first.value, second.value) == key_seeds(DEFAULT_SEED)
        assert step.value == 1

        def launch() -> None:
            self.launches += 1
            assert 1 <= grid <= tiles.value
            table = _words(parts.value, count.value * FIELDS).reshape(-1, FIELDS)
            for row in table:
                data = (ctypes.c_uint8 * int(row[3])).from_address(int(row[0]))
                total = LaneSum(DEFAULT_SEED)
                total.add(np.frombuffer(data, np.uint8), 0)
                _words(out.value + 32 * int(row[7]), 4)[:] += np.array(total.lanes(), np.uint64)

        return launch


def _words(address: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.frombuffer((ctypes.c_uint64 * count).from_address(address), np.uint64)


def launches(part_rows: int) -> tuple[NumpyKernel, StreamLaunches]:
    kernel = NumpyKernel()
    found = Loaded(cast(Kernel, kernel), blocks=3)
    return kernel, StreamLaunches(found, CPU, pinned=False, part_rows=part_rows)


def dense(tensors: list[torch.Tensor]) -> DenseMemory:
    addresses = [t.data_ptr() for t in tensors]
    return DenseMemory(0, addresses, tuple(t.nbytes for t in tensors))


def lanes_of(chunks: list[torch.Tensor], row: int) -> tuple[int, ...]:
    return tuple(torch.cat(chunks).numpy().view(np.uint64)[row].tolist())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(4, 12),
)
def test_every_launch_reads_what_is_there_now(steps: list[list[int]], part_rows: int) -> None:
    """Over tables that are full and begun anew, and twice with other values at the same places."""
    _, stream = launches(part_rows)
    memory = {size: torch.empty(size, dtype=torch.uint8) for sizes in steps for size in sizes}
    for number in range(2):
        room, chunks = LaneRows(CPU), []
        for place, sizes in enumerate(steps):
            tensors = [memory[size] for size in sizes]
            for t in tensors:
                t.fill_(17 * number + place)
            out, first = room.take(len(tensors), chunks)
            stream.launch(dense(tensors), out)
            for at, t in enumerate(tensors, first):
                assert lanes_of(chunks, at) == digest_tensor(t).lanes


def test_a_step_like_the_last_one_brings_nothing_to_the_device(monkeypatch: Any) -> None:
    kernel, stream = launches(64)
    brought = []
    bring = StreamLaunches._bring
    monkeypatch.setattr(
        StreamLaunches, "_bring", lambda self, told: brought.append(1) or bring(self, told)
    )
    tensors = [torch.randn(5000), torch.randn(30)]
    for _ in range(3):
        room, chunks = LaneRows(CPU), []
        for some in (tensors, tensors[:1], tensors[1:]):
            stream.launch(dense(some), room.take(len(some), chunks)[0])
        assert len(chunks) == 1
    assert (kernel.launches, len(brought)) == (9, 3)
    assert kernel.prepared == 3  # one for each grid: 3, 2 and 1 blocks
    stream.launch(dense([tensors[0][1:], tensors[1]]), room.take(2, chunks)[0])  # elsewhere
    stream.launch(dense([tensors[0], tensors[1][:29]]), room.take(2, chunks)[0])  # shorter
    assert len(brought) == 5


def test_lanes_of_a_new_chunk_are_counted_behind_what_others_brought(monkeypatch: Any) -> None:
    monkeypatch.setattr(device_launches, "CHUNK", 5)
    room, chunks = LaneRows(CPU), []
    firsts = [room.take(2, chunks)[1], room.take(2, chunks)[1]]
    chunks.append(torch.ones((7, 4), dtype=torch.int64))  # a plan's, or a graph's
    firsts += [room.take(2, chunks)[1], room.take(3, chunks)[1]]
    address, last = room.take(1, chunks)
    assert firsts == [0, 2, 12, 14]
    assert last == 17
    assert [len(one) for one in chunks] == [5, 7, 5, 5]
    assert address == chunks[-1].data_ptr()
    assert not chunks[-1].any()


def test_lanes_find_their_places() -> None:
    words = np.arange(40, dtype=np.uint64).reshape(10, 4)
    words[9] = 2**64 - 1
    lanes = bytearray(b"\xff" * 160)
    fill(lanes, words, [(32, 0, 7, 1), (96, 0, 8, 2), (0, 0, 3, 1), (128, 0, 0, 0)])
    found = np.frombuffer(bytes(lanes), "<u8").reshape(5, 4).tolist()
    wide = 2**64 - 1
    assert found[0] == [12, 13, 14, 15]
    assert found[1] == [28, 29, 30, 31]
    assert found[2] == [wide] * 4  # nobody's
    assert found[3] == [31, 32, 33, 34]  # added mod 2**64
    assert found[4] == [0] * 4
    fill(lanes, words, [])
    assert found == np.frombuffer(bytes(lanes), "<u8").reshape(5, 4).tolist()


def known(made: StreamLaunches) -> tuple[Any, Any]:
    """What the kernel gives known bytes, and what it must give them."""
    chunks: list[torch.Tensor] = []
    address, row = LaneRows(CPU).take(1, chunks)
    expected = made.launch_known(address)
    return tuple(chunks[0].numpy().view(np.uint64)[row].tolist()), expected


def test_a_kernel_is_given_known_bytes():
    kernel, made = launches(8)
    found, expected = known(made)
    assert found == expected
    assert kernel.launches == 1


class Idle(NumpyKernel):
    """Is launched and does nothing."""

    def prepare(self, *args: Any, grid: int, block: int, shared: int) -> Callable[[], None]:
        return lambda: None


def test_a_kernel_that_does_nothing_is_seen():
    made = StreamLaunches(Loaded(cast(Kernel, Idle()), blocks=3), CPU, pinned=False)
    found, expected = known(made)
    assert found == (0, 0, 0, 0) != expected


class AnyKernel(NumpyKernel):
    """Reads rows of any strides, as the tests of packed parts do."""

    def prepare(self, *args: Any, grid: int, block: int, shared: int) -> Callable[[], None]:
        parts, count, tiles, _, _, out, _ = args

        def launch() -> None:
            self.launches += 1
            table = _words(parts.value, count.value * FIELDS).reshape(-1, FIELDS)
            outputs = int((table[:, 7] & 0xFFFFFFFF).max()) + 1
            found = packed_parts.lanes_of(table, tiles.value, outputs, DEFAULT_TUNING.geometry)
            rows = _words(out.value, 4 * outputs).reshape(outputs, 4)
            rows[:] += np.array(found, np.uint64)

        return launch


def odd_tensors() -> list[torch.Tensor]:
    wide = torch.randn(3, 2, 2, 2, 2, 2, 2, 2, 2, 4).permute(8, 7, 6, 5, 4, 3, 2, 1, 0, 9)[..., ::2]
    return [
        torch.randn(64, 48).t(),
        torch.randn(2, 6, 4, 8).transpose(1, 2),
        torch.randn(77, dtype=torch.complex64).conj(),
        torch.randn(9, dtype=torch.complex64).conj().imag,
        torch.ones(3, 1).expand(3, 5),
        wide,  # in several parts
    ]


def test_tensors_of_any_strides_are_told_once(monkeypatch: Any) -> None:
    brought: list[int] = []
    bring = StreamLaunches._brought
    monkeypatch.setattr(
        StreamLaunches, "_brought", lambda self, *told: brought.append(1) or bring(self, *told)
    )
    found = Loaded(cast(Kernel, AnyKernel()), blocks=3)
    stream, tensors = StreamLaunches(found, CPU, pinned=False), odd_tensors()
    groups = [*([t] for t in tensors), tensors]
    for number in range(2):
        room, chunks = LaneRows(CPU), []
        for some in groups:
            for t in some:
                if 0 not in t.stride() and not t.is_conj() and not t.is_neg():
                    t.add_(number)
            rows = stream.rows_of(some)
            assert rows is not None
            out, first = room.take(len(some), chunks)
            stream.launch_rows(rows, out)
            for at, t in enumerate(some, first):
                assert lanes_of(chunks, at) == digest_tensor(t).lanes
    assert len(brought) == len(groups)
    for other in (tensors[0].t(), tensors[0][1:], tensors[0].view(torch.int32), tensors[2].conj()):
        stream.rows_of([other])  # at the same place, and not the same
    assert len(brought) == len(groups) + 4


def test_too_many_parts_are_not_kept() -> None:
    _, stream = launches(8)
    tensors = odd_tensors()
    assert stream.rows_of(tensors[-1:] * 9) is None
    assert stream.rows_of(tensors[:1]) is not None


class Seen(TorchDispatchMode):
    """The operations that a mode of the program sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_does_not_see_what_is_brought() -> None:
    _, stream = launches(8)
    t = torch.randn(9)
    room, chunks = LaneRows(CPU), []
    stream.launch(dense([t[1:]]), room.take(1, chunks)[0])  # makes the table
    with Seen() as seen:
        stream.launch(dense([t]), room.take(1, chunks)[0])
        t.sin()
    assert seen.names == ["aten.sin.default"]
    assert lanes_of(chunks, 1) == digest_tensor(t).lanes
