"""Controls: planted faults that the verifier must catch by name, and clean twins it must pass.

`verify controls` is `run(names(...))`. To ask what a detector is worth, `collect` once and
`evaluate` the same records as often as wanted, each time with other detectors switched off: exactly
the controls that list a detector may then fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from verify.controls.catalogue import CONTROLS, DETECTORS, detectors, named, names
from verify.controls.drawing import listing, text
from verify.controls.judging import ControlOutcome, ControlsReport, evaluate
from verify.controls.launching import Collected, collect
from verify.controls.machine import lacking, parted
from verify.controls.planting import Control

__all__ = [
    "CONTROLS",
    "DETECTORS",
    "Collected",
    "Control",
    "ControlOutcome",
    "ControlsReport",
    "collect",
    "evaluate",
    "lacking",
    "listing",
    "names",
    "parted",
    "run",
    "text",
]


def run(
    only: Iterable[str] | str | None = None,
    disable: Iterable[str] | str | None = None,
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Executes the named controls (all by default; a string is a pattern) and judges them.

    Returns `ControlsReport.to_json()`: its `status` is passed, failed, or not-run when nothing was
    chosen, or nothing of it can run here. `not_run` names what cannot, with what this machine
    lacks. Raises CaseError for a control or a detector that does not exist.
    """
    off = detectors(disable)
    chosen = named(names(only) if only is None or isinstance(only, str) else only)
    here, left_out = parted(chosen)
    if not here:
        return ControlsReport((), tuple(sorted(off)), left_out=left_out).to_json()
    report = evaluate(collect(here, off, progress=progress), off)
    return replace(report, left_out=left_out).to_json()
