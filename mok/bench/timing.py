"""How benchmarks here measure: alternating in one run, medians, and the machine beside them.

Why alternating: on a shared machine the clock and the neighbours drift, so contenders measured one
after the other are compared on different machines. Refuses a mean, and a best of N.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

SETTLE_SECONDS = 0.02
"""Pause before each run: OpenMP threads of the contender before go on spinning for a while."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one contender: median and quartiles over `samples` runs."""

    median: float
    lower: float
    upper: float
    samples: int


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, Measurement]:
    """Run the contenders in turn, `rounds` times, the starting one rotating; medians by name."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            contenders[name]()
            elapsed = time.perf_counter() - start
            if turn >= 0:
                seconds[name].append(elapsed)
    return {name: _summary(values) for name, values in seconds.items() if values}


def _summary(values: list[float]) -> Measurement:
    if len(values) < 2:
        return Measurement(values[0], values[0], values[0], len(values))
    lower, median, upper = statistics.quantiles(values, n=4)
    return Measurement(median, lower, upper, len(values))


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
