"""Faults that do not leave their processes alive: a crash, a hang, a lost, stopped or silent rank.

Each is started apart from the others, and what it had reported before must not turn into a pass.
All of them let the base execution go by, so that there is something to be misled by. They refuse to
harm a process that is not a worker's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from verify.controls.behaviours import counting
from verify.controls.planting import cases_of, fold, plant
from verify.placements import replicated

HANG = 600.0  # seconds, far beyond the limit of the control
PAIR: Mapping[str, Any] = {"ranks": 2, "placement": {"out": replicated}}


def _signal_self(number: signal.Signals) -> None:
    if os.getpgrp() == os.getpid():  # a worker leads a group of its own; nobody else is harmed
        os.kill(os.getpid(), number)


def is_killed(calls: int, x: Tensor) -> Tensor:
    """Dies by a signal in the second call."""
    if calls == 1:
        _signal_self(signal.SIGKILL)
    return fold(x)


def survives(calls: int, x: Tensor) -> Tensor:
    """Gets a signal that does no harm in the second call."""
    if calls == 1:
        _signal_self(signal.SIGCONT)
    return fold(x)


def hangs(calls: int, x: Tensor) -> Tensor:
    """Does not come back from the second call."""
    time.sleep(HANG if calls == 1 else 0)
    return fold(x)


def dawdles(calls: int, x: Tensor) -> Tensor:
    """Comes back late from the second call."""
    time.sleep(0.2 if calls == 1 else 0)
    return fold(x)


def in_collective(rank: int, call: int, happens: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    """Something happens to one rank while the others wait for it in a collective."""

    def execute(calls: int, x: Tensor) -> Tensor:
        """One rank fails while the other waits for it in a collective."""
        if calls == call and dist.get_rank() == rank:
            happens()
        total = fold(x)
        dist.all_reduce(total)
        return total

    return counting(execute)


def killed() -> None:
    _signal_self(signal.SIGKILL)


def stopped() -> None:
    _signal_self(signal.SIGSTOP)


def raised() -> None:
    raise RuntimeError("planted: one rank alone")


def late() -> None:
    time.sleep(0.2)


CONTROLS = (
    plant(
        "detector/stopped-rank",
        in_collective(1, 2, stopped),
        in_collective(1, 2, late),
        claim="repeat",
        reason="missing-rank",
        alone=True,
        apart=True,
        **PAIR,
    ),
    plant(
        "reason/missing-rank",
        in_collective(1, 2, killed),
        in_collective(1, 2, late),
        claim="repeat",
        reason="missing-rank",
        alone=True,
        apart=True,
        **PAIR,
    ),
    plant(
        "reason/not-run",
        in_collective(0, 2, raised),
        in_collective(0, 2, late),
        claim="rank",
        reason="not-run",
        alone=True,
        apart=True,
        claims=("repeat", "rank"),
        **PAIR,
    ),
    plant(
        "reason/timed-out",
        counting(hangs),
        counting(dawdles),
        claim="repeat",
        reason="timed-out",
        alone=True,
        apart=True,
        timeout=6.0,
    ),
    plant(
        "reason/crashed",
        counting(is_killed),
        counting(survives),
        claim="repeat",
        reason="crashed",
        alone=True,
        apart=True,
    ),
)
CASES = cases_of(CONTROLS)
