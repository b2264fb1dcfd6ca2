"""The document of `mok bench layer` as one SVG: joules and speed of every contender on every shape.

Bars are drawn by a jinja template from numbers of the document, as in verify's reports: no library,
readable in light and dark. Energy is in picojoules per useful operation, so that shapes of any size
share an axis; where there is no energy counter only speed is drawn. Refuses to draw a protocol that
holds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from mok.bench.document import Document, check
from mok.bench.protocols import DIRECTIONS
from mok.bench.tables import joules
from mok.errors import InputError

_BAR, _GAP, _HEAD, _LABELS, _PANEL, _PAD = 13, 12, 58, 150, 230, 22
_COLOURS = 6
"""Colours in the template; a seventh contender gets the first again and keeps its own label."""


@dataclass(frozen=True)
class Bar:
    """One bar in pixels; text stands behind it, about is its tooltip."""

    x: float
    y: float
    width: float
    colour: int
    text: str
    about: str


@dataclass(frozen=True)
class Panel:
    """A column of bars with a common axis from 0 to `largest`."""

    x: float
    title: str
    largest: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Picture:
    """Everything the template draws. names: (y, shape or contender, is a shape)."""

    width: int
    height: int
    title: str
    names: tuple[tuple[float, str, bool], ...]
    panels: tuple[Panel, ...]


def svg(document: Document, protocol: str = "rotation") -> str:
    """The figure of one protocol as an SVG document.

    Raises InputError for another document, or when the protocol has no rows.
    """
    return _template().render(picture=layout(document, protocol), bar=_BAR, panel=_PANEL, pad=_PAD)


def layout(document: Document, protocol: str) -> Picture:
    """Pure geometry of the figure."""
    check(document)
    rows = [row for row in document["rows"] if row["protocol"] == protocol]
    if not rows:
        held = sorted({row["protocol"] for row in document["rows"]}) or ["nothing"]
        raise InputError(
            f"protocol {protocol!r} has no rows; allowed here: {', '.join(held)}. Choose another."
        )
    flops = {
        (shape["name"], direction): shape[f"{direction}_flops"]
        for shape in document["shapes"]
        for direction in DIRECTIONS
    }
    order = list(dict.fromkeys(_label(row) for row in rows))
    places, names, height = _places(rows)
    panels: list[Panel] = []
    for unit in ("pJ per operation", "TFLOP/s"):
        for direction in DIRECTIONS:
            values = [
                (row, value)
                for row in rows
                if row["direction"] == direction
                and (value := _value(row, unit, flops[row["shape"], direction])) is not None
            ]
            if values:
                x = _LABELS + len(panels) * (_PANEL + _PAD)
                guess = unit != "TFLOP/s" and values[0][0]["joules_kind"] == "estimate"
                title = f"{direction}, {unit}" + " (estimate)" * guess
                panels.append(_panel(title, x, values, places, order))
    width = _LABELS + len(panels) * (_PANEL + _PAD)
    device = document["machine"].get("device") or document["machine"].get("cpu", "")
    return Picture(width, height, f"{protocol}, {device}", names, tuple(panels))


def _label(row: Mapping[str, Any]) -> str:
    return str(row["contender"]) + (f" with {row['partner']}" if row["partner"] else "")


def _value(row: Mapping[str, Any], unit: str, flops: int) -> float | None:
    if unit == "TFLOP/s":
        return float(row["tflops"])
    return None if row["joules"] is None else row["joules"] / flops * 1e12


def _places(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[tuple[str, str], float], tuple[tuple[float, str, bool], ...], int]:
    """y of every (shape, contender), the names to write, and the height."""
    places: dict[tuple[str, str], float] = {}
    names: list[tuple[float, str, bool]] = []
    y = float(_HEAD)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        names.append((y, shape, True))
        y += _BAR + 3
        for label in dict.fromkeys(_label(row) for row in rows if row["shape"] == shape):
            places[shape, label] = y
            names.append((y, label, False))
            y += _BAR + 3
        y += _GAP
    return places, tuple(names), int(y)


def _panel(
    title: str,
    x: float,
    values: Sequence[tuple[Mapping[str, Any], float]],
    places: Mapping[tuple[str, str], float],
    order: Sequence[str],
) -> Panel:
    largest = max(value for _, value in values)
    bars = []
    for row, value in values:
        label = _label(row)
        about = (
            f"{row['shape']}, {label}: {row['median_ms']:.3f} ms, {row['tflops']:.4g} TFLOP/s, "
            f"{joules(row)} J; {row['comparability']}"
        )
        length = (_PANEL - 52) * value / largest
        place = places[row["shape"], label]
        colour = order.index(label) % _COLOURS
        bars.append(Bar(x, place, max(length, 0.5), colour, f"{value:.3g}", about))
    return Panel(x, title, f"{largest:.3g}", tuple(bars))


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mok.bench", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("layer.svg.jinja")
