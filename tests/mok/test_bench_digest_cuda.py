"""The digest's benchmark on a device: what it reports, and that it refuses a digest of a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mok.bench import digest_cuda


def test_without_a_device_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match="on the host: there is no CUDA device"):
        digest_cuda.measure(megabytes=1, rounds=1)


@pytest.mark.gpu
def test_rows_and_host_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cuda, "WARM_UP_SECONDS", 0.01)
    monkeypatch.setattr(digest_cuda, "ALONE_SECONDS", 0.05)
    found: dict[str, Any] = digest_cuda.measure(megabytes=16, rounds=2)
    assert [row["dtype"] for row in found["rows"]] == list(digest_cuda.DTYPES)
    for row in found["rows"]:
        ratio = row["verify digest"] / row[digest_cuda.READ]
        assert row["of the read"] == pytest.approx(ratio)
    for name in ("verify digest", digest_cuda.READ, "torch.hash_tensor"):
        assert found[f"alone {name}"]["tb_per_s"] > 0
    assert found["plan_megabytes"] > 100
    times = ("plan_build_us", "plan_build_anew_us", "plan_launch_us", "plan_replay_us")
    assert min(found[name] for name in times) > 0
