"""The sentences about a gate that every format shares: what changed, what was found, what was left.

They read the object `gate` of the document. All of them are printable; none is escaped for a
format, and none begins with text that a repository controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from verify.reasons import GATE_REASONS
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number

SHOWN_NAMES = 20
SHOWN_CHANGES = 50
SHORT = 12  # digits of a commit
LANE = 16  # digits of a digest: one lane; fewer would be zeros for small integers
LONGEST = 100  # characters of a name, so that the page of a pull request stays below its limit
GOLDEN_COLUMNS = ("case", "kind", "tensor", "old", "new", "max ULP", "reason")
Json = Mapping[str, Any]


def about(result: Json) -> list[str]:
    """What the gate of a document looked at: controls, changed files, budget, what it left out."""
    gate, controls = result["gate"], result["controls"]
    failed = f", {len(controls['failed'])} failed" if controls["failed"] else ""
    said = [f"controls: {controls['passed']} passed{failed}", _changed(gate), *_coverage(gate)]
    if gate["affected"]:
        said.append(f"affected: {listed(gate['affected'])}; they ran first")
    said.append(_budget(gate["budget"]))
    if gate["left_out"]:
        count = number(len(gate["left_out"]), "case")
        said.append(
            f"left out when the budget was spent, not affected: {count}: {listed(gate['left_out'])}"
        )
    if gate["golden_changes"]:
        said.append(f"{number(len(gate['golden_changes']), 'golden')} changed")
    return said


def headline(gate: Json, finding: Json) -> str:
    """`verdict=UNVERIFIED gate ci/gate.toml: not-covered: ...`."""
    known = GATE_REASONS.get(finding["reason"])
    meaning = f": {known.meaning}" if known else ""
    reason = printable(finding["reason"])
    return (
        f"verdict={finding['verdict']} gate {clipped(gate['config'], LONGEST)}: {reason}{meaning}"
    )


def card(finding: Json) -> list[str]:
    """The evidence and what to do."""
    known = GATE_REASONS.get(finding["reason"])
    return [
        f"| {clipped(finding['detail'], 20 * LONGEST)}",
        *([f"to do: {known.remedy}"] if known else []),
    ]


def golden_rows(gate: Json) -> list[tuple[str, ...]]:
    """The cells of GOLDEN_COLUMNS, at most SHOWN_CHANGES rows."""
    return [
        (
            clipped(row["case"], LONGEST),
            clipped(row["kind"], LONGEST),
            clipped(row["tensor"], LONGEST),
            _digest(row["old"]),
            _digest(row["new"]),
            _digest(row["max_ulp"]),
            clipped(row["reason"] or "", LONGEST),
        )
        for row in gate["golden_changes"][:SHOWN_CHANGES]
    ]


def more_goldens(gate: Json) -> list[str]:
    """A sentence about rows that the table leaves out."""
    more = len(gate["golden_changes"]) - SHOWN_CHANGES
    return [f"and {number(more, 'golden')} more in the result document"] if more > 0 else []


def text(result: Json) -> list[str]:
    """The gate's part of the report for a terminal."""
    gate = result["gate"]
    said = [f"gate {clipped(gate['config'], LONGEST)}", *(f"  {line}" for line in about(result))]
    rows = golden_rows(gate)
    if rows:
        table = tabulate(rows, headers=GOLDEN_COLUMNS, tablefmt="simple", disable_numparse=True)
        said += [f"    {line.rstrip()}" for line in table.splitlines()]
        said += [f"    {line}" for line in more_goldens(gate)]
    for finding in gate["findings"]:
        said += [headline(gate, finding), *(f"  {line}" for line in card(finding))]
    return said


def listed(names: Sequence[Any]) -> str:
    """Few of many names, and how many more there are."""
    more = len(names) - SHOWN_NAMES
    shown = ", ".join(clipped(name, LONGEST) for name in names[:SHOWN_NAMES])
    return shown + (f" and {more} more" if more > 0 else "")


def _changed(gate: Json) -> str:
    if gate["since"] is None:
        return "changes: not asked for (no --since), so no source was checked for a case"
    base = f" (from commit {printable(gate['base'])[:SHORT]})" if gate["base"] else ""
    names = f": {listed(gate['changed'])}" if gate["changed"] else ""
    count = number(len(gate["changed"]), "file")
    return f"changes since {printable(gate['since'])}{base}: {count}{names}"


def _coverage(gate: Json) -> list[str]:
    if gate["since"] is None:
        return []
    if not gate.get("kernels", True):
        return ["coverage: not checked, the gate names no [sources] kernels"]
    if gate["uncovered"]:
        return [f"covered by no case: {listed(gate['uncovered'])}"]
    return ["coverage: every changed source is covered by a case or exempt"]


def _budget(budget: Json) -> str:
    parts = []
    for name, unit in (("seconds", "s"), ("executions", "executions")):
        used = budget[f"used_{name}"]
        shown = f"{used:.1f}" if name == "seconds" else str(used)
        limit = f" of {budget[name]:g}" if budget[name] is not None else ""
        parts.append(f"{shown}{limit} {unit}")
    free = budget["seconds"] is None and budget["executions"] is None
    return f"used: {' and '.join(parts)}" + (" (no budget)" if free else "")


def _digest(value: Any) -> str:
    """A digest's beginning, or whatever else is there; a dash for nothing."""
    if value is None:
        return "-"
    head, colon, digits = printable(value).rpartition(":")
    short = f"{head}{colon}{digits[:LANE]}" if colon and len(digits) > LANE else value
    return clipped(short, LONGEST)
