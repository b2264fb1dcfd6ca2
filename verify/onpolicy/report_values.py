"""What the page of `verify onpolicy` draws, as numbers: both values of a token, and the size of d.

Pure NumPy; what is folded is counted. A picture has room for so many squares and bars, however many
tokens there are; the tokens that differ most are kept one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.pairing import Pairs

Floats = NDArray[np.float64]

POINTS = 1000  # tokens that are drawn one by one; more are counted in squares
OUTLIERS = 120  # tokens that are drawn one by one in any case
SQUARES = 88  # on each side
NEAR = 0.1  # log-probabilities up to here are spread evenly, and those beyond by decades
FARTHEST = 1e300  # what is beyond is drawn there
PER_DECADE = 4  # bars of the histogram
SMALLEST, LARGEST = -9, 6  # decades of |d| that have bars of their own


@dataclass(frozen=True)
class Point:
    """One token of the scatter. sample: its key."""

    trainer: float
    rollout: float
    sample: str
    position: int
    token: int


@dataclass(frozen=True, eq=False)
class Scatter:
    """low, high: log-probabilities that all values lie between. counts: int [SQUARES, SQUARES],
    tokens by (trainer, rollout) in equal steps of `squeezed`, or None where all are points."""

    low: float
    high: float
    counts: NDArray[np.int64] | None
    points: tuple[Point, ...]
    tokens: int


@dataclass(frozen=True)
class Bar:
    """Tokens with low < |d| <= high on one side; low = high = 0 for those that are equal."""

    low: float
    high: float
    count: int


def squeezed(values: Any) -> Floats:
    """Log-probabilities on the axes of the scatter: nearly linear up to NEAR, then by decades."""
    given = np.asarray(values, np.float64)
    size = np.minimum(np.abs(given), FARTHEST)
    return np.asarray(np.sign(given) * np.log10(1.0 + size / NEAR), np.float64)


def scatter(pairs: Pairs, rows: NDArray[np.int64]) -> Scatter:
    """rows: of tokens with two finite values, ordered by |d|; at least one."""
    trainer, rollout = pairs.trainer[rows], pairs.rollout[rows]
    low = min(float(trainer.min()), float(rollout.min()))
    high = max(float(trainer.max()), float(rollout.max()), 0.0)
    counts = None
    if len(rows) > POINTS:
        edges = np.linspace(float(squeezed(low)), float(squeezed(high)), SQUARES + 1)
        edges[-1] = np.inf  # rounding must leave no token outside
        edges[0] = -np.inf
        at = [np.searchsorted(edges, squeezed(one), side="right") - 1 for one in (trainer, rollout)]
        flat = np.bincount(at[0] * SQUARES + at[1], minlength=SQUARES * SQUARES)
        counts = flat.reshape(SQUARES, SQUARES).astype(np.int64)
        rows = rows[-OUTLIERS:]
        rows = rows[pairs.difference[rows] != 0.0]
    points = tuple(
        Point(
            float(pairs.trainer[row]),
            float(pairs.rollout[row]),
            pairs.samples[int(pairs.sample[row])].key,
            int(pairs.position[row]),
            int(pairs.token[row]),
        )
        for row in rows
    )
    return Scatter(low, high, counts, points, len(trainer))


def bars(d: Floats) -> tuple[tuple[Bar, ...], tuple[Bar, ...]]:
    """Those of d > 0 and those of d < 0, the smallest |d| first, one as long as the other.

    d: ordered by |d|. The first bar takes what is below its range, the last what is above.
    """
    size = np.abs(d[d != 0.0])
    if not len(size):
        return (), ()
    bottom = int(np.clip(np.floor(np.log10(size[0])), SMALLEST, LARGEST - 1))
    top = int(np.clip(np.ceil(np.log10(size[-1])), bottom + 1, LARGEST))
    steps = (top - bottom) * PER_DECADE
    edges = 10.0 ** (bottom + np.arange(steps + 1) / PER_DECADE)
    edges[0], edges[-1] = 0.0, max(edges[-1], float(size[-1]))
    found = []
    for side in (d[d > 0.0], -d[d < 0.0]):
        counts = np.bincount(np.searchsorted(edges, side, side="left") - 1, minlength=steps)
        found.append(
            tuple(
                Bar(float(edges[at]), float(edges[at + 1]), int(counts[at])) for at in range(steps)
            )
        )
    return found[0], found[1]
