"""contention on a GPU: other work on its multiprocessors, its memory, its cache, while a case runs.

Loads run on a stream of their own in the same process. Each one records when it ran, on the clock
of the device, so that overlap is measured for every execution: one during which any block of the
load was not there counts as not in effect, and a load that never ran beside the case makes the
claim UNVERIFIED(no-overlap). That is what becomes of a case that waits for the whole device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mok.jit import JitError
from verify.conditions.availability import available
from verify.conditions.cuda_loads import Load, LoadUnavailable, opened
from verify.conditions.cuda_probes import COLD, Cache, cache_of
from verify.conditions.watching import watched
from verify.evidence import COLD_CACHE
from verify.sessions import Effect, Session, perform

LEAST_EACH = 2  # executions under every load
MOST_EACH = 10  # as long as they take less than LONG: a rare race needs many
LONG = 1.0  # seconds of one variant
MISSES = 3  # more executions without overlap than with: the load is given up
FEW = 32  # one multiprocessor of so many is left free by the greatest load
TIMEOUTS = (2.0, 30.0)  # seconds, least and most, until a load ends by itself
REFUSALS = (JitError, LoadUnavailable, RuntimeError)  # what CUDA raises, out of memory as well


@dataclass(frozen=True)
class Variant:
    """One kind of load. held: multiprocessors taken away. work: what a load does; "" only waits."""

    name: str
    held: int = 0
    work: str = ""

    @property
    def requested(self) -> Mapping[str, Any]:
        """For the evidence."""
        load = {"held": self.held} if self.held else {"busy": self.work}
        return {**load, "work": self.work} if self.held and self.work else load


def variants(multiprocessors: int, *, tensor_cores: bool = True) -> list[Variant]:
    """Every load for a device with so many multiprocessors; those that would be equal once."""
    most = max(1, multiprocessors - max(1, multiprocessors // FEW))
    half = max(1, multiprocessors // 2)
    held = dict.fromkeys(n for n in (multiprocessors // 4, half, most) if 0 < n < multiprocessors)
    math = "tensor" if tensor_cores else "fma"
    return [
        *(Variant(f"busy {work}", work=work) for work in ("memory", math)),
        *(Variant(f"hold={count}", count) for count in held),
        *([Variant(f"hold={half} memory", half, "memory")] if half < multiprocessors else []),
    ]


def more_wanted(
    world: int, least: int, tried: int, overlapped: int, seconds: float, *, hopeless: bool = False
) -> bool:
    """Whether to execute once more under a load.

    Ranks execute together, so that with several their number cannot depend on what one measured.
    hopeless: an earlier load never overlapped.
    """
    if world > 1:
        return tried < least
    if tried - overlapped >= overlapped + (1 if hopeless else MISSES):
        return False
    return overlapped < least or (overlapped < MOST_EACH and seconds < LONG)


def timeout_for(variant: Variant, multiprocessors: int, alone: float) -> float:
    """Seconds after which a load ends by itself, beside an execution that takes `alone` seconds
    without one: three times what it may take on the multiprocessors that are left."""
    slowed = alone * multiprocessors / max(1, multiprocessors - variant.held)
    return min(TIMEOUTS[0] + 3 * slowed, TIMEOUTS[1])


def run(session: Session, runs: int, devices: Sequence[torch.device]) -> None:
    """With a cold cache, then under every load; at least `runs` in all on a good machine."""
    machine = available(session, "contention", partial(_machine, devices), REFUSALS)
    if machine is None:
        return
    count, modern = machine
    loads = variants(count, tensor_cores=modern)
    least = max(LEAST_EACH, -(-runs // (len(loads) + 1)))
    cooled = _under_cold_cache(session, least, devices)
    if cooled is None:
        return
    (index, alone), hopeless = cooled, False
    for variant in loads:
        timeout = timeout_for(variant, count, alone)
        with ExitStack() as stack:
            make = partial(_opened, stack, variant, timeout, devices)
            made = available(session, "contention", make, REFUSALS)
            if made is None:
                return
            began, tried, overlapped = time.monotonic(), 0, 0
            while more_wanted(
                session.stage.world,
                least,
                tried,
                overlapped,
                time.monotonic() - began,
                hopeless=hopeless,
            ):
                overlapped += _under(session, variant, made, index)
                tried, index = tried + 1, index + 1
            hopeless = hopeless or (tried > 0 and overlapped == 0)


def _machine(devices: Sequence[torch.device]) -> tuple[int, bool]:
    """The least number of multiprocessors, and whether all have the tensor cores a load uses."""
    counts = [torch.cuda.get_device_properties(one).multi_processor_count for one in devices]
    modern = all(torch.cuda.get_device_capability(one) >= (8, 0) for one in devices)
    return min(counts), modern


def _opened(
    stack: ExitStack, variant: Variant, timeout: float, devices: Sequence[torch.device]
) -> list[Load]:
    return [
        stack.enter_context(opened(one, held=variant.held, work=variant.work, timeout=timeout))
        for one in devices
    ]


def _under(session: Session, variant: Variant, loads: Sequence[Load], index: int) -> bool:
    """One execution beside running loads; whether they ran beside all of it, and it succeeded."""
    complete, refused = False, ""

    def measured() -> Effect:
        nonlocal complete
        if refused:
            return {"load": refused}, False
        overlaps = [load.overlap() for load in loads]
        for load in loads:
            load.release()
        complete = all(overlap.complete for overlap in overlaps)
        told = [overlap.to_json() for overlap in overlaps]
        return (told[0] if len(told) == 1 else {"devices": told}), complete

    try:
        try:
            for load in loads:
                load.start()
            for load in loads:
                load.begin()
        except JitError as error:  # the peers execute, so this rank does, too
            refused = f"{type(error).__name__}: {error}"
        capture = perform(
            session,
            "contention",
            variant.name,
            run=index,
            requested=variant.requested,
            effective=measured,
        )
    finally:
        for load in loads:
            with suppress(RuntimeError):  # after a CUDA error of the case, which is what counts
                load.release()
    return complete and capture.failure is None


def _under_cold_cache(
    session: Session, runs: int, devices: Sequence[torch.device]
) -> tuple[int, float] | None:
    """Executions right after the L2 was emptied; how many, and the longest one's seconds. None
    where that cannot be done."""
    make = partial(_caches, devices)
    caches = available(session, "contention", make, REFUSALS)
    if caches is None:
        return None
    longest = 0.0
    for index in range(runs):
        found: list[tuple[int, int]] = []
        cooled = watched(session, before=partial(_chill, caches, found))
        capture = perform(
            cooled,
            "contention",
            COLD_CACHE,
            run=index,
            requested={"l2": "cold"},
            effective=partial(cold_effect, found, len(devices)),
        )
        longest = max(longest, capture.seconds)
    return runs, longest


def _caches(devices: Sequence[torch.device]) -> list[Cache]:
    return [cache_of(one) for one in devices]


def _chill(caches: Sequence[Cache], found: list[tuple[int, int]], arguments: object) -> None:
    found += [cache.chill() for cache in caches]


def cold_effect(found: Sequence[tuple[int, int]], devices: int) -> Effect:
    """From cycles of a read with a warm and a cold cache, on each device."""
    told = {"cycles_warm": [w for w, _ in found], "cycles_cold": [c for _, c in found]}
    return told, len(found) == devices and all(cold >= COLD * warm for warm, cold in found)
