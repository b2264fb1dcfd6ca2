"""What a queue launches for tensors on a device, with the host in the device's place."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
import pytest
import torch

from verify.errors import UnsupportedError
from verify.hashing import digest_tensor, plain_tensor
from verify.lanes import DEFAULT_SEED, LaneSum
from verify.tracing import queues
from verify.tracing.definitions import Whole
from verify.tracing.device_launches import LaneRows
from verify.tracing.queues import DigestQueue, _is_dense, _OnDevice


class HostLaunches:
    """In the place of StreamLaunches: reads the memory it is told of, at once."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def launch_at(self, memory: tuple[int, ...], out: int) -> None:
        count = len(memory) // 2
        self.read.append(count)
        rows = np.frombuffer((ctypes.c_uint64 * (4 * count)).from_address(out), np.uint64)
        for at in range(count):
            data = (ctypes.c_uint8 * memory[count + at]).from_address(memory[at])
            total = LaneSum(DEFAULT_SEED)
            total.add(np.frombuffer(data, np.uint8), 0)
            rows[4 * at : 4 * at + 4] += np.array(total.lanes(), np.uint64)


class Device:
    """A queue with one device, which is the host's memory: what waits there, and its lanes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(queues, "raw_stream", lambda index: 0)
        monkeypatch.setattr(queues, "_current_device", lambda: 0)
        launches = HostLaunches()
        self.read = launches.read
        self.on = _OnDevice(room={0: (LaneRows(torch.device("cpu")), cast(Any, launches))})
        self.queue = DigestQueue()
        self.queue._devices[0] = self.on

    def put(self, *tensors: torch.Tensor) -> None:
        for t in tensors:
            self.on.places.append(len(self.queue._lanes))
            self.on.dense.append(t)
            self.queue._lanes += bytes(32)

    def lanes(self) -> list[tuple[int, ...]]:
        words = torch.cat(self.on.lanes).numpy().view(np.uint64)
        queues.fill(self.queue._lanes, words, self.queue._fetched)
        found = np.frombuffer(bytes(self.queue._lanes), "<u8").reshape(-1, 4).tolist()
        return [tuple(one) for one in found]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Device(monkeypatch)
    yield made
    made.queue.close()


def lanes_of(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    return [digest_tensor(t).lanes for t in tensors]


def test_the_same_bytes_are_read_once_in_one_launch(device: Device) -> None:
    x, y = torch.randn(500), torch.randn(30)
    device.put(x, y, x.view(5, 100), x.view(torch.int32), x[:30])
    device.queue.launch()
    assert device.read == [3]  # x, y and a part of x
    assert device.lanes() == lanes_of(x, y, x, x, x[:30])


def test_bytes_are_read_again_in_another_launch(device: Device) -> None:
    """Even if nothing changed them, for all that torch knows."""
    x = torch.randn(500)
    before = x.clone()
    device.put(x)
    device.queue.launch()
    x.numpy()[3] = 7  # past the version counter
    device.put(x, before)
    device.queue.launch()
    assert device.read == [1, 2]
    assert device.lanes() == lanes_of(before, x, before)


def test_more_tensors_than_a_launch_takes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MOST", 4)
    tensors = [torch.randn(n + 1) for n in range(9)]
    device.put(*tensors, tensors[2])
    device.queue.launch()
    assert device.read == [4, 4, 1]
    assert device.lanes() == lanes_of(*tensors, tensors[2])


def test_what_an_interrupt_leaves_is_dropped(device: Device) -> None:
    x, y = torch.randn(5), torch.randn(6)
    device.put(x)
    device.queue.launch()
    device.put(y)
    device.on.places.append(64)  # of a tensor that did not come after it
    device.queue.keep(1)
    assert (device.on.dense, device.on.places) == ([], [])
    device.queue.launch()
    assert device.read == [1]
    assert device.lanes() == lanes_of(x)


def freed() -> torch.Tensor:
    t = torch.ones(4, 3)[1:]
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_dense_memory_is_told_from_all_others() -> None:
    dense = [torch.ones(3), torch.tensor(1), torch.ones(3, 2, dtype=torch.bfloat16)]
    dense += [torch.nn.Parameter(torch.ones(2)), torch.ones(4)[1:], torch.ones(1, 4).t()]
    for t in dense:
        assert _is_dense(t)
        plain = plain_tensor(t)
        assert (plain.data_ptr(), plain.nbytes) == (t.data_ptr(), t.nbytes)
        assert plain.is_contiguous()
    odd = [torch.ones(2, 3).t(), torch.ones(3, 1).expand(3, 5), torch.empty(0)]
    odd += [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.complex64)]
    odd += [torch.ones(3, dtype=torch.complex64).conj().imag, torch._neg_view(torch.ones(2))]
    refused = [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), freed()]
    refused += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    refused += [torch._efficientzerotensor(3)]
    assert not any(map(_is_dense, [*odd, *refused]))
    for t in refused:
        with pytest.raises(UnsupportedError):
            plain_tensor(t)
    inside: list[bool] = []
    torch.func.vmap(lambda x: inside.append(_is_dense(x)) or x)(torch.ones(2, 3))
    assert inside == [False]


def test_nothing_is_launched_where_nothing_waits(device: Device) -> None:
    device.put(torch.ones(3), torch.ones(4))
    device.queue.launch()
    device.queue.launch()
    assert device.read == [2]


def test_a_shard_is_not_digested_as_a_whole(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words stand elsewhere in the whole, so that its lanes are others."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 0)
    monkeypatch.setattr(queues, "_has_kernel", lambda t: True)
    shard, whole = torch.ones(2, 3), Whole((4, 3), ((2, 4), (0, 3)))
    device.queue.put(shard, None)
    device.queue.put(shard, whole)
    assert [
        (place, t is shard) for place, t in zip(device.on.places, device.on.dense, strict=True)
    ] == [(0, True)]
    ((waits, of, place),) = device.on.waiting
    assert (waits.data_ptr(), of, place) == (shard.data_ptr(), whole, 32)
    device.queue.keep(0)
