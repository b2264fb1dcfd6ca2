"""The tables of the HTML report: case by claim, and the evidence of every claim of a case.

Like `cards` it turns the document into bounded, printable texts and leaves drawing to a template.
It refuses to leave a claim out of the matrix: what was not promised is said, not blank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.cases import CLAIMS
from verify.rendering import phrases
from verify.rendering.cards import LINE, NAME
from verify.rendering.escaping import clipped

Json = Mapping[str, Any]
RANK = {"MISMATCH": 0, "UNVERIFIED": 1}  # worst first; everything else after them
SHOWN_COLUMNS = 24
SHOWN_TENSORS = 40
_SHOWN_VALUES = 6
_NAMED = ("worst_ratio", "over_budget", "rounded_elsewhere", "forbidden", "relative_l2", "numel")


@dataclass(frozen=True)
class Cell:
    """A claim of a case in the matrix; `state` is a verdict or "" for not promised."""

    state: str
    anchor: str


@dataclass(frozen=True)
class Row:
    """A case in the matrix."""

    case: str
    verdict: str
    anchor: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Measured:
    """How far one tensor is from its reference; `share` of the budget as 0 to 1 for a bar."""

    tensor: str
    ratio: str
    share: float
    over: bool
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class ClaimRow:
    """A claim with what was executed, under which conditions, and what that does not exclude."""

    claim: str
    verdict: str
    reasons: str
    evidence: str
    varied: str
    requested: str
    effective: str
    ranks: str
    measured: tuple[Measured, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class CaseView:
    """A case: its one line, and the claims that are behind it."""

    anchor: str
    case: str
    verdict: str
    about: str
    summary: str
    claims: tuple[ClaimRow, ...]
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    open: bool


def verdict_of(case: Json) -> str:
    """The worst of what the case and its claims state, so that no row looks better than a cell."""
    stated = [case["verdict"], *(claim["verdict"] for claim in case["claims"])]
    return min(stated, key=lambda verdict: RANK.get(verdict, 2))


def columns(cases: Sequence[Json]) -> list[str]:
    """The claims that any case promised, in their own order, unknown ones last."""
    promised = dict.fromkeys(claim["claim"] for case in cases for claim in case["claims"])
    known = [claim for claim in CLAIMS if claim in promised]
    return [*known, *(claim for claim in promised if claim not in CLAIMS)][:SHOWN_COLUMNS]


def row(case: Json, names: Sequence[str], anchor: str, links: Mapping[str, str]) -> Row:
    """`links` maps a claim to the anchor of its card, where there is one."""
    states: dict[str, str] = {}
    for claim in case["claims"]:
        known = states.setdefault(claim["claim"], claim["verdict"])
        states[claim["claim"]] = min(known, claim["verdict"], key=lambda v: RANK.get(v, 2))
    cells = [Cell(states.get(name, ""), links.get(name, "")) for name in names]
    return Row(clipped(case["case"], NAME), verdict_of(case), anchor, tuple(cells))


def case_view(case: Json, anchor: str) -> CaseView:
    """All that is known of a case apart from its findings."""
    verdict = verdict_of(case)
    claims = case["claims"]
    runs = [claim["executions"] for claim in claims]
    states = [claim["verdict"] for claim in claims]
    counts = {state: states.count(state) for state in ("MISMATCH", "UNVERIFIED", "VERIFIED")}
    said = [f"{count} {state}" for state, count in counts.items() if count]
    if runs:
        low, high = min(runs), max(runs)
        said.append(f"{low} to {high} runs each" if high > low else f"{phrases.number(low, 'run')}")
    return CaseView(
        anchor=anchor,
        case=clipped(case["case"], NAME),
        verdict=verdict,
        about=clipped(case["description"], NAME),
        summary=", ".join(said) or "no claim was checked",
        claims=tuple(_claim(case, claim) for claim in claims),
        notes=tuple(clipped(note, LINE) for note in case["notes"][:20]),
        facts=_facts(case),
        open=verdict in RANK,
    )


def _claim(case: Json, claim: Json) -> ClaimRow:
    reasons = dict.fromkeys(finding["reason"] for finding in claim["findings"])
    measured = sorted(claim["measurements"].items(), key=lambda item: -_ratio(item[1]))
    remarks = [*phrases.measured(claim), *phrases.left_out(claim)]
    if len(measured) > SHOWN_TENSORS:
        more = phrases.number(len(measured) - SHOWN_TENSORS, "tensor")
        remarks.append(f"{more} more, each nearer to its reference, in the result document")
    return ClaimRow(
        claim=clipped(claim["claim"], 40),
        verdict=claim["verdict"],
        reasons=clipped(", ".join(reasons), NAME),
        evidence=clipped(phrases.evidence(claim), LINE),
        varied=clipped(phrases.changed(claim), NAME),
        requested=conditions(claim["requested"]),
        effective=conditions(claim["effective"]),
        ranks=phrases.ranks(claim, case["ranks"]),
        measured=tuple(_measured(*item) for item in measured[:SHOWN_TENSORS]),
        remarks=tuple(clipped(line, LINE) for line in remarks),
    )


def conditions(settings: Sequence[Json]) -> str:
    """Distinct settings by name: `num_threads 2, 3; load_steps 160000 to 1569800`."""
    values: dict[str, list[Any]] = {}
    for setting in settings:
        for name, value in setting.items():
            seen = values.setdefault(name, [])
            if value not in seen:
                seen.append(value)
    said = []
    for name, seen in values.items():
        numbers = [v for v in seen if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(seen) > _SHOWN_VALUES:
            shown = f"{min(numbers)} to {max(numbers)}"
        else:
            shown = ", ".join(clipped(value, 60) for value in seen[:_SHOWN_VALUES])
            more = len(seen) - _SHOWN_VALUES
            shown += f" and {more} more" if more > 0 else ""
        said.append(f"{clipped(name, 60)} {shown}")
    return clipped("; ".join(said), LINE)


def _measured(tensor: str, values: Json) -> Measured:
    ratio = _ratio(values)
    if "worst_ratio" not in values:  # not of a kind that is known here: said as it is
        said = clipped(", ".join(f"{name} {value}" for name, value in values.items()), LINE)
        return Measured(clipped(tensor, NAME), said, 0.0, False, ("", "", "", "", ""))
    return Measured(
        clipped(tensor, NAME),
        _number(values["worst_ratio"]),
        min(max(ratio, 0.0), 1.0) if math.isfinite(ratio) else 1.0,
        not ratio <= 1.0,
        tuple(_number(values.get(name, "")) for name in _NAMED[1:]),
    )


def _ratio(values: Json) -> float:
    """Worst error / budget; what is no number counts as the worst, so that it is seen."""
    if "worst_ratio" not in values:
        return -1.0
    try:
        ratio = float(values["worst_ratio"])
    except (TypeError, ValueError):
        return math.inf
    return math.inf if math.isnan(ratio) else ratio


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clipped(value, 40)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _facts(case: Json) -> tuple[tuple[str, str], ...]:
    placement = ", ".join(f"{name}: {kind}" for name, kind in case["placement"].items())
    facts = (
        ("target", case["target"]),
        ("ranks", case["ranks"]),
        ("seed", "" if case["seed"] is None else case["seed"]),
        ("placement", placement),
        ("sources", ", ".join(map(str, case["sources"]))),
        ("time", phrases.timing(case).removeprefix("timings: ")),
        ("run again", case["reproduce"]),
    )
    return tuple((name, clipped(value, LINE)) for name, value in facts if value != "")
