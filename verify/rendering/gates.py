"""The sentences about a gate that every format shares: what changed, what was found, what was left.

They read the object `gate` of the document. All of them are printable; none is escaped for a
format, and none begins with text that a repository controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verify.reasons import GATE_REASONS
from verify.rendering import goldens
from verify.rendering.escaping import clipped, printable
from verify.rendering.goldens import LONGEST
from verify.rendering.phrases import number

SHOWN_NAMES = 20
SHORT = 12  # digits of a commit
Json = Mapping[str, Any]


def about(result: Json) -> list[str]:
    """What the gate of a document looked at: controls, changed files, budget, what it left out."""
    gate, controls = result["gate"], result["controls"]
    failed = f", {len(controls['failed'])} failed" if controls["failed"] else ""
    left_out = controls.get("not_run")
    missing = f", {len(left_out)} not run here ({_lacking(left_out)})" if left_out else ""
    said = [f"controls: {controls['passed']} passed{failed}{missing}"]
    said += [_changed(gate), *_coverage(gate)]
    if gate["affected"]:
        said.append(f"affected: {listed(gate['affected'])}; they ran first")
    said.append(_budget(gate["budget"]))
    if gate["left_out"]:
        count = number(len(gate["left_out"]), "case")
        said.append(
            f"left out when the budget was spent, not affected: {count}: {listed(gate['left_out'])}"
        )
    if gate.get("goldens_not_checked"):  # older documents lack it
        said.append(f"goldens that no case of this gate checks: {gate['goldens_not_checked']}")
    if gate["golden_changes"]:
        said.append(f"{number(len(gate['golden_changes']), 'golden')} changed")
    return said


def _lacking(left_out: Mapping[str, str]) -> str:
    """What the machine lacks for the controls that it did not run, each thing once."""
    return clipped(", ".join(dict.fromkeys(left_out.values())), LONGEST)


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


def text(result: Json) -> list[str]:
    """The gate's part of the report for a terminal."""
    gate = result["gate"]
    said = [f"gate {clipped(gate['config'], LONGEST)}", *(f"  {line}" for line in about(result))]
    said += [f"    {line}" for line in goldens.text(gate["golden_changes"])]
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
    above = sum(name == ".." or name.startswith("../") for name in gate["changed"])
    verb = "is" if above == 1 else "are"
    unasked = f"{number(above, 'changed file')} above this folder {verb} not asked for"
    if gate["uncovered"]:
        missing = f"covered by no case: {listed(gate['uncovered'])}"
        return [missing, *([f"coverage: {unasked}"] if above else [])]
    said = "coverage: every changed source is covered by a case or exempt"
    return [said + (f"; {unasked}" if above else "")]


def _budget(budget: Json) -> str:
    parts = []
    for name, unit in (("seconds", "s"), ("executions", "executions")):
        used = budget[f"used_{name}"]
        shown = f"{used:.1f}" if name == "seconds" else str(used)
        limit = f" of {budget[name]:g}" if budget[name] is not None else ""
        parts.append(f"{shown}{limit} {unit}")
    free = budget["seconds"] is None and budget["executions"] is None
    return f"used: {' and '.join(parts)}" + (" (no budget)" if free else "")
