"""What keeps a gate from passing besides its cases: a closed list, each entry with its evidence.

Pure: from facts to rows of the result document. It refuses to weigh them; a finding has the verdict
of its reason, and a gate with one is not verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verify.reasons import GATE_REASONS

SHOWN = 10  # names in a sentence; the document has them all


def findings(
    *,
    uncovered: Sequence[str] = (),
    elsewhere: Mapping[str, Path] | None = None,
    failed_controls: Sequence[str] = (),
    idle_controls: Mapping[str, str] | None = None,
    dirty: Sequence[str] = (),
    cut_off: Sequence[str] = (),
    spent: str | None = None,
    unclaimed: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The findings of a gate, as rows {reason, verdict, detail}.

    uncovered: changed sources without a case; elsewhere: where a case has a file of that name.
    failed_controls: their names. idle_controls: where not one control ran, what each of them
    lacks. dirty: uncommitted files that are not allowed. cut_off: cases that
    had to run and did not, and `spent`, why. unclaimed: stored goldens that no case declares.
    """
    found = []
    if uncovered:
        detail = f"covered by no case: {_listed(uncovered)}"
        for name, place in list((elsewhere or {}).items())[:1]:
            detail += f"; a case has {place} for {name}: is another copy of the package installed?"
        found.append(_row("not-covered", detail))
    if failed_controls:
        found.append(_row("control-failed", f"failed: {_listed(failed_controls)}"))
    if idle_controls:
        lacks = ", ".join(dict.fromkeys(idle_controls.values()))
        detail = f"none of the chosen controls ran here ({lacks}): {_listed(list(idle_controls))}"
        found.append(_row("control-failed", f"{detail}; choose some that can in [controls] only"))
    if dirty:
        found.append(_row("dirty-source", f"not committed: {_listed(dirty)}"))
    if cut_off:
        found.append(_row("budget-spent", f"{spent} before these ran: {_listed(cut_off)}"))
    if unclaimed:
        detail = f"declared by no case, so not compared: {_listed(unclaimed)}"
        found.append(_row("golden-unclaimed", detail))
    return found


def _row(reason: str, detail: str) -> dict[str, Any]:
    return {"reason": reason, "verdict": GATE_REASONS[reason].verdict.value, "detail": detail}


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
