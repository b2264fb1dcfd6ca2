"""Launches of a recording on a CUDA device: the host's bits, step after step, on any stream."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from sync_debug import synchronising_raises

from verify.errors import VerifyError
from verify.hashing import digest_on_host
from verify.tracing import device_launches
from verify.tracing.device_launches import StreamLaunches
from verify.tracing.queues import DigestQueue

pytestmark = pytest.mark.gpu


def lanes(found: bytes) -> list[tuple[int, ...]]:
    return [tuple(one) for one in np.frombuffer(found, "<u8").reshape(-1, 4).tolist()]


def tensors() -> list[list[torch.Tensor]]:
    """By launch: dense ones alone and together, and what goes the other way."""
    with torch.device("cuda"):
        dense = [torch.randn(n, dtype=torch.float32) for n in (1, 3, 4096, 70_001, 1 << 20)]
        dense += [torch.randn(513, 255).to(torch.bfloat16), torch.arange(99).to(torch.uint8)[1:]]
        odd = [torch.randn(64, 48).t(), torch.randn(77, dtype=torch.complex64).conj()]
        odd += [torch.empty(0, 3), torch.ones(3, 1).expand(3, 5)]
    return [*([one] for one in dense), dense, *([one] for one in odd), [dense[3], odd[0]], dense]


@pytest.mark.parametrize("side", [False, True])
def test_steps_have_the_digests_of_the_host(side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values change between steps and within them, by hand, at the same places of memory."""
    monkeypatch.setattr(device_launches, "CHUNK", 16)  # several chunks a step
    brought: list[int] = []
    bring = StreamLaunches._bring
    monkeypatch.setattr(
        StreamLaunches, "_bring", lambda self, told: brought.append(1) or bring(self, told)
    )
    queue, launches, finished, expected = DigestQueue(), tensors(), [], []
    stream = torch.cuda.Stream() if side else None
    context: Any = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
    torch.cuda.synchronize()
    with context:
        for number in range(3):
            copies = []
            for some in launches:
                for t in some:
                    copies.append(t.clone())
                    queue.put(t, None)
                with synchronising_raises():
                    queue.launch()
                for t in some:  # behind the launch, so not seen by it
                    if t.numel() and not t.is_complex() and t.stride()[-1:] != (0,):
                        t.data.add_(number + 1)
            with synchronising_raises():
                takes_time, finish = queue.drain()
            assert takes_time
            expected.append(copies)
            finished.append(finish)
        found = [lanes(finish()) for finish in finished]
    torch.cuda.synchronize()
    for copies, one in zip(expected, found, strict=True):
        assert one == [digest_on_host(t).lanes for t in copies]
    # The known bytes, 7 tensors alone, and all together; nothing in the second step.
    assert len(brought) == 9
    queue.close()


def test_streams_do_not_share_what_they_brought() -> None:
    """One tensor, digested on two streams in turn, each behind the other."""
    queue, t = DigestQueue(), torch.zeros(1 << 20, device="cuda")
    streams, copies = [torch.cuda.Stream(), torch.cuda.Stream()], []
    last = torch.cuda.current_stream()
    for number in range(8):
        stream = streams[number % 2]
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            t.add_(1)
            copies.append(t.clone())
            queue.put(t, None)
            queue.launch()
        last = stream
    torch.cuda.current_stream().wait_stream(last)
    found = lanes(queue.drain()[1]())
    assert found == [digest_on_host(one).lanes for one in copies]
    assert len(queue._launches) == 2
    queue.close()


def test_a_table_that_is_full_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """While launches that read the old one wait on the device."""
    monkeypatch.setattr(StreamLaunches.__init__, "__kwdefaults__", {"pinned": True, "part_rows": 5})
    queue = DigestQueue()
    some = [torch.randn(1000 + n, device="cuda") for n in range(40)]
    torch.cuda._sleep(20_000_000)
    for t in some:
        queue.put(t, None)
        queue.launch()
    assert lanes(queue.drain()[1]()) == [digest_on_host(t).lanes for t in some]
    queue.close()


def test_another_default_device_does_not_matter() -> None:
    queue = DigestQueue()
    with torch.device("cuda"):
        t = torch.randn(5000)
        queue.put(t, None)
        queue.launch()
        finish = queue.drain()[1]
    assert lanes(finish()) == [digest_on_host(t).lanes]
    queue.close()


def test_a_kernel_of_other_lanes_is_refused_when_the_step_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(device: torch.device) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
        text, lanes = known_text(device)
        return text, (lanes[0] ^ 1, *lanes[1:])

    known_text = device_launches.known_text
    monkeypatch.setattr(device_launches, "known_text", other)
    queue = DigestQueue()
    queue.put(torch.ones(1000, device="cuda"), None)
    with synchronising_raises():
        queue.launch()
        finish = queue.drain()[1]
    with pytest.raises(VerifyError, match="gives other lanes on cuda:0 than the host does"):
        finish()
    queue.close()
