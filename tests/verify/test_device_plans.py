"""A plan of digests is prepared on the host: what is copied to the device, and on which stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verify import device_digests, device_kernel, device_parts
from verify.device_digests import DigestPlan
from verify.device_kernel import Tuning


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("sizes", [(), (5,), (7, 1, 40_000)])
def test_one_copy_brings_parts_and_marks_lanes(
    monkeypatch: pytest.MonkeyPatch, mark: bool, sizes: tuple[int, ...]
) -> None:
    """What the kernel would be given, with memory of the host for the device's."""
    launches: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(prepare=lambda *args, **kwargs: launches.append(args))
    found = device_kernel.Loaded(kernel, blocks=9)  # type: ignore[arg-type]
    empty = torch.empty

    def host_memory(size: Any, *, dtype: torch.dtype, **where: object) -> torch.Tensor:
        return empty(size, dtype=dtype).fill_(12345)

    monkeypatch.setattr(device_digests, "loaded", lambda index, tuning: found)
    monkeypatch.setattr(device_digests, "raw_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "empty", host_memory)
    table, outputs = device_parts.PartTable(), len(sizes) + 1
    for slot, size in enumerate(sizes):
        table.add_contiguous(4096 * (slot + 1), size, slot)
    plan = DigestPlan.__new__(DigestPlan)
    plan._index = 0
    plan._prepare_table(table, outputs, 5, Tuning(), mark)
    assert plan.lanes.shape == (outputs, 4)
    assert (plan.lanes == (device_digests.NOT_RUN if mark else 12345)).all()
    packed, num_tiles = table.pack(Tuning().geometry)
    behind = plan._block.reshape(-1)[4 * outputs :][: packed.size]
    assert behind.numpy().view(np.uint64).tolist() == packed.reshape(-1).tolist()
    assert len(launches) == bool(sizes)
    for parts, count, tiles, _, _, lanes, _ in launches:
        assert (count.value, tiles.value) == (len(sizes), num_tiles)
        assert (parts.value, lanes.value) == (behind.data_ptr(), plan.lanes.data_ptr())


def test_the_default_stream_is_no_external_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: ("default", index))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda at, device: (at, device))
    assert device_digests._stream_of(0, 3) == ("default", 3)
    assert device_digests._stream_of(4096, 3) == (4096, 3)
