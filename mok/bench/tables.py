"""The document of `mok bench layer` as tables: text for a terminal, markdown for a README.

Drawn from the document alone, so that committed evidence can be drawn again anywhere. Joules come
first among the numbers that decide, since the card is power-capped; an estimate carries a tilde.
Refuses to leave out a contender that was skipped, failed or may not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from mok.bench.document import Document, check

Json = Mapping[str, Any]
_HEADERS = (
    "shape",
    "contender",
    "forward ms (p10 to p90)",
    "TFLOP/s",
    "J",
    "backward ms (p10 to p90)",
    "TFLOP/s",
    "J",
    "MHz",
    "memory GiB",
    "determinism",
    "remark",
)
_NONE = "-"


def text(document: Document) -> str:
    """Everything that was measured, for a terminal. Raises InputError for another document."""
    return _draw(document, "simple", whole=True)


def markdown(document: Document, *, whole: bool = False) -> str:
    """Speed and energy by protocol for a README; `whole` adds ceilings, ratios and the machine.

    Raises InputError for a document of another kind or version.
    """
    return _draw(document, "github", whole=whole)


def _draw(document: Document, style: str, *, whole: bool) -> str:
    check(document)
    parts = []
    for protocol in ("rotation", "alone", "pair"):
        lines = _speed(document, protocol)
        if lines:
            parts.append(f"{protocol.capitalize()}: {document['protocols'][protocol]}.")
            parts.append(_table(lines, _HEADERS, style))
    if document["accuracy"]:
        parts.append("Relative L2 error against float64.")
        parts.append(_table(*_accuracy(document), style))
    if whole and document["ceilings"]:
        parts.append("Ceilings, in the same rotation as what they are among.")
        parts.append(_table(*_ceilings(document), style))
    if whole and document["ratios"]:
        ours = document["ours"]
        parts.append(f"Peer over {ours}: above 1, {ours} is better.")
        parts.append(_table(*_ratios(document), style))
    parts += _left_out(document)
    if whole:
        facts = ", ".join(f"{name}={value}" for name, value in document["machine"].items())
        parts.append(f"Machine: {facts}.")
        parts.append(
            f"Took {document['seconds']} s of {document['predicted_seconds']} s predicted; "
            f"{document['ended']}."
        )
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str], style: str) -> str:
    clean = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return tabulate(clean, headers=headers, tablefmt=style, disable_numparse=True)


def _speed(document: Document, protocol: str) -> list[list[str]]:
    found: dict[tuple[str, ...], dict[str, Json]] = {}
    for row in document["rows"]:
        if row["protocol"] == protocol:
            key = (row["shape"], row["contender"], row["partner"] or "")
            found.setdefault(key, {})[row["direction"]] = row
    lines = []
    for (shape, contender, partner), sides in found.items():
        any_side = next(iter(sides.values()))
        cells = [_shape_name(shape, any_side), contender + (f" (with {partner})" * bool(partner))]
        for direction in ("forward", "backward"):
            cells += _side(sides.get(direction))
        cells += [_clock(sides), _gibibytes(any_side["memory_bytes"]), any_side["determinism"]]
        lines.append([*cells, _remark(sides)])
    failed = [item for item in document["failures"] if protocol in item["stage"].split()]
    if protocol == "rotation":  # whatever fails before has no protocol of its own
        others = ("alone", "pair")
        failed = [f for f in document["failures"] if f["stage"].split()[0] not in others]
    blank = [_NONE] * (len(_HEADERS) - 3)
    lines += [
        [item["shape"], item["contender"], *blank, f"failed in {item['stage']}: {item['error']}"]
        for item in failed
    ]
    return lines


def _shape_name(shape: str, row: Json) -> str:
    routed = "" if row["routing"] == "gaussian" else f", {row['routing']} routing"
    return shape + routed + (f", {row['ranks']} ranks" if row["ranks"] > 1 else "")


def _side(row: Json | None) -> list[str]:
    if row is None:
        return [_NONE] * 3
    time = f"{row['median_ms']:.2f} ({row['p10_ms']:.2f} to {row['p90_ms']:.2f})"
    return [time, f"{row['tflops']:.4g}", joules(row)]


def joules(row: Json) -> str:
    """Joules per call; a tilde before an estimate, a dash where there is no counter."""
    if row["joules"] is None:
        return _NONE
    return ("~" if row["joules_kind"] == "estimate" else "") + f"{row['joules']:.3g}"


def _clock(sides: Mapping[str, Json]) -> str:
    clocks = [f"{row['clock_mhz']:.0f}" for row in sides.values() if row["clock_mhz"] is not None]
    return " / ".join(dict.fromkeys(clocks)) or _NONE


def _gibibytes(size: int | None) -> str:
    return _NONE if size is None else f"{size / 2**30:.2f}"


def _remark(sides: Mapping[str, Json]) -> str:
    said = {direction: row["comparability"] for direction, row in sides.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{direction}: {remark}" for direction, remark in said.items())


def _accuracy(document: Document) -> tuple[list[list[str]], list[str]]:
    outputs = ["out", "d_x", "d_gate_up", "d_down", "d_router"]
    lines = []
    for item in document["accuracy"]:
        part = (
            "all"
            if item["what"] == "whole"
            else f"{item['tokens']} tokens, {item['experts']} experts"
        )
        errors = ["not finite" if item[name] is None else f"{item[name]:.2e}" for name in outputs]
        lines.append([item["shape"], item["contender"], part, *errors])
    return lines, ["shape", "contender", "compared", *outputs]


def _ceilings(document: Document) -> tuple[list[list[str]], list[str]]:
    lines = [
        [
            item["shape"],
            item["name"],
            item["among"],
            f"{item['median_ms']:.3f}",
            f"{item['rate']:.4g} {item['unit']}",
            _NONE if item["clock_mhz"] is None else f"{item['clock_mhz']:.0f}",
            _NONE if item["watts"] is None else f"{item['watts']:.0f}",
        ]
        for item in document["ceilings"]
    ]
    return lines, ["shape", "ceiling", "among", "ms", "rate", "MHz", "W"]


def _ratios(document: Document) -> tuple[list[list[str]], list[str]]:
    lines = [
        [
            item["shape"],
            item["protocol"],
            item["direction"],
            item["peer"],
            f"{item['time']:.3f}",
            _NONE if item["joules"] is None else f"{item['joules']:.3f}",
            "yes" if item["counts"] else "no",
            item["why"],
        ]
        for item in document["ratios"]
    ]
    return lines, ["shape", "protocol", "direction", "peer", "time", "joules", "counts", "why"]


def _left_out(document: Document) -> list[str]:
    lines = [f"Skipped: {item['name']} ({item['reason']})." for item in document["skipped"]]
    return ["\n".join(lines)] if lines else []
