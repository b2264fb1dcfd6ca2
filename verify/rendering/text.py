"""The report for a terminal: a table per case, then a card per finding, then one line of totals.

Every claim has a line with `verdict=...`, so that a log can be searched, and the last line is
printed when all is well too: silence would look like not running. No line starts with text that
the code under test controls, since a CI runner would read `::error` there as a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from verify.rendering import gates, phrases
from verify.rendering.escaping import printable
from verify.rendering.grouping import grouped

SHOWN_CARDS = 6  # per case; the others are counted
Json = Mapping[str, Any]


def render(result: Json, *, timings: bool = False) -> str:
    """The whole report, ending in a newline."""
    lines: list[str] = []
    gate = result.get("gate")
    affected = gate["affected"] if gate else ()
    for case in result["cases"]:
        lines += [*_case(case, timings=timings, affected=case["case"] in affected), ""]
    for case in result["cases"]:
        cards = findings(case)
        lines += [*cards, ""] if cards else []
    if timings:
        lines.append(f"timings: {result['seconds']:.1f} s in all")
    if gate:
        lines += [*gates.text(result), ""]
    lines.append(phrases.totals(result))
    return "\n".join(lines) + "\n"


def findings(
    case: Json,
    claims: Sequence[Json] | None = None,
    *,
    shown: int = SHOWN_CARDS,
    commands: bool = True,
) -> list[str]:
    """One card per distinct finding of the claims (all by default).

    With `commands` each ends in the command that reproduces it.
    """
    lines: list[str] = []
    claims = case["claims"] if claims is None else claims
    groups = grouped(claims)
    for group in groups[:shown]:
        names = ", ".join(dict.fromkeys(printable(claim["claim"]) for claim in group.claims))
        lines.append(phrases.headline(case, names, group.finding))
        lines += [f"  {line}" for line in phrases.card(group.finding, group.claims)]
        lines += [f"  {line}" for line in phrases.again(group)]
        command = group.claims[0]["reproduce"] if len(group.claims) == 1 else case["reproduce"]
        if command and commands:
            lines.append(f"  reproduce: {printable(command)}")
    if len(groups) > shown:
        more = phrases.number(len(groups) - shown, "finding")
        lines.append(f"and {more} more of {printable(case['case'])} in the result document")
    for claim in claims:
        if claim["verdict"] != "VERIFIED" and not claim["findings"]:
            lines.append(phrases.headline(case, printable(claim["claim"]), None, claim["verdict"]))
    return lines


def _case(case: Json, *, timings: bool, affected: bool = False) -> list[str]:
    about = f": {printable(case['description'])}" if case["description"] else ""
    mark = " (affected by the change)" if affected else ""
    lines = [f"case {printable(case['case'])}{mark}{about}"]
    rows = [
        (
            printable(claim["claim"]),
            phrases.state(claim),
            phrases.evidence(claim),
            phrases.changed(claim),
            phrases.ranks(claim, case["ranks"]),
        )
        for claim in case["claims"]
    ]
    if rows:
        headers = ("claim", "verdict", "evidence", "variants", "ranks")
        table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
        lines += [f"  {line.rstrip()}" for line in table.splitlines()]
    else:
        lines.append(f"  verdict={case['verdict']} no claim was checked")
    for claim in case["claims"]:
        lines += [f"  {line}" for line in phrases.measured(claim)]
        lines += [f"  {line}" for line in phrases.left_out(claim)]
    lines += [f"  note: {printable(note)}" for note in case["notes"]]
    if timings:
        lines.append(f"  {phrases.timing(case)}")
    return lines
