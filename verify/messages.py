"""The text of a failed assertion: verdict first, what differed, the command that shows it again."""

from __future__ import annotations

from verify.reasons import REASONS, Verdict
from verify.verdicts import CaseVerdict, Finding

MAX_SHOWN = 3  # findings per claim


def failure_text(verdict: CaseVerdict, reproduce: str | None = None) -> str:
    """Lines for a person who reads a test log: no colours, nothing that needs a terminal."""
    lines = [f"verdict={verdict.verdict} {verdict.case}"]
    for claim in verdict.claims:
        if claim.verdict is Verdict.VERIFIED:
            continue
        lines.append(f"{claim.claim}: verdict={claim.verdict} ({claim.executions} executions)")
        for finding in claim.findings[:MAX_SHOWN]:
            lines += [f"  {line}" for line in finding_lines(finding)]
        if len(claim.findings) > MAX_SHOWN:
            lines.append(f"  and {len(claim.findings) - MAX_SHOWN} more findings")
    lines += [f"note: {note}" for note in verdict.notes]
    if reproduce:
        lines.append(f"reproduce: {reproduce}")
    return "\n".join(lines)


def finding_lines(finding: Finding) -> list[str]:
    """One finding: reason, place, first difference, what it suggests, what to do."""
    place = [
        f"{name} {value}"
        for name, value in (
            ("rank", finding.rank),
            ("run", finding.run),
            ("process", finding.process),
        )
        if value is not None
    ]
    if finding.variant:
        place.append(finding.variant)
    where = f" [{', '.join(place)}]" if place else ""
    lines = [f"reason={finding.reason}: {finding.detail}{where}"]
    difference = finding.difference or {}
    lines += [f"  {line}" for line in difference.get("lines", ())]
    lines += [f"  suggests: {text}" for text in difference.get("suggests", ())]
    lines.append(f"  to do: {REASONS[finding.reason].remedy}")
    return lines
