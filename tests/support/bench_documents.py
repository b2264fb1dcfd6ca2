"""A document of `mok bench layer` with made-up numbers, for tests of what is drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench_instruments import FakeDevice, fake_contender

from mok.bench import layer
from mok.bench.contenders import Missing
from mok.bench.determinism import Finding
from mok.bench.ranks import Together
from mok.bench.runs import Options
from mok.bench.shapes import Shape

TINY = Shape("tiny", 16, 4, 16, 8, 2)
WIDE = Shape("wide", 16, 4, 32, 8, 2)


def bench_document(
    *, findings: Sequence[Finding] = (), shapes: Sequence[Shape] = (TINY, WIDE)
) -> dict[str, Any]:
    """Two contenders that run, one that fails on one shape, one missing; all three protocols."""
    device = FakeDevice()
    listing = [
        fake_contender(device, "mok", 0.010, 0.030),
        fake_contender(device, "torch", 0.020, 0.040),
        fake_contender(device, "liger", 0.020, 0.040, fails={"forward": 1}),
        Missing("sonicmoe", "not installed"),
    ]
    options = Options(
        tuple(shapes), device="cpu", rounds=3, pairs=(("mok", "torch"),), accuracy=False
    )
    document = layer.measure(options, device.instruments(), Together(), listing, findings=findings)
    for place, row in enumerate(document["rows"]):
        row["joules"] = 1.5 + place
        row["joules_kind"] = "counter" if row["protocol"] == "alone" else "estimate"
        row["clock_mhz"] = 1400 + place
    return document
