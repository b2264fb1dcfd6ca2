"""How many fresh processes of a case may run at once: from what its main process needed.

Starting a process that uses a GPU takes ten seconds and more, most of it waiting, so that several
are started together. What runs out of memory because of that would be a false `crashed`. So each
rank of the main run reports what it took of every memory and what was left there, and processes
together get at most half of that: another run beside this one may do the same. A case that takes
no memory of a GPU has its processes one after another, since they would share the pinned threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verify.evidence import Finished

MOST = 8
PATIENT = 60.0  # seconds: shorter time-outs are meant for a process with the machine to itself
CONTEXT = 600 * 2**20  # bytes of a GPU that a CUDA context with its kernels takes beside tensors
HOST = "cpu"
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE of the driver; 0: any number of processes

Footprint = Mapping[str, Mapping[str, int]]
"""By `cpu` and `cuda:N`, in bytes: `needed` by this process at most, and `room` for such ones."""


def at_once(
    finished: Sequence[Finished], ranks: int, *, timeout: float, cores: int | None = None
) -> int:
    """How many fresh processes of a case, each with all its ranks, may run at the same time.

    finished: what the ranks of its main run said at its end; one that is missing, or that names no
    GPU, means one at a time, as does a time-out in seconds below PATIENT. cores: of this machine
    unless given; processes have a core for two. Never more than MOST, never less than 1.
    """
    held = {one.rank: one.footprint for one in finished}
    known = all(set(held.get(rank, ())) - {HOST} for rank in range(ranks))
    if timeout < PATIENT or not known:
        return 1
    cores = os.cpu_count() or 1 if cores is None else cores
    bounds = [MOST, cores // 2 // ranks]
    for place in {place for footprint in held.values() for place in footprint}:
        here = [footprint[place] for footprint in held.values() if place in footprint]
        needed = sum(one["needed"] for one in here)
        bounds.append(min(one["room"] for one in here) // 2 // max(1, needed))
    return max(1, min(bounds))


def asked() -> dict[int, int]:
    """By CUDA device, how often memory was asked for so far; nothing without CUDA in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    from verify import allocations

    stats = {one: torch.cuda.memory_stats(one) for one in range(torch.cuda.device_count())}
    return {one: int(some.get(allocations.COUNTER, 0)) for one, some in stats.items()}


def footprint(before: Mapping[int, int]) -> dict[str, dict[str, int]]:
    """What this process needed until now, where the case took memory of a GPU since `before`.

    Empty for a case that took none, and where it cannot be known. Memory that is taken past torch's
    allocator is not seen; the half that is never given away is for that. A GPU that lets only one
    process in has no room.
    """
    used = [one for one, count in asked().items() if count != before.get(one, 0)]
    host = _host() if used else None
    if host is None:
        return {}
    import torch

    found = {HOST: host}
    try:
        for one in used:
            reserved = torch.cuda.memory_reserved(one)
            free, _ = torch.cuda.mem_get_info(one)
            found[f"cuda:{one}"] = {
                "needed": max(torch.cuda.max_memory_reserved(one), reserved) + CONTEXT,
                "room": free + reserved if _lets_several_in(one) else 0,
            }
    except RuntimeError:  # after a CUDA error nothing can be asked any more
        return {}
    return found


def _lets_several_in(device: int) -> bool:
    mode = ctypes.c_int(-1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device)
    except (OSError, AttributeError):
        return False
    return failed == 0 and mode.value == 0


def _host(
    proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")
) -> dict[str, int] | None:
    """What this process took of the machine's memory at most, and what there is; None if unknown.

    In a container what its control group may still take counts, if that is less.
    """
    room = _line(proc / "meminfo", "MemAvailable:")
    if room is None or sys.platform != "linux":
        return None
    import resource

    room *= 1024
    limit, taken = (_number(group / f"memory.{name}") for name in ("max", "current"))
    if limit is not None and taken is not None:
        cached = _line(group / "memory.stat", "inactive_file") or 0  # given back when asked for
        room = min(room, max(0, limit - max(0, taken - cached)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"needed": peak, "room": room}


def _line(path: Path, name: str) -> int | None:
    """The number after a name, as in `MemAvailable:  123 kB`; None where there is none."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: Path) -> int | None:
    """A file of a control group that holds a number; None for `max`, or where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
