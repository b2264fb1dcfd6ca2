"""The report as one HTML file that works offline: no script, no font, no address, at most 5 MB.

First the verdict, then the matrix of case and claim, a card for each finding, the evidence, and
where it was run. What does not fit is counted and left to the result document, so that a page with
thousands of failures still opens; a Content-Security-Policy forbids everything but its own style.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from verify.rendering import cards, gates, goldens, phrases, rows
from verify.rendering.cards import COMMAND, LINE, NAME
from verify.rendering.escaping import clipped
from verify.rendering.pages import page_templates

Json = Mapping[str, Any]
LIMIT = 5_000_000  # bytes of the whole page
SHOWN_CARDS = 200
SHOWN_CARDS_OF_CASE = 12
FOLDED_ROWS = 40  # verified cases in the matrix, beyond which they are folded
_SHOWN_ITEMS = 200  # of any other list
# Bytes for each part; together with the frame of the page they stay below LIMIT.
_CARDS, _MATRIX, _EVIDENCE, _GATE, _RECORD = 1_700_000, 1_200_000, 1_400_000, 100_000, 150_000
_GATE_LISTS = {
    "uncovered": "Changed sources that no case covers",
    "changed": "Changed files",
    "left_out": "Cases left out when the budget was spent",
}
_MACHINE = ("torch", "python", "platform", "cpu_model", "cpu_capability", "num_threads")
_LINE_RESERVE = 350  # bytes of the one line of a case
_MEANING = {
    0: "verified",
    1: "mismatch",
    2: "usage or file error",
    3: "nothing wrong found, but something unverified",
}


@dataclass
class Part:
    """Drawn pieces of one section, and how many did not fit."""

    limit: int
    pieces: list[Markup] = field(default_factory=list)
    size: int = 0
    left_out: int = 0

    def add(self, piece: str, *, reserve: int = 0) -> bool:
        """Whether it fits, `reserve` bytes for what must still come included."""
        length = len(piece.encode("utf-8"))
        if self.size + length + reserve > self.limit:
            return False
        self.pieces.append(Markup(piece))
        self.size += length
        return True


def render(result: Json) -> str:
    """The page, at most LIMIT bytes of UTF-8, ending in a newline."""
    macros: Any = page_templates().get_template("parts.jinja").module
    cases = sorted(
        enumerate(result["cases"]), key=lambda pair: rows.RANK.get(rows.verdict_of(pair[1]), 2)
    )
    drawn, links = _cards(cases, macros.card)
    evidence, anchors = _evidence(cases, macros.case)
    names = rows.columns(result["cases"])
    bad, good = _matrix(cases, names, links, anchors, macros.row)
    page = page_templates().get_template("page.jinja")
    return page.render(
        result=_head(result),
        columns=[clipped(name, 24) for name in names],
        bad=bad,
        good=good,
        folded=len(good.pieces) > FOLDED_ROWS,
        cards=drawn,
        evidence=evidence,
        gate=_gate(result, macros),
        record=_record(result, macros),
    )


def _cards(
    cases: Sequence[tuple[int, Json]], draw: Callable[..., str]
) -> tuple[Part, dict[int, dict[str, str]]]:
    """Cards of the worst cases first; by case and claim the anchor of the card that tells it."""
    part, links = Part(_CARDS), {}
    for number, case in cases:
        if len(part.pieces) >= SHOWN_CARDS:
            part.left_out += cards.count(case)
            continue
        own: dict[str, str] = {}
        for index, (card, names) in enumerate(cards.of_case(case, number)):
            full = index >= SHOWN_CARDS_OF_CASE or len(part.pieces) >= SHOWN_CARDS
            if full or not part.add(draw(card)):
                part.left_out += 1
                continue
            for name in names:
                own.setdefault(name, card.anchor)
        links[number] = own
    return part, links


def _evidence(
    cases: Sequence[tuple[int, Json]], draw: Callable[..., str]
) -> tuple[Part, dict[int, str]]:
    """One line for every case, with its claims behind it as long as there is room for them."""
    part, anchors = Part(_EVIDENCE), {}
    for position, (number, case) in enumerate(cases):
        anchor = f"c{number}"
        view = rows.case_view(case, anchor)
        reserve = _LINE_RESERVE * (len(cases) - position - 1)
        if part.add(draw(view, True), reserve=reserve) or part.add(draw(view, False)):
            anchors[number] = anchor
        else:
            part.left_out += 1
    return part, anchors


def _matrix(
    cases: Sequence[tuple[int, Json]],
    names: Sequence[str],
    links: Mapping[int, Mapping[str, str]],
    anchors: Mapping[int, str],
    draw: Callable[..., str],
) -> tuple[Part, Part]:
    """Rows of cases that are not verified, and of those that are."""
    bad, good = Part(_MATRIX), Part(_MATRIX)
    for number, case in cases:
        row = rows.row(case, names, anchors.get(number, ""), links.get(number, {}))
        part = bad if row.verdict in rows.RANK else good
        good.limit = _MATRIX - bad.size
        if part.left_out or not part.add(draw(row)):
            part.left_out += 1
    return bad, good


def _head(result: Json) -> dict[str, Any]:
    controls = result["controls"]
    state = {"passed": f"{controls['passed']} passed", "not-run": "not run"}.get(
        controls["status"], f"failed: {', '.join(map(str, controls['failed']))}"
    )
    code = result["exit_code"]
    return {
        "verdict": result["verdict"],
        "totals": clipped(phrases.totals(result).partition(" ")[2], LINE),
        "line": clipped(phrases.totals(result), LINE),
        "counts": result["totals"],
        "command": clipped(result["command"], COMMAND),
        "facts": [
            ("exit code", f"{code}, {_MEANING.get(code, 'unknown')}"),
            ("started", clipped(result["started"], 40).replace("T", " ")),
            ("duration", _duration(result["seconds"])),
            ("controls", clipped(state, LINE)),
            ("source", phrases.commit(result["environment"]) or "not recorded"),
            ("tool", clipped(f"{result['tool']['name']} {result['tool']['version']}", NAME)),
        ],
        "machine": [
            (name.replace("_", " "), clipped(_flat(result["environment"][name]), NAME))
            for name in _MACHINE
            if result["environment"].get(name)
        ],
    }


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _gate(result: Json, macros: Any) -> dict[str, Any] | None:
    """What the gate looked at, what it found, and the goldens that changed."""
    gate = result.get("gate")
    if not gate:
        return None
    findings, lists, changes = Part(_GATE), Part(_GATE), Part(_GATE)
    for index, finding in enumerate(gate["findings"]):
        if findings.left_out or not findings.add(macros.card(cards.of_gate(finding, index))):
            findings.left_out += 1
    for name, title in _GATE_LISTS.items():
        paths = [clipped(path, NAME) for path in gate.get(name, ())[:_SHOWN_ITEMS]]
        more = len(gate.get(name, ())) - len(paths)
        if len(paths) > gates.SHOWN_NAMES:  # fewer of them stand in the sentences
            lists.add(macros.items(title, paths, more))
    for row in goldens.cells(gate["golden_changes"]):
        if changes.left_out or not changes.add(macros.cells(row)):
            changes.left_out += 1
    return {
        "config": clipped(gate["config"], NAME),
        "about": [clipped(line, 4 * LINE) for line in gates.about(result)],
        "findings": findings,
        "lists": lists,
        "changes": changes,
        "columns": goldens.COLUMNS,
        "more": goldens.more(gate["golden_changes"]),
    }


def _record(result: Json, macros: Any) -> Part:
    """Environment and options as two tables."""
    part = Part(_RECORD)
    for title, record in (("Environment", result["environment"]), ("Options", result["options"])):
        pairs = [(clipped(key, NAME), clipped(value, LINE)) for key, value in _pairs(record)]
        more = len(pairs) - _SHOWN_ITEMS
        while pairs and not part.add(macros.pairs(title, pairs[:_SHOWN_ITEMS], max(more, 0))):
            more += len(pairs) - len(pairs) // 2
            pairs = pairs[: len(pairs) // 2]
    return part


def _pairs(record: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested mappings with dotted names, everything else as text."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and prefix.count(".") < 4:
            yield from _pairs(value, f"{name}.")
        else:
            yield name, _flat(value)


def _flat(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_flat, value))
    return str(value)
