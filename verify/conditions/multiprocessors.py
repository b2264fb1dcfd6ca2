"""sms: the case on a part of the GPU's multiprocessors, by green contexts of the driver.

A result must not depend on how many there are: on a smaller device, or beside other work, it would
be another. Which multiprocessors the case could reach is measured with a kernel that notes where
its blocks run. Kernels that size their grid by what the device says about itself are not changed.
Streams of the case's own are not limited; where it took memory for some, that is not in effect.
The multiprocessors in reach are measured once for each limit, and not at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mok.jit import JitError
from verify.allocations import leave
from verify.conditions.availability import Unavailable, available, unless_own_streams
from verify.conditions.cuda_probes import reached_multiprocessors
from verify.conditions.green_contexts import GreenContextUnavailable, limited_stream
from verify.conditions.watching import cuda_devices
from verify.sessions import Effect, Session, perform

SHARES = ((1, 4), (3, 4))


def limits(multiprocessors: int) -> list[int]:
    """How many multiprocessors to leave, of so many: different numbers, none of them all."""
    counts = (multiprocessors * part // whole for part, whole in SHARES)
    return list(dict.fromkeys(count for count in counts if 0 < count < multiprocessors))


@dataclass(frozen=True)
class Limited:
    """A stream on which `granted` multiprocessors are allowed, and how many were `reached`."""

    stream: torch.cuda.ExternalStream
    granted: int
    reached: int


def run(session: Session, runs: int) -> None:
    """At least `runs` executions, over the limits in turn."""
    place = available(session, "sms", lambda: _parted(cuda_devices(session)))
    if place is None:
        return
    device, total = place
    chosen = limits(total)
    each = -(-max(runs, len(chosen)) // len(chosen))
    for number, limit in enumerate(chosen):
        if not _under(session, device, limit, total, range(number * each, (number + 1) * each)):
            return


def _parted(devices: Sequence[torch.device]) -> tuple[torch.device, int]:
    """The device, and how many multiprocessors it has, some of which can be taken away."""
    if len(devices) != 1:
        places = ", ".join(map(str, devices)) or "no CUDA device"
        raise Unavailable(f"it uses {places}; exactly one is needed")
    total = int(torch.cuda.get_device_properties(devices[0]).multi_processor_count)
    if not limits(total):
        raise Unavailable(f"{devices[0]} has {total} multiprocessors")
    return devices[0], total


def _limited(stack: ExitStack, device: torch.device, limit: int) -> Limited:
    stream, granted = stack.enter_context(limited_stream(device, limit))
    return Limited(stream, granted, len(reached_multiprocessors(device, stream)))


def _under(session: Session, device: torch.device, limit: int, total: int, runs: range) -> bool:
    """The executions under one limit; False where it cannot be had, on whatever rank."""
    with ExitStack() as stack:
        refusals = (JitError, GreenContextUnavailable)
        made = available(session, "sms", lambda: _limited(stack, device, limit), refusals)
        if made is None:
            return False
        told = unless_own_streams(session, effect(made.granted, made.reached, total))
        try:
            for index in runs:
                with torch.cuda.stream(made.stream):
                    perform(
                        session,
                        "sms",
                        f"sms={made.granted}",
                        run=index,
                        requested={"multiprocessors": limit},
                        effective=told,
                    )
        finally:
            leave(device, made.stream)
        return True


def effect(granted: int, reached: int, total: int) -> Effect:
    """In effect where blocks were seen on no more multiprocessors than granted, and not on all."""
    told = {"granted": granted, "reached": reached, "of": total}
    return told, 0 < reached <= granted < total
