"""All controls by name, and the detectors that can be switched off.

Every condition and every reason has at least one control, by test. Detectors are what a fault is
caught by: a condition that is executed, or a reason that is found.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from verify.cases import CLAIMS
from verify.controls import (
    behaviours,
    deaths,
    gaps,
    measured,
    on_gpu,
    one_process,
    recordings,
    stored,
    subtleties,
    two_ranks,
)
from verify.controls.planting import Control
from verify.errors import CaseError
from verify.reasons import REASONS

_HOMES = (
    *(one_process, measured, behaviours, subtleties, gaps, stored),
    *(recordings, two_ranks, deaths, on_gpu),
)
CONTROLS: tuple[Control, ...] = tuple(control for home in _HOMES for control in home.CONTROLS)
DETECTORS: tuple[str, ...] = (*CLAIMS, *REASONS)


def names(only: str | None = None) -> list[str]:
    """The names of all controls, or of those that match a pattern, with or without their kind:
    `condition/memory` is found by `condition/*`, `*memory*` and `memory`."""
    found = sorted(control.name for control in CONTROLS)
    if only is None:
        return found
    return [n for n in found if fnmatchcase(n, only) or fnmatchcase(n.partition("/")[2], only)]


def named(wanted: Iterable[str]) -> list[Control]:
    """The controls of these names, in the order of the catalogue. CaseError for an unknown one."""
    chosen = set(wanted)
    known = {control.name for control in CONTROLS}
    for name in sorted(chosen - known):
        raise CaseError(f"no control {name!r}; {_close(name, sorted(known))}")
    return [control for control in CONTROLS if control.name in chosen]


def detectors(off: str | Iterable[str] | None) -> frozenset[str]:
    """The names of detectors to switch off. CaseError for an unknown one."""
    found = frozenset((off,) if isinstance(off, str) else off or ())
    for name in sorted(found - set(DETECTORS)):
        raise CaseError(f"no detector {name!r}; {_close(name, DETECTORS)}")
    return found


def module_of(control: Control) -> str:
    """The module in which workers find the control's cases."""
    return next(home.__name__ for home in _HOMES if control in home.CONTROLS)


def _close(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
