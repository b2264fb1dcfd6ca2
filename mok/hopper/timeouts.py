"""How long the Hopper kernels wait for other ranks: defaults, environment, and what is allowed.

It exists apart from the workspace so that `mok.functional` can take time-outs without importing
what launches kernels. A time-out is this rank's own: ranks may differ. Refuses what is no positive
number of seconds: a wait without an end would keep a job for ever when a peer has died.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from mok.errors import InputError

ENTER_VARIABLE = "MOK_TIMEOUT_ENTER"
INSIDE_VARIABLE = "MOK_TIMEOUT_INSIDE"
_MOST = 1e9  # seconds; nanoseconds of it fit the kernels' 64 bits


@dataclass(frozen=True)
class Timeouts:
    """Seconds. enter: until every peer has begun the same launch; inside: of any wait after that.

    `enter` has to cover the slowest step of any rank (a checkpoint, a first compilation), `inside`
    only time on the device. Raises InputError unless both are above 0 and at most 10^9.
    """

    enter: float = 600.0
    inside: float = 30.0

    def __post_init__(self) -> None:
        for name in ("enter", "inside"):
            _check(f"Timeouts.{name}", getattr(self, name))


def wanted_timeouts(given: Timeouts | None = None) -> Timeouts:
    """What was given, else MOK_TIMEOUT_ENTER and MOK_TIMEOUT_INSIDE (seconds), else the defaults.

    Raises InputError when a variable holds something else.
    """
    if given is not None:
        return given
    plain = Timeouts()
    return Timeouts(
        _variable(ENTER_VARIABLE, plain.enter), _variable(INSIDE_VARIABLE, plain.inside)
    )


def _variable(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    _check(name, value, text)
    return value


def _check(name: str, value: float, shown: str | None = None) -> None:
    if not 0.0 < value <= _MOST:
        raise InputError(
            f"{name} = {value if shown is None else repr(shown)}; allowed: seconds above 0 and at "
            "most 1e9. Leave it out for the default."
        )
