"""The comparison of two checkpoints for a terminal and as JSON: the answer is the first line.

Names come from files and are shown with escapes. It decides nothing.
"""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from verify.checkpoints.comparing import EXPLAINED, KINDS, Finding, WeightsDiff
from verify.reasons import EXIT_CODES, Verdict
from verify.rendering.escaping import clipped, printable

_WIDEST = 100  # characters of a name


def exit_code(found: WeightsDiff) -> int:
    """0 equal, 1 different, 3 nothing compared or something that is not verified."""
    return EXIT_CODES[found.verdict]


def first_line(found: WeightsDiff) -> str:
    """Verdict, number of parameters, number of differences by kind."""
    counts = [(kind, sum(one.kind == kind for one in found.findings)) for kind in KINDS]
    by_kind = ", ".join(f"{count} {kind}" for kind, count in counts if count)
    what = "parameter" if found.parameters == 1 else "parameters"
    line = f"verdict={found.verdict} {found.parameters} {what}, {len(found.findings)} differ"
    line += f": {by_kind}" if by_kind else ""
    if found.verdict is Verdict.UNVERIFIED:
        line += f"; {len(found.unsettled)} open" if found.elements else "; nothing was compared"
    return line


def text(found: WeightsDiff) -> str:
    """The report, first line first."""
    lines = [first_line(found)]
    for side, one in (("A", found.a), ("B", found.b)):
        lines.append(f"{side}: {printable(one.path)} ({one.kind})")
    shown = found.findings[:EXPLAINED]
    if shown:
        rows = [
            (clipped(_name(one), _WIDEST), one.kind, one.a or "-", one.b or "-") for one in shown
        ]
        table = tabulate(
            rows, ("parameter", "differs", "A", "B"), tablefmt="simple", disable_numparse=True
        )
        lines += ["", *(line.rstrip() for line in table.splitlines()), ""]
    if len(found.findings) > len(shown):
        lines += [f"and {len(found.findings) - len(shown)} more", ""]
    details = [line for one in shown for line in _details(one)]
    lines += [*details, ""] if details else []
    lines += [f"suggests: {printable(hint)}" for hint in found.hints]
    lines += [f"open: {printable(gap)}" for gap in found.unsettled[:EXPLAINED]]
    if len(found.unsettled) > EXPLAINED:
        lines.append(f"open: and {len(found.unsettled) - EXPLAINED} more")
    lines += [f"note: {printable(note)}" for note in found.notes]
    return "\n".join(lines).rstrip() + "\n"


def to_json(found: WeightsDiff) -> dict[str, Any]:
    """The comparison as a JSON-ready record, with all differences."""
    return {
        "version": 1,
        "verdict": found.verdict.value,
        "exit_code": exit_code(found),
        "a": {"path": found.a.path, "kind": found.a.kind},
        "b": {"path": found.b.path, "kind": found.b.kind},
        "parameters": found.parameters,
        "compared": found.compared,
        "elements": found.elements,
        "counts": {kind: sum(one.kind == kind for one in found.findings) for kind in KINDS},
        "differences": [
            {
                "name": one.name,
                "name_in_a": one.old or (one.name if one.a else None),
                "kind": one.kind,
                "a": one.a or None,
                "b": one.b or None,
                "detail": one.detail,
                "lines": list(one.lines),
            }
            for one in found.findings
        ],
        "suggests": list(found.hints),
        "open": list(found.unsettled),
        "notes": list(found.notes),
    }


def _name(one: Finding) -> str:
    return f"{one.old} = {one.name}" if one.old else one.name


def _details(one: Finding) -> list[str]:
    if not one.detail and not one.lines:
        return []
    head = f"{clipped(one.name, _WIDEST)}: {printable(one.detail)}"
    return [head, *(f"        | {printable(line)}" for line in one.lines)]
