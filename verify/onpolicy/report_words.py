"""The words on the page of `verify onpolicy`: causes, samples, places and single tokens.

Everything here is printable text of limited length, ready for a template that escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verify.onpolicy import report_drawing as drawing
from verify.onpolicy.analysing import Analysis
from verify.onpolicy.causes.table import CAUSES, Cause
from verify.onpolicy.misalignments import KINDS
from verify.onpolicy.report_figures import Grouping, SampleRow, Spread
from verify.onpolicy.report_strips import LEVELS, Fold, Strip, Token
from verify.onpolicy.report_text import reason
from verify.onpolicy.verdicts import Finding
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number, percent

NAME, LINE, TEXT = 60, 300, 800  # characters
LISTED = 50


def finding(one: Finding) -> tuple[str, str, str, str]:
    return (
        one.verdict.value,
        reason(one),
        clipped(one.what, LINE),
        printable(one.remedy),
    )


def cause(one: Cause) -> dict[str, Any]:
    return {
        "name": one.name,
        "kind": "MISMATCH" if one.structural and one.claimed else "UNVERIFIED",
        "chip": _chip(one),
        "share": one.share,
        "where": clipped(one.where, LINE),
        "meaning": CAUSES[one.name].meaning,
        "fitted": [(printable(name), f"{number_:.6g}") for name, number_ in one.fitted.items()],
        "for": [clipped(said, LINE) for said in one.for_[:LISTED]],
        "against": [clipped(said, LINE) for said in one.against[:LISTED]],
        "remedy": clipped(one.remedy, 2 * TEXT),
    }


def _chip(one: Cause) -> str:
    if one.name == "cannot-tell":
        return "open"
    return "claimed" if one.claimed else "not claimed"


def _spread(one: Spread) -> tuple[str, ...]:
    return (
        f"{one.tokens:,}",
        f"{one.differing:,}",
        f"{one.mean:.3g}",
        f"{one.size:.3g}",
        f"{one.p99:.3g}",
        f"{one.largest:.3g}",
    )


def sample(one: SampleRow) -> tuple[str, ...]:
    return (
        clipped(one.key, NAME),
        clipped(one.place, LINE),
        *_spread(one.spread),
        f"{one.total:.3g}",
        percent(one.share),
    )


def grouping(one: Grouping) -> dict[str, Any]:
    most = max((group.spread.size for group in one.groups), default=0.0)
    return {
        "name": one.name.replace("_", " "),
        "groups": [
            (
                clipped(group.value, NAME),
                f"{group.samples:,}",
                *_spread(group.spread),
                round(100 * group.spread.size / most) if most > 0.0 else 0,
            )
            for group in one.groups
        ],
        "more": one.more,
    }


def misalignments(found: Analysis) -> list[tuple[str, ...]]:
    return [
        (
            one.kind,
            KINDS[one.kind].meaning,
            clipped(one.key, NAME),
            clipped(one.what, LINE),
            clipped("; ".join(map(str, one.places[:2])), LINE),
        )
        for one in found.pairs.misalignments[:LISTED]
    ]


def levels() -> list[tuple[int, str]]:
    ends = [*(f"to {one:.2g}" for one in LEVELS[:-1]), "to ln 2", "beyond ln 2"]
    return list(enumerate(ends, start=1))


def strip(one: Strip, at: int) -> dict[str, Any]:
    kept = sum(isinstance(part, Token) for part in one.parts)
    said = f"{number(one.tokens, 'token')}, {one.differing:,} differ"
    if one.masked:
        said += f", {one.masked:,} masked"
    return {
        "at": at,
        "key": clipped(one.key, NAME),
        "why": "the first sample" if one.why == "first" else "among the worst",
        "said": said,
        "folded": one.tokens - kept,
        "items": list(_items(one)),
        "overview": drawing.overview(one) if one.overview else None,
        "text": "" if one.text is None else clipped(one.text, TEXT),
    }


def _items(one: Strip) -> Iterable[tuple[str, str, bool]]:
    """Class, sentence and whether it is chosen at first; a fold has no class."""
    for part in one.parts:
        if isinstance(part, Fold):
            yield "", _fold(part), False
        else:
            name = f"{_LETTERS[part.state]}{part.level or ''}{'' if part.counted else ' m'}"
            yield name, _token(part), part.position == one.worst


_LETTERS = {"equal": "e", "above": "u", "below": "d", "odd": "n", "absent": "x"}


def _fold(one: Fold) -> str:
    where = f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}"
    if not one.differing:
        return f"{where}: none differs"
    size = f", |d| to {one.largest:.2g}" if one.largest > 0.0 else ""
    return f"{where}: {one.differing:,} differ{size}"


def _token(one: Token) -> str:
    said = f"position {one.position}"
    if one.token >= 0:
        said += f", token {one.token}"
    said += f": trainer {_logprob(one.trainer, one)}, rollout {_logprob(one.rollout, one)}"
    if one.state == "equal":
        said += ", equal"
    elif one.state != "absent":
        said += f", d {one.trainer - one.rollout:.4g}"
    if one.flips > 0:
        said += f", other experts in {number(one.flips, 'layer')}"
    elif one.flips == 0:
        said += ", the same experts"
    return said if one.counted else f"{said}, masked"


def _logprob(number_: float, one: Token) -> str:
    return "none" if one.state == "absent" and number_ != number_ else f"{number_:.9g}"
