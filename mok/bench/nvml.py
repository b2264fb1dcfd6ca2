"""Energy, clock and power of one CUDA device, from NVML through ctypes.

Why ctypes: these are five calls into a library that every driver brings, and nothing that depends
on it must fail where the Python package of the same name is not installed. The energy counter is in
millijoules and advances only every some tens of milliseconds; how often is measured with every
number (mok.bench.sampling). Refuses to guess a device: it is found by its UUID, so that
CUDA_VISIBLE_DEVICES cannot mix cards up, and what NVML does not answer is None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

_CLOCK_SM = 1
_CLOCK_MEM = 2


@dataclass(frozen=True)
class Gauge:
    """Reads of one device. energy: millijoules since the driver was loaded. clock: SM clock in MHz.
    power: watts, which NVML averages over about a second. Each is None when it is not supported.
    """

    energy: Callable[[], int | None]
    clock: Callable[[], int | None]
    power: Callable[[], float | None]
    facts: dict[str, object]


def _nothing() -> None:
    return None


def no_gauge(reason: str) -> Gauge:
    """A gauge that reads nothing; `reason` goes to the document."""
    return Gauge(_nothing, _nothing, _nothing, {"energy_counter": f"none: {reason}"})


def open_gauge(device: torch.device) -> Gauge:
    """The gauge of a CUDA device; one that reads nothing, with the reason, where NVML is missing.

    Needs an initialised CUDA device.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return no_gauge(f"libnvidia-ml.so.1 cannot be loaded ({error})")
    status = library.nvmlInit_v2()
    if status:
        return no_gauge(f"nvmlInit_v2 gave {status}")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    handle = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    if status:
        return no_gauge(f"NVML does not know the device {uuid} (status {status})")
    return _gauge(library, handle)


def _gauge(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Gauge:
    def read(call: str, cell: ctypes._SimpleCData, *arguments: object) -> int | None:
        status = getattr(library, call)(handle, *arguments, ctypes.byref(cell))
        return None if status else int(cell.value)

    def energy() -> int | None:
        return read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def clock() -> int | None:
        return read("nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_int(_CLOCK_SM))

    def power() -> float | None:
        milliwatts = read("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        return None if milliwatts is None else milliwatts / 1e3

    limit = read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())
    version = ctypes.create_string_buffer(96)
    known = library.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version))) == 0
    counted = energy() is not None
    return Gauge(
        energy,
        clock,
        power,
        {
            "energy_counter": "nvmlDeviceGetTotalEnergyConsumption"
            if counted
            else "none: the device has no energy counter",
            "driver": version.value.decode() if known else "unknown",
            "power_limit_w": None if limit is None else limit / 1e3,
            "memory_clock_mhz": read(
                "nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_int(_CLOCK_MEM)
            ),
        },
    )
