"""Geometry of the scatter of both log-probabilities: squares by their counts, and single tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.onpolicy.report_drawing import LEFT, TOP, Tick, box
from verify.onpolicy.report_values import SQUARES, Point, Scatter, squeezed

SIDE = 396  # pixels
SHADES = 5  # of squares, by the size of their counts
_BOTTOM = 44
_ROOMY = 3.0  # decades


@dataclass(frozen=True)
class DrawnScatter:
    """shades: path data by class of count, the fewest first. shade_counts: least count of each."""

    width: int
    height: int
    side: int
    shades: tuple[str, ...]
    shade_counts: tuple[int, ...]
    diagonal: str
    points: tuple[tuple[float, float, Point], ...]
    ticks: tuple[Tick, ...]
    lines: tuple[Tick, ...]


def drawn_scatter(found: Scatter) -> DrawnScatter:
    """The rollout's values from left to right, the trainer's from bottom to top."""
    low, high = float(squeezed(found.low)), float(squeezed(found.high))
    wide = max(high - low, 1e-9)

    def at(value: float) -> float:
        return round((float(squeezed(value)) - low) / wide * SIDE, 1)

    shades, least = _shades(found)
    ticks = [
        (place, label)
        for value, label in _axis_values(found.low, found.high)
        if 0.0 <= (place := at(value)) <= SIDE
    ]
    return DrawnScatter(
        LEFT + SIDE + 14,
        TOP + SIDE + _BOTTOM,
        SIDE,
        shades,
        least,
        f"M{LEFT} {TOP + SIDE}L{LEFT + SIDE} {TOP}",
        tuple(
            (LEFT + at(one.rollout), round(TOP + SIDE - at(one.trainer), 1), one)
            for one in found.points
        ),
        tuple((round(LEFT + place, 1), label) for place, label in ticks),
        tuple((round(TOP + SIDE - place, 1), label) for place, label in ticks),
    )


def _shades(found: Scatter) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if found.counts is None:
        return (), ()
    most = int(found.counts.max())
    step = max(1.0, most) ** (1.0 / SHADES)
    least = tuple(sorted({max(1, math.ceil(step**shade)) for shade in range(SHADES)}))
    shade_of = np.searchsorted(np.array(least), found.counts, side="right") - 1
    per = SIDE / SQUARES
    paths: list[list[str]] = [[] for _ in least]
    for row in range(SQUARES):  # of the trainer, from the bottom
        y = TOP + SIDE - (row + 1) * per
        shades = shade_of[row]
        starts = np.flatnonzero(np.diff(shades, prepend=-2))
        for start, stop in zip(starts, [*starts[1:], SQUARES], strict=True):
            if shades[start] >= 0:
                paths[shades[start]].append(box(LEFT + start * per, y, (stop - start) * per, per))
    return tuple("".join(path) for path in paths), least


def _axis_values(low: float, high: float) -> list[tuple[float, str]]:
    """0 and decades of both signs, and halves of them where there is room."""
    steps = [10.0**power for power in range(-1, 12)]
    if squeezed(high) - squeezed(low) < _ROOMY:
        steps += [one / 2 for one in steps if one > 0.1]
    values = [-one for one in steps] + [0.0] + steps
    return [(value, f"{value:g}") for value in values if low <= value <= high]
