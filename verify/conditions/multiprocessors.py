"""sms: the case on a part of the GPU's multiprocessors, by green contexts of the driver.

A result must not depend on how many there are: on a smaller device, or beside other work, it would
be another. Which multiprocessors the case could reach is measured with a kernel that notes where
its blocks run. Kernels that size their grid by what the device says about itself are not changed.
"""

from __future__ import annotations

import torch

from mok.jit import JitError
from verify.conditions.cuda_probes import reached_multiprocessors
from verify.conditions.green_contexts import GreenContextUnavailable, limited_stream
from verify.conditions.watching import cuda_devices
from verify.evidence import Trouble
from verify.sessions import Effect, Session, perform

SHARES = ((1, 4), (3, 4))


def limits(multiprocessors: int) -> list[int]:
    """How many multiprocessors to leave, of so many: different numbers, none of them all."""
    counts = (multiprocessors * part // whole for part, whole in SHARES)
    return list(dict.fromkeys(count for count in counts if 0 < count < multiprocessors))


def run(session: Session, runs: int) -> None:
    """At least `runs` executions, over the limits in turn."""
    devices = cuda_devices(session)
    try:
        if len(devices) != 1:
            places = ", ".join(map(str, devices)) or "no CUDA device"
            raise GreenContextUnavailable(f"its tensors are on {places}; exactly one is needed")
        total = torch.cuda.get_device_properties(devices[0]).multi_processor_count
        chosen = limits(total)
        if not chosen:
            raise GreenContextUnavailable(f"{devices[0]} has {total} multiprocessors")
        each = -(-max(runs, len(chosen)) // len(chosen))
        for place, limit in enumerate(chosen):
            _under(session, devices[0], limit, total, range(place * each, (place + 1) * each))
    except (JitError, GreenContextUnavailable) as error:
        session.emit(
            Trouble(
                session.plan.case,
                "unsupported",
                f"{type(error).__name__}: {error}",
                claim="sms",
                rank=session.stage.rank,
            )
        )


def _under(session: Session, device: torch.device, limit: int, total: int, runs: range) -> None:
    with limited_stream(device, limit) as (stream, granted):
        reached = len(reached_multiprocessors(device, stream))
        for index in runs:
            with torch.cuda.stream(stream):
                perform(
                    session,
                    "sms",
                    f"sms={granted}",
                    run=index,
                    requested={"multiprocessors": limit},
                    effective=effect(granted, reached, total),
                )


def effect(granted: int, reached: int, total: int) -> Effect:
    """In effect where blocks were seen on no more multiprocessors than granted, and not on all."""
    told = {"granted": granted, "reached": reached, "of": total}
    return told, 0 < reached <= granted < total
