"""What a tool that runs a script again tells the recorder inside of it, through the environment.

The script stays as it is: `with verify.record("run", model, optimizer):` records where the orders
say, whatever folder it names, and ends the script when they say so. No torch here.

The script is stopped inside the step behind the last one that was asked for, just before its
optimizer would change anything. So all that the script does between two steps has been done, such
as an evaluation and saving a checkpoint; what it had begun of the next step is lost, as in a
preemption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verify.errors import UnsupportedError

VARIABLE = "MOK_VERIFY_ORDERS"  # the path of a file of orders
RUN_FOLDER = "VERIFY_RUN"  # where a run may leave its checkpoints: what {run} stands for
BEFORE = "before the first event"  # the path of state as a step finds it
STOPPED = "Stopped"  # how the reason of such a recording begins

Wanted = tuple[int | None, int, str, str, str, int]
"""Rank (None: any), step, name, kind, path and occurrence of an event whose tensor is kept."""


@dataclass(frozen=True)
class Orders:
    """folder: where recordings and tensors go. stop_after: how many steps are made, None for all.
    keep: events whose tensors are kept. states: whether each step begins with the state that it
    finds, which is what a resumed run must have: schedulers, averages and evaluations change it
    behind the optimizer's step. narrow: whether the state at the start is looked at for values that
    a narrower dtype could hold. steps: from, up to but not including: which steps are recorded in
    full, whatever the script chose; None leaves it its choice, unless `states` asks for all."""

    folder: str
    stop_after: int | None = None
    keep: tuple[Wanted, ...] = ()
    states: bool = False
    narrow: bool = False
    steps: tuple[int, int] | None = None


class Stopped(SystemExit):
    """Ends a script behind the step after which it was to stop, with exit code 0."""

    def __init__(self, steps: int) -> None:
        super().__init__(0)
        self.steps = steps

    def __str__(self) -> str:
        return f"after {self.steps} steps, as ordered"


def write_orders(orders: Orders, path: Path) -> None:
    """Stores orders where `given` will find them."""
    path.write_text(json.dumps(asdict(orders)), encoding="utf-8")


def given(environment: Mapping[str, str] = os.environ) -> Orders | None:
    """The orders that this process has; None in a process that nobody runs again.

    UnsupportedError when the file that the environment names is no file of orders.
    """
    path = environment.get(VARIABLE)
    if not path:
        return None
    try:
        return _orders(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"{VARIABLE}={path}: no orders of `verify replay` or `verify trace explain`, which "
            f"alone set it ({type(error).__name__}); unset it"
        ) from error


def _orders(fields: Any) -> Orders:
    keep = tuple(tuple(one) for one in fields.pop("keep"))
    if not all(len(one) == 6 for one in keep):
        raise ValueError("a malformed event")
    steps = fields.pop("steps", None)
    if steps is not None and not (len(steps) == 2 and 0 <= steps[0] < steps[1]):
        raise ValueError("a malformed range of steps")
    return Orders(**fields, keep=keep, steps=None if steps is None else (steps[0], steps[1]))
