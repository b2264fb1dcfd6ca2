"""What the page of `verify onpolicy` draws, as numbers: |d| by position, by sample and by place.

Pure NumPy over the columns; nothing here knows of pixels or words. Only tokens that the mask counts
and that have two finite values are in these figures. What is cut is counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.pairing import Paired, Pairs
from verify.onpolicy.report_values import Bar, Floats, Scatter, bars, scatter
from verify.onpolicy.samples import META

Ints = NDArray[np.integer[Any]]

COLUMNS = 100  # ranges of positions, or of samples
SAMPLES = 15  # of the table
VALUES = 16  # of each of PLACES
PLACES = (
    "step",
    "rank",
    "rollout_rank",
    "batch_position",
    "trainer_version",
    "rollout_version",
    "padding",
    "finish_reason",
)
"""Names of META by which samples are grouped. `rank` is the trainer's."""
assert set(PLACES) <= set(META)


@dataclass(frozen=True)
class Spread:
    """Some tokens: their number, how many differ, and mean d, mean, median, p99 and largest |d|."""

    tokens: int
    differing: int
    mean: float
    size: float
    median: float
    p99: float
    largest: float


@dataclass(frozen=True)
class Range:
    """Positions, or places of samples, from low to high, both included."""

    low: int
    high: int
    spread: Spread


@dataclass(frozen=True)
class SampleRow:
    """index: into Pairs.samples. total: the sum of d. share: of the sum of |d| of all tokens."""

    index: int
    key: str
    place: str
    spread: Spread
    total: float
    share: float


@dataclass(frozen=True)
class Group:
    """Samples with one value of a name of META."""

    value: str
    samples: int
    spread: Spread


@dataclass(frozen=True)
class Grouping:
    """By one name of META. groups: the largest mean |d| first. more: that were cut."""

    name: str
    groups: tuple[Group, ...]
    more: int


@dataclass(frozen=True, eq=False)
class Figures:
    """All of them; empty, or None, where no token was compared.

    above, below: bars of d > 0 and of d < 0, the smallest |d| first, one as long as the other.
    """

    scatter: Scatter | None
    positions: tuple[Range, ...]
    by_sample: tuple[Range, ...]
    samples: tuple[SampleRow, ...]
    samples_more: int
    groupings: tuple[Grouping, ...]
    equal: int
    above: tuple[Bar, ...]
    below: tuple[Bar, ...]


def figures(pairs: Pairs) -> Figures:
    """The figures of all compared tokens."""
    rows = np.flatnonzero(pairs.finite)
    if not len(rows):
        return Figures(None, (), (), (), 0, (), 0, (), ())
    with np.errstate(over="ignore", invalid="ignore"):  # d of finite values can be infinite
        return _figures(pairs, rows)


def _figures(pairs: Pairs, rows: NDArray[np.int64]) -> Figures:
    d = pairs.difference[rows]
    by_size = np.argsort(np.abs(d), kind="stable")
    rows, d = rows[by_size], d[by_size]  # from here on the largest |d| is last
    sample, position = pairs.sample[rows], pairs.position[rows]
    last = int(position.max())
    width = -(-(last + 1) // COLUMNS)
    together = -(-len(pairs.samples) // COLUMNS)
    samples, more = _samples(pairs, sample, d)
    above, below = bars(d)
    return Figures(
        scatter=scatter(pairs, rows),
        positions=_ranges(position // width, d, width, last),
        by_sample=_ranges(sample // together, d, together, len(pairs.samples) - 1),
        samples=samples,
        samples_more=more,
        groupings=_groupings(pairs.samples, sample, d),
        equal=int(np.count_nonzero(d == 0.0)),
        above=above,
        below=below,
    )


def spreads(labels: Ints, d: Floats) -> dict[int, Spread]:
    """The spread of each label >= 0. d is ordered by |d|."""
    kept = labels >= 0
    labels, d = labels[kept], d[kept]
    if not len(labels):
        return {}
    small = labels.astype(np.uint16) if labels.max() < 1 << 16 else labels
    order = np.argsort(small, kind="stable")  # so that |d| stays in order within a label
    labels, d = labels[order], d[order]
    starts = np.flatnonzero(np.diff(labels, prepend=labels[0] - 1))
    stops = np.append(starts[1:], len(labels))
    size = np.abs(d)
    counts = stops - starts
    differing = np.add.reduceat(size > 0.0, starts, dtype=np.int64)
    mean, mean_size = np.add.reduceat(d, starts) / counts, np.add.reduceat(size, starts) / counts
    median = size[starts + (counts + 1) // 2 - 1]
    p99 = size[starts + (99 * counts + 99) // 100 - 1]
    return {
        int(labels[start]): Spread(
            int(counts[at]),
            int(differing[at]),
            float(mean[at]),
            float(mean_size[at]),
            float(median[at]),
            float(p99[at]),
            float(size[stops[at] - 1]),
        )
        for at, start in enumerate(starts)
    }


def _ranges(labels: Ints, d: Floats, width: int, last: int) -> tuple[Range, ...]:
    return tuple(
        Range(label * width, min(label * width + width - 1, last), spread)
        for label, spread in spreads(labels, d).items()
    )


def _samples(pairs: Pairs, sample: Ints, d: Floats) -> tuple[tuple[SampleRow, ...], int]:
    """Those with the largest sums of |d|."""
    sums = np.bincount(sample, weights=np.abs(d), minlength=len(pairs.samples))
    totals = np.bincount(sample, weights=d, minlength=len(pairs.samples))
    whole = float(sums.sum())
    worst = [int(at) for at in np.argsort(-sums, kind="stable")[:SAMPLES] if sums[at] > 0.0]
    chosen = np.isin(sample, worst)
    found = spreads(sample[chosen], d[chosen])
    rows = tuple(
        SampleRow(
            at,
            pairs.samples[at].key,
            str(pairs.samples[at].trainer.place),
            found[at],
            float(totals[at]),
            float(sums[at]) / whole,
        )
        for at in worst
    )
    return rows, int(np.count_nonzero(sums)) - len(rows)


def _groupings(samples: Sequence[Paired], sample: Ints, d: Floats) -> tuple[Grouping, ...]:
    """By each name of PLACES of which at least two values are recorded."""
    found = []
    for name in PLACES:
        known: dict[Hashable, int] = {}
        labels = np.full(len(samples), -1, np.int64)
        for at, one in enumerate(samples):
            value = one.trainer.meta.get(name, one.rollout.meta.get(name))
            if isinstance(value, str | int | float):
                labels[at] = known.setdefault(value, len(known))
        if len(known) < 2:
            continue
        counts = np.bincount(labels[labels >= 0], minlength=len(known))
        spread = spreads(labels[sample], d)
        groups = [
            Group(str(value), int(counts[label]), spread[label])
            for value, label in known.items()
            if label in spread
        ]
        groups.sort(key=lambda one: -one.spread.size)
        found.append(Grouping(name, tuple(groups[:VALUES]), max(0, len(groups) - VALUES)))
    return tuple(found)
