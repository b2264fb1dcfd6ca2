"""graph: the case recorded in a CUDA graph and replayed, against the eager base execution.

A graph repeats launches, not host code. Numbers that the host computed while recording, work that
it did itself, and memory that was freed since are the same in every replay, or gone.
"""

from __future__ import annotations

import torch

from verify.conditions.recording import Replays, recorded
from verify.conditions.watching import cuda_devices
from verify.evidence import Trouble
from verify.execution import execute
from verify.sessions import Session, settle_own

REPLAYS = 3


def run(session: Session, runs: int) -> None:
    """`runs` recordings, each replayed three times with the inputs put back in place."""
    devices = cuda_devices(session)
    if len(devices) != 1:
        _unsupported(session, _where(devices))
        return
    base = session.base
    assert base is not None
    for index in range(runs):
        replays = Replays(REPLAYS)
        stage = recorded(session, devices[0], replays).stage
        capture = execute(stage, base.given, group=session.group, upstream=base.upstream)
        if replays.refused:
            session.agree(None)
            _unsupported(session, f"it cannot be recorded in a CUDA graph: {replays.refused}")
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


def _where(devices: list[torch.device]) -> str:
    if not devices:
        return "none of the case's tensors is on a CUDA device, so there is nothing to record"
    return f"its tensors are on {', '.join(map(str, devices))}; a graph is recorded on one device"


def _unsupported(session: Session, detail: str) -> None:
    session.emit(
        Trouble(session.plan.case, "unsupported", detail, claim="graph", rank=session.stage.rank)
    )
