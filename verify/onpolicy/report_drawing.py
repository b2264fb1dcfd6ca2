"""Geometry of the figures of `verify onpolicy --html`: numbers become pixels and SVG path data.

Neither keys nor texts become coordinates. |d| and counts are drawn by decades, since a mismatch can
be of any size; what lies below an axis stands on its base line and is told in the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verify.onpolicy.report_figures import Figures, Range
from verify.onpolicy.report_strips import Strip
from verify.onpolicy.report_values import Bar
from verify.onpolicy.routing import LayerFlips

Tick = tuple[float, str]

WIDE = 1060  # pixels of a plot across the page, without its margins
LEFT, TOP = 58, 10
_TALL = 150
_COUNTS = 26  # pixels of the counts below
_MOST_DECADES = 8
_ONE = 8  # pixels of a bar of one token
_OVERVIEW = 22  # pixels on each side of its middle


@dataclass(frozen=True)
class Scale:
    """Decades from bottom to top on so many pixels; what is below, 0 included, is on the base."""

    bottom: int
    top: int
    pixels: int

    def height(self, value: float) -> float:
        """Pixels above the base, at least 2 for what is above 0, so that it is seen."""
        if not value > 0.0:
            return 0.0
        share = (math.log10(value) - self.bottom) / (self.top - self.bottom)
        return round(max(2.0, min(1.0, share) * self.pixels), 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Height and label of the decades."""
        step = -(-(self.top - self.bottom) // 6)
        for decade in range(self.bottom + step, self.top + 1, step):
            part = (decade - self.bottom) / (self.top - self.bottom)
            yield round(part * self.pixels, 1), _decade(decade)


@dataclass(frozen=True)
class Cell:
    """A place to point at. About it the template makes a sentence of `of`."""

    x: float
    width: float
    of: Range


@dataclass(frozen=True)
class Along:
    """Median and p99 of |d| along ranges. band: path between both; p99, median: lines. counts:
    path of the numbers of tokens, on a row of its own below."""

    width: int
    height: int
    base: int
    band: str
    p99: str
    median: str
    counts: str
    cells: tuple[Cell, ...]
    ticks: tuple[Tick, ...]
    lines: tuple[Tick, ...]


@dataclass(frozen=True)
class DrawnBars:
    """bars: x, y, width, height, class, and the bar."""

    width: int
    height: int
    base: int
    bars: tuple[tuple[float, float, float, float, str, Bar], ...]
    ticks: tuple[Tick, ...]
    lines: tuple[Tick, ...]


@dataclass(frozen=True)
class DrawnLayers:
    """bars: x, y, width, height and the layer."""

    width: int
    height: int
    base: int
    bars: tuple[tuple[float, float, float, float, LayerFlips], ...]
    ticks: tuple[Tick, ...]
    lines: tuple[Tick, ...]


def scale(values: Sequence[float], pixels: int) -> Scale:
    """A scale that the positive ones of `values` fit on, of at most eight decades."""
    real = [value for value in values if value > 0.0 and math.isfinite(value)]
    if not real:
        return Scale(-1, 0, pixels)
    top = math.ceil(math.log10(max(real)))
    bottom = min(math.floor(math.log10(min(real))), top - 1)
    return Scale(max(bottom, top - _MOST_DECADES), top, pixels)


def along(ranges: Sequence[Range]) -> Along | None:
    """Ranges side by side, each as wide as it is long."""
    if not ranges:
        return None
    first, last = ranges[0].low, ranges[-1].high
    per = WIDE / (last - first + 1)
    axis = scale([v for one in ranges for v in (one.spread.p99, one.spread.median)], _TALL)
    base = TOP + _TALL
    cells = [Cell(round(LEFT + (one.low - first) * per, 1), _long(one, per), one) for one in ranges]
    most = max(one.spread.tokens for one in ranges)
    foot = base + 8 + _COUNTS
    band, p99, median, counts = [], [], [], []
    for cell in cells:
        high = base - axis.height(cell.of.spread.p99)
        low = base - axis.height(cell.of.spread.median)
        tall = max(1.0, round(_COUNTS * cell.of.spread.tokens / most, 1))
        band.append(box(cell.x, high, cell.width, low - high))
        p99.append(f"M{cell.x:g} {high:g}h{cell.width:g}")
        median.append(f"M{cell.x:g} {low:g}h{cell.width:g}")
        counts.append(box(cell.x, foot - tall, cell.width, tall))
    return Along(
        LEFT + WIDE + 10,
        foot + 20,
        base,
        "".join(band),
        "".join(p99),
        "".join(median),
        "".join(counts),
        tuple(cells),
        tuple((round(LEFT + (at - first + 0.5) * per, 1), f"{at:,}") for at in _whole(first, last)),
        tuple((round(base - height, 1), label) for height, label in axis.ticks()),
    )


def drawn_bars(found: Figures) -> DrawnBars | None:
    """d below 0 to the left, the largest |d| outermost, equal tokens in the middle."""
    middle = Bar(0.0, 0.0, found.equal)
    bars = [*reversed(found.below), middle, *found.above]
    kinds = ["below"] * len(found.below) + ["equal"] + ["above"] * len(found.above)
    most = max(one.count for one in bars)
    if not most:
        return None
    decade = (_TALL - _ONE) / max(1.0, math.log10(most))  # pixels
    per = WIDE / max(len(bars), 9)
    left = LEFT + (WIDE - per * len(bars)) / 2
    base = TOP + _TALL
    shown, ticks = [], []
    for place, (bar, kind) in enumerate(zip(bars, kinds, strict=True)):
        tall = round(_ONE + decade * math.log10(bar.count), 1) if bar.count else 0.0
        x = round(left + place * per, 1)
        if tall:
            shown.append((x, round(base - tall, 1), round(per - 1, 1), tall, kind, bar))
        ticks += _bar_ticks(x, per, kind, bar)
    return DrawnBars(
        LEFT + WIDE + 10,
        base + 24,
        base,
        tuple(shown),
        tuple(ticks),
        tuple(
            (round(base - _ONE - decade * power, 1), _decade(power))
            for power in range(int(math.log10(most)) + 1)
        ),
    )


def drawn_layers(layers: Sequence[LayerFlips]) -> DrawnLayers | None:
    """The share of rows that chose other experts, of each layer."""
    if not layers:
        return None
    shares = [one.flipped / one.rows for one in layers]
    top = max(shares) or 1.0
    per = min(40.0, WIDE / len(layers))
    base = TOP + _TALL
    bars = []
    for place, (one, share) in enumerate(zip(layers, shares, strict=True)):
        tall = round(max(2.0 if share else 0.0, share / top * _TALL), 1)
        x = round(LEFT + place * per, 1)
        bars.append((x, round(base - tall, 1), round(per - 1.5, 1), tall, one))
    step = max(1, math.ceil(26 / per))
    ticks = tuple((round(bar[0] + per / 2, 1), str(bar[4].layer)) for bar in bars[::step])
    lines = ((float(TOP), f"{100 * top:.3g} %"), (TOP + _TALL / 2, f"{50 * top:.3g} %"))
    return DrawnLayers(
        round(LEFT + per * len(layers) + 10), base + 24, base, tuple(bars), ticks, lines
    )


def overview(strip: Strip) -> tuple[str, str, int, int]:
    """Paths of what lies above and below 0, and width and height of the picture."""
    values = [value for one in strip.overview for value in (one.above, one.below)]
    axis = scale(values, _OVERVIEW)
    per = WIDE / max(len(strip.overview), 1)
    above, below = [], []
    for place, one in enumerate(strip.overview):
        x, wide = round(place * per, 1), round(max(per - 0.5, 1.0), 1)
        up, down = axis.height(one.above), axis.height(one.below)
        if up:
            above.append(box(x, _OVERVIEW - up, wide, up))
        if down:
            below.append(box(x, _OVERVIEW, wide, down))
    return "".join(above), "".join(below), WIDE, 2 * _OVERVIEW


def _bar_ticks(x: float, per: float, kind: str, bar: Bar) -> list[Tick]:
    """A decade at its border, and 0 under what is equal."""
    if kind == "equal":
        return [(round(x + per / 2, 1), "0")]
    power = math.log10(bar.high)
    if abs(power - round(power)) > 1e-6:
        return []
    sign = "-" if kind == "below" else ""
    return [(x if kind == "below" else round(x + per, 1), sign + _decade(round(power)))]


def _whole(first: int, last: int) -> list[int]:
    """Round numbers between both, about ten."""
    rough = max(1, (last - first) // 10)
    power = 10 ** int(math.log10(rough))
    step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
    return list(range(-(-first // step) * step, last + 1, step))


def _long(one: Range, per: float) -> float:
    return round((one.high - one.low + 1) * per, 1)


def box(x: float, y: float, width: float, height: float) -> str:
    """Path data of a rectangle."""
    wide = f"{round(width, 1):g}"
    return f"M{round(x, 1):g} {round(y, 1):g}h{wide}v{round(height, 1):g}h-{wide}z"


def _decade(power: int) -> str:
    return f"{10.0**power:g}" if -4 <= power <= 4 else f"1e{power}"
