"""Clock, memory and energy of the device under test, as one small object of functions.

It exists so that protocols are written once: they run on a CPU with perf_counter in tests and with
CUDA events and NVML where it counts. Refuses wall-clock time on CUDA, and invented numbers on a CPU
(no energy, no peak memory).
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mok.bench.nvml import Gauge, no_gauge, open_gauge
from mok.bench.timing import machine
from mok.errors import InputError

_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,3}))?")


@dataclass(frozen=True)
class Instruments:
    """How to measure on one device.

    record() -> a mark in the device's stream of work; wait(mark) blocks until it is reached;
    seconds(start, end) -> time between two reached marks. synchronize() blocks until all is done
    and raises when the device is broken. reset_peak(), allocated(), peak() in bytes; None where it
    is not counted. release() gives cached memory back.
    """

    device: torch.device
    record: Callable[[], object]
    wait: Callable[[object], None]
    seconds: Callable[[object, object], float]
    synchronize: Callable[[], None]
    reset_peak: Callable[[], None]
    allocated: Callable[[], int | None]
    peak: Callable[[], int | None]
    release: Callable[[], None]
    gauge: Gauge
    facts: dict[str, object] = field(default_factory=dict)
    clock_name: str = "CUDA events"


def _ignore(mark: object = None) -> None:
    return None


def cpu_instruments() -> Instruments:
    """perf_counter, no energy, no memory: for tests and for layers without a GPU."""
    return Instruments(
        device=torch.device("cpu"),
        record=time.perf_counter,
        wait=_ignore,
        seconds=lambda start, end: end - start,  # type: ignore[operator]
        synchronize=_ignore,
        reset_peak=_ignore,
        allocated=_ignore,
        peak=_ignore,
        release=_ignore,
        gauge=no_gauge("a CPU was asked for"),
        facts=machine(),
        clock_name="perf_counter",
    )


def cuda_instruments(device: torch.device) -> Instruments:
    """CUDA events on torch's current stream, torch's allocator, NVML's counters."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)

    def record() -> object:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def release() -> None:
        torch.cuda.empty_cache()

    properties = torch.cuda.get_device_properties(device)
    gauge = open_gauge(device)
    facts: dict[str, object] = {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **gauge.facts,
    }
    return Instruments(
        device=device,
        record=record,
        wait=lambda mark: mark.synchronize(),  # type: ignore[attr-defined]
        seconds=lambda start, end: start.elapsed_time(end) / 1e3,  # type: ignore[attr-defined]
        synchronize=lambda: torch.cuda.synchronize(device),
        reset_peak=lambda: torch.cuda.reset_peak_memory_stats(device),
        allocated=lambda: torch.cuda.memory_allocated(device),
        peak=lambda: torch.cuda.max_memory_allocated(device),
        release=release,
        gauge=gauge,
        facts=facts,
    )


def open_instruments(device: str) -> Instruments:
    """By name: "cpu", "cuda", "cuda:1". Raises InputError for another one, or without a GPU."""
    found = find_device(device)
    return cpu_instruments() if found.type == "cpu" else cuda_instruments(found)


def find_device(device: str) -> torch.device:
    """The device of a name, untouched. Raises InputError as `open_instruments` does."""
    spelled = _DEVICE.fullmatch(device)
    if spelled is None:
        raise InputError(f"device {device!r}; allowed: cpu, cuda or cuda:N. Check the spelling.")
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(spelled[1] or 0)
    if index >= count:
        raise InputError(
            f"device {device!r}, but torch sees {count} CUDA device(s); allowed: "
            + (f"cuda:0 .. cuda:{count - 1}" if count else "cpu")
            + ". Choose another device, or a torch build with CUDA on a machine that has one."
        )
    return torch.device("cuda", index)
