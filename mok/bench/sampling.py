"""Energy, clock and power over a window of time, read by a thread while the device works.

NVML's energy counter has a resolution of 1 mJ but advances only every some tens of milliseconds, so
the difference of two reads at the ends of a window may miss or gain a step. Here the power is taken
between the first and the last step seen inside the window, and joules are that power times time;
what remains uncertain is how late a step is seen (POLL_SECONDS at each end), and is stated with the
number; who asks decides from it whether the counter or an estimate is spoken of. Refuses a number
from fewer than MINIMUM_STEPS steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from mok.bench.nvml import Gauge

POLL_SECONDS = 0.01
MINIMUM_STEPS = 3


@dataclass(frozen=True)
class Sample:
    """One read at `at` (time.perf_counter seconds); energy in millijoules, None if unknown."""

    at: float
    energy: int | None
    clock: int | None


@dataclass(frozen=True)
class Reading:
    """What a window showed. watts: from the energy counter. uncertainty: relative, of watts.
    update_ms: time between steps of the counter. Each None where it was not seen.
    """

    watts: float | None = None
    uncertainty: float | None = None
    update_ms: float | None = None
    clock_mhz: float | None = None


def reading(samples: Sequence[Sample], start: float, end: float) -> Reading:
    """Pure: the window's power, clock and resolution from its samples."""
    inside = [sample for sample in samples if start <= sample.at <= end]
    clocks = [sample.clock for sample in inside if sample.clock is not None]
    clock = sum(clocks) / len(clocks) if clocks else None
    steps = [
        (after.at, after.energy)
        for before, after in pairwise(inside)
        if before.energy is not None and after.energy is not None and after.energy != before.energy
    ]
    if len(steps) < MINIMUM_STEPS:
        return Reading(clock_mhz=clock)
    (first, low), (last, high) = steps[0], steps[-1]
    gaps = [after.at - before.at for before, after in pairwise(inside)]
    return Reading(
        watts=(high - low) / 1e3 / (last - first),
        uncertainty=2 * sorted(gaps)[len(gaps) // 2] / (last - first),
        update_ms=1e3 * (last - first) / (len(steps) - 1),
        clock_mhz=clock,
    )


@dataclass
class Sampler:
    """Samples that a thread appends to until the `sampling` block ends."""

    samples: list[Sample] = field(default_factory=list)

    def reading(self, start: float, end: float) -> Reading:
        """Of the window between two times of time.perf_counter."""
        return reading(list(self.samples), start, end)


@contextmanager
def sampling(gauge: Gauge) -> Iterator[Sampler]:
    """Reads the gauge every POLL_SECONDS until the block ends; nothing runs if it reads nothing."""
    sampler = Sampler()
    if gauge.energy() is None and gauge.clock() is None:
        yield sampler
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_SECONDS):
            energy = gauge.energy()
            sampler.samples.append(Sample(time.perf_counter(), energy, gauge.clock()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield sampler
    finally:
        stop.set()
        thread.join()
