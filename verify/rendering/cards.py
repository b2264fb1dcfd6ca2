"""What a card of the HTML report shows: one finding, its place, its figures, how to repeat it.

Every text is printable and of bounded length here, before a template escapes it; a card of a
hostile document is as small as any other. It refuses to judge: a verdict is what the document says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify.reasons import GATE_REASONS, REASONS
from verify.rendering import figures, phrases
from verify.rendering.escaping import clipped
from verify.rendering.grouping import Group, grouped

Json = Mapping[str, Any]
NAME = 160  # characters of a name, after which its middle is left out
LINE = 600
COMMAND = 4000
_TRACEBACK = 30  # lines, the last ones
_BITS = re.compile(r"0x[0-9a-f]{1,32}")


@dataclass(frozen=True)
class Side:
    """One value of the first difference; the hex digits that differ are marked."""

    label: str
    value: str
    digits: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class First:
    """The first element that differs."""

    place: str
    sides: tuple[Side, Side]
    ulp: str


@dataclass(frozen=True)
class Card:
    """One finding, told once for all claims and ranks that have it."""

    anchor: str
    verdict: str
    case: str
    claims: str = ""
    reason: str = ""
    meaning: str = ""
    remedy: str = ""
    places: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    first: First | None = None
    suggests: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    traceback: tuple[str, ...] = ()
    histogram: figures.Histogram | None = None
    tiles: figures.TileMap | None = None
    ranks: figures.RankGrid | None = None
    reproduce: str = ""


def of_case(case: Json, number: int) -> list[tuple[Card, list[str]]]:
    """The cards of a case, worst first, each with the names of its claims.

    `number` makes their anchors unique. A claim that is not VERIFIED and has no finding gets a card
    too, and so does a case without claims: missing evidence must be seen.
    """
    found: list[tuple[Card, list[str]]] = []
    for group in grouped(case["claims"]):
        names = list(dict.fromkeys(claim["claim"] for claim in group.claims))
        anchor = f"f{number}-{len(found)}"
        found.append((_card(case, group, names, anchor), names))
    for claim in case["claims"]:
        if claim["verdict"] != "VERIFIED" and not claim["findings"]:
            anchor = f"f{number}-{len(found)}"
            said = "no finding was recorded"
            found.append((_bare(case, claim, anchor, said), [claim["claim"]]))
    if not case["claims"]:
        found.append((_bare(case, None, f"f{number}-0", "no claim was checked"), []))
    return found


def of_gate(finding: Json, number: int) -> Card:
    """The card of something that the gate found, apart from the cases."""
    known = GATE_REASONS.get(finding["reason"])
    return Card(
        anchor=f"g{number}",
        verdict=finding["verdict"],
        case="gate",
        reason=clipped(finding["reason"], NAME),
        meaning=known.meaning if known else "",
        remedy=known.remedy if known else "",
        lines=(clipped(finding["detail"], 4 * LINE),),
    )


def count(case: Json) -> int:
    """How many cards `of_case` would make."""
    silent = [c for c in case["claims"] if c["verdict"] != "VERIFIED" and not c["findings"]]
    return len(grouped(case["claims"])) + len(silent) + (0 if case["claims"] else 1)


def _card(case: Json, group: Group, names: Sequence[str], anchor: str) -> Card:
    finding = group.finding
    known = REASONS.get(finding["reason"])
    difference = finding["difference"] or {}
    first = _first(difference, finding["tensor"])
    told = [
        line
        for line in phrases.difference_lines(finding)
        if first is None or not line.startswith("first: ")  # it has a table of its own
    ]
    command = group.claims[0]["reproduce"] if len(group.claims) == 1 else case["reproduce"]
    return Card(
        anchor=anchor,
        verdict=finding["verdict"],
        case=clipped(case["case"], NAME),
        claims=clipped(", ".join(names), NAME),
        reason=clipped(finding["reason"], NAME),
        meaning=known.meaning if known else "",
        remedy=clipped(phrases.remedy(finding, group.claims), COMMAND),
        places=tuple((name, clipped(value, NAME)) for name, value in phrases.places(finding)),
        lines=_clip([*phrases.detail(finding), *told]),
        first=first,
        suggests=_clip(phrases.suggestions(finding)[:8]),
        also=_clip(phrases.again(group)),
        traceback=_traceback(difference.get("traceback")),
        histogram=figures.histogram(difference.get("ulps")),
        tiles=figures.tile_map(difference.get("tiles"), difference.get("numel")),
        ranks=figures.rank_grid(case["ranks"], group.claims, [finding, *group.others]),
        reproduce=clipped(command, COMMAND),
    )


def _bare(case: Json, claim: Json | None, anchor: str, said: str) -> Card:
    return Card(
        anchor=anchor,
        verdict=claim["verdict"] if claim else case["verdict"],
        case=clipped(case["case"], NAME),
        claims=clipped(claim["claim"], NAME) if claim else "",
        lines=(said,),
        reproduce=clipped((claim or case)["reproduce"], COMMAND),
    )


def _first(difference: Json, tensor: Any) -> First | None:
    """From `first`, `values` and `bits` of a comparison; None unless all of them are there."""
    place, values, bits = (difference.get(name) for name in ("first", "values", "bits"))
    for pair in (values, bits):
        if not isinstance(pair, list) or len(pair) != 2:
            return None
    if not isinstance(place, list) or not isinstance(values, list) or not isinstance(bits, list):
        return None
    index = ",".join(clipped(at, 24) for at in place[:16])
    ulp = difference.get("first_ulp")
    marked = _marked(bits[0], bits[1]), _marked(bits[1], bits[0])
    base, other = (
        Side(label, "" if value is None else clipped(_repr_of(value), 80), digits)
        for label, value, digits in zip(("base", "other"), values, marked, strict=True)
    )
    name = clipped(difference.get("name") or tensor or "", NAME)
    return First(f"{name}[{index}]", (base, other), clipped(ulp, 24) if ulp is not None else "")


def _repr_of(value: Any) -> str:
    """A value of the document as a person reads it: strings without quotes."""
    return value if isinstance(value, str) else repr(value)


def _marked(mine: Any, other: Any) -> tuple[tuple[str, bool], ...]:
    """Hex digits in runs, True for those that differ from the other side's."""
    mine, other = str(mine), str(other)
    if not _BITS.fullmatch(mine) or not _BITS.fullmatch(other) or len(mine) != len(other):
        return ((clipped(mine, 80), False),)
    runs: list[tuple[str, bool]] = []
    for a, b in zip(mine, other, strict=True):
        if runs and runs[-1][1] == (a != b):
            runs[-1] = (runs[-1][0] + a, a != b)
        else:
            runs.append((a, a != b))
    return tuple(runs)


def _traceback(text: Any) -> tuple[str, ...]:
    if not isinstance(text, str) or not text:
        return ()
    return tuple(clipped(line.expandtabs(4), LINE) for line in text.splitlines()[-_TRACEBACK:])


def _clip(content: Sequence[str]) -> tuple[str, ...]:
    return tuple(clipped(line, LINE) for line in content)
