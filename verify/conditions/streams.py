"""stream: the case on another CUDA stream than torch's default one.

Kernels that are launched on the default stream although torch's current one is another are not
ordered with what surrounds them. On a quiet device they mostly come in time. So one variant makes
the inputs late: right before the call they hold NaNs (integers 0), and their values come only after
a pause of the side stream. A kernel that does not wait for that stream computes with NaNs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mok import jit
from verify.captures import as_integers
from verify.conditions.cuda_probes import delay_stream
from verify.conditions.watching import cuda_devices, watched
from verify.evidence import Trouble
from verify.sessions import Effect, Session, perform

DELAY = 0.02  # seconds
VARIANTS = (("side stream", 0, 0.0), ("high priority", -1, 0.0), ("late side stream", 0, DELAY))


def run(session: Session, runs: int) -> None:
    """At least `runs` executions, over a side stream, one of high priority, and a late one."""
    devices = cuda_devices(session)
    if not devices:
        _unsupported(session, "none of the case's tensors is on a CUDA device")
        return
    device = devices[0]
    try:
        jit.load("conditions/probe.cu", "delay", device=device)  # not for the first time in a case
        for index in range(max(runs, len(VARIANTS))):
            name, priority, late = VARIANTS[index % len(VARIANTS)]
            _on(session, name, device, priority, late, index)
    except jit.JitError as error:
        _unsupported(session, f"{type(error).__name__}: {error}")


def _on(
    session: Session, name: str, device: torch.device, priority: int, late: float, index: int
) -> None:
    stream = torch.cuda.Stream(device, priority=priority)
    usual = torch.cuda.current_stream(device).cuda_stream
    seen: list[int] = []

    def began(arguments: dict[str, Any]) -> None:
        if late:
            _make_late(device, arguments, late)
        seen.append(torch.cuda.current_stream(device).cuda_stream)

    def ended(returned: Any) -> None:
        seen.append(torch.cuda.current_stream(device).cuda_stream)

    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        perform(
            watched(session, before=began, after=ended),
            "stream",
            name,
            run=index,
            requested={"stream": name, "priority": priority, "late_ms": round(1000 * late)},
            effective=partial(effect, seen, usual),
        )
    torch.cuda.synchronize(device)


def _make_late(device: torch.device, arguments: dict[str, Any], seconds: float) -> None:
    """The inputs on this device get their values only after a pause of the current stream."""
    leaves = [
        leaf.detach()
        for leaf in pytree.tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor) and leaf.device == device
    ]
    values = [leaf.clone() for leaf in leaves]
    for leaf in leaves:
        # an index that is not there would end the process, and with it the evidence
        if leaf.is_complex():
            leaf.fill_(complex("nan"))
        else:
            as_integers(leaf).fill_(-1 if leaf.is_floating_point() else 0)
    torch.cuda.current_stream(device).synchronize()
    delay_stream(device, seconds)
    for leaf, value in zip(leaves, values, strict=True):
        as_integers(leaf).copy_(as_integers(value))


def effect(seen: Sequence[int], usual: int) -> Effect:
    """In effect where the current stream was another both when the case began and when it ended."""
    others = sum(one != usual for one in seen)
    return {"looks": len(seen), "on_another_stream": others}, others == len(seen) == 2


def _unsupported(session: Session, detail: str) -> None:
    session.emit(
        Trouble(session.plan.case, "unsupported", detail, claim="stream", rank=session.stage.rank)
    )
