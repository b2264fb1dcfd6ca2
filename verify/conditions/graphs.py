"""graph: the case recorded in a CUDA graph and replayed, against the eager base execution.

A graph repeats launches, not host code. Numbers that the host computed while recording, work that
it did itself, and memory that was freed since are the same in every replay, or gone.
"""

from __future__ import annotations

import torch

from verify.conditions.availability import Unavailable, available, unsupported
from verify.conditions.recording import Replays, recorded
from verify.conditions.watching import cuda_devices
from verify.execution import execute
from verify.sessions import Session, settle_own

REPLAYS = 3


def run(session: Session, runs: int) -> None:
    """`runs` recordings, each replayed three times with the inputs put back in place."""
    base = session.base
    assert base is not None
    device = available(session, "graph", lambda: _only(cuda_devices(session)))
    if device is None:
        return
    for index in range(runs):
        replays = Replays(REPLAYS)
        stage = recorded(session, device, replays).stage
        capture = execute(stage, base.given, group=session.group, upstream=base.upstream)
        if replays.refused:  # on every rank, as they agreed before replaying
            unsupported(
                session, "graph", f"it cannot be recorded in a CUDA graph: {replays.refused}"
            )
            return
        effective, in_effect = replays.effect()
        settle_own(
            session,
            capture,
            claim="graph",
            variant="replay",
            run=index,
            arm="restored",
            requested={"replays": REPLAYS},
            effective=effective,
            in_effect=in_effect,
        )


def _only(devices: list[torch.device]) -> torch.device:
    if len(devices) == 1:
        return devices[0]
    if not devices:
        raise Unavailable("it uses no CUDA device, so there is nothing to record")
    raise Unavailable(f"it uses {', '.join(map(str, devices))}; a graph is recorded on one device")
