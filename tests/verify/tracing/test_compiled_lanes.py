"""Digests of a recording by compiled code: the bits of numpy's for any tensor, and as it is now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from verify.errors import UnsupportedError
from verify.hashing import digest_tensor
from verify.host_kernel import HostKernel, _compiler, host_kernel
from verify.tracing import host_lanes
from verify.tracing.host_lanes import HostLanes
from verify.tracing.queues import DigestQueue

pytestmark = pytest.mark.skipif(
    _compiler() is None, reason="there is no compiler of C, or CC names none"
)
MADE: dict[str, Callable[[], torch.Tensor]] = {
    "int32": lambda: torch.arange(200_001, dtype=torch.int32),
    "bfloat16": lambda: torch.arange(400_003, dtype=torch.int64).to(torch.bfloat16),
    "transposed": lambda: torch.randn(300, 400).t(),
    "expanded": lambda: torch.randn(300, 1).expand(300, 40),
    "conjugate": lambda: torch.randn(70_000, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(70_001, dtype=torch.complex64).conj().imag,
    "shifted": lambda: torch.arange(300_001, dtype=torch.int64).to(torch.uint8)[1:],
    "bool": lambda: torch.arange(70_000) % 3 == 0,
    "scalar": lambda: torch.ones(()),
    "empty": lambda: torch.empty(0, 3),
    "inference": lambda: _of_inference(),
}


def _of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(50_000)


@pytest.fixture
def kernel() -> HostKernel:
    found = host_kernel()
    assert found is not None
    return found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", MADE)
def test_any_tensor_has_the_bits_of_numpy(
    kernel: HostKernel, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lanes, "_LARGE_COMPILED", 1 << 15)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lanes, t = HostLanes(), MADE[name]()
    lanes._kernel = kernel
    expected = np.array(digest_tensor(t).lanes, "<u8").tobytes()
    assert lanes.packed(t.detach()) == expected
    assert (lanes._pool is not None) == (threads > 1 and t.nbytes >= 1 << 15)
    lanes.close()


def test_a_large_tensor_in_pieces_is_left_to_numpy(
    kernel: HostKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's memory doubles for a digest."""
    monkeypatch.setattr(host_lanes, "_COPIED_BYTES", 1000)
    lanes = HostLanes()
    lanes._kernel = kernel
    t = torch.randn(20, 30).t()
    assert lanes.packed(t) is None
    assert lanes.packed(t.contiguous()) is not None
    assert lanes.of(t, None) == digest_tensor(t).lanes


def test_numpy_computes_until_a_compiler_pays(
    kernel: HostKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(host_lanes, "COMPILE_FROM", 3 * 4000)
    monkeypatch.setattr(host_lanes, "host_kernel", lambda: asked.append(1) or kernel)
    monkeypatch.setattr(host_lanes, "kept_kernel", lambda: None)
    queue, t = DigestQueue(), torch.arange(1000, dtype=torch.int32)
    for number in range(6):
        queue.put(t, None, again=True)
        assert len(asked) == (number >= 2)  # once, by the third one
        t += 1
    found = np.frombuffer(queue.drain()[1](), "<u8").reshape(-1, 4).tolist()
    for number in range(6):  # the same bits on both sides of the change
        t -= 1
        assert tuple(found[5 - number]) == digest_tensor(t).lanes
    queue.close()


def test_without_a_compiler_nobody_asks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(host_lanes, "COMPILE_FROM", 10)
    monkeypatch.setattr(host_lanes, "host_kernel", lambda: asked.append(1))
    monkeypatch.setattr(host_lanes, "kept_kernel", lambda: None)
    lanes = HostLanes()
    assert [lanes.packed(torch.ones(4)) for _ in range(5)] == [None] * 5
    assert asked == [1]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_change_that_no_counter_sees_is_seen(
    kernel: HostKernel, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a producer and its consumer, by foreign code, a write by hand or a view of numpy."""
    monkeypatch.setattr(host_lanes, "kept_kernel", lambda: kernel if compiled else None)
    queue, t = DigestQueue(), torch.randn(64, 1024)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: t.data.neg_(),
        lambda: t.numpy().sort(axis=1),
        lambda: t.numpy().__setitem__((63, 1023), -0.0),
        lambda: t.numpy().__setitem__((63, 1023), 0.0),
        lambda: t.data.copy_(t.data.flip(0)),
    )
    expected, version = [], t._version
    for change in changes:
        change()
        queue.put(t, None, again=True)
        expected.append(digest_tensor(t).lanes)
    assert t._version == version
    assert len(set(expected)) == len(changes)
    found = np.frombuffer(queue.drain()[1](), "<u8").reshape(-1, 4).tolist()
    assert [tuple(one) for one in found] == expected
    queue.close()


@pytest.mark.parametrize("columns", [3, 1])
def test_memory_that_is_not_there_is_refused(
    kernel: HostKernel, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it would end the process; what torch has no memory of by right is empty."""
    monkeypatch.setattr(host_lanes, "kept_kernel", lambda: kernel)
    queue, freed = DigestQueue(), torch.ones(4, 3)[1:, :columns]
    freed.untyped_storage().resize_(0)
    for t in (freed, torch._efficientzerotensor((3, 5))):
        with pytest.raises(UnsupportedError, match="no digest of"):
            queue.put(t, None, again=True)
    queue.put(torch.empty(0, 3), None)
    assert queue.drain()[1]() == bytes(32)
    queue.close()
