"""Samples against samples: which stand out, and by how much, with the sample as the unit.

Tokens of one sample depend on each other, samples do not, so every test here counts samples. A
token's |d| is taken for its likelihood: over the mean |d| of all tokens about as likely, since
noise of the logits shows only as far as a token is in doubt. A sample's level is the mean of the
logarithms of that (`typical`, which few loud tokens do not move) or the logarithm of the mean
(`levels`, which they do).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.onpolicy.causes.facts import Facts, Flags, Floats
from verify.onpolicy.causes.statistics import student_tail

SPREAD = 0.2
"""Standard deviation that is taken for granted, as if seen in two samples more."""
BY_SAMPLE = 2e-4
"""Rate of false claims of tests that count samples: there are few, so ALPHA is out of reach."""
BINS = 24
FLOOR = 1e-3
DOUBT = 1e-4
"""1 - probability, from which on a token is in doubt."""
OUT = 6.0
"""Spreads above the bulk from which on a sample stands out by itself."""


FEWEST = 5
"""Tokens in doubt that a sample needs for a level."""


@dataclass(frozen=True)
class Contrast:
    """ratio: of the mean |d| of members to that of others. chance: one-sided, of one comparison.

    excess: the share of the sum of |d| that members carry above what others' level would give.
    """

    ratio: float
    chance: float
    excess: float
    members: int
    others: int


def expected(facts: Facts) -> Floats:
    """float64 [n]: mean |d| of all tokens about as likely, in BINS of like counts; above 0."""
    some = facts.middle[:: max(1, len(facts) // 20_000)]
    edges = np.quantile(some, np.arange(1, BINS) / BINS) if len(some) else np.empty(0)
    bins = np.searchsorted(edges, facts.middle)
    sums = np.bincount(bins, weights=facts.size, minlength=BINS)
    counts = np.maximum(1, np.bincount(bins, minlength=BINS))
    usual = facts.total / max(1, len(facts))
    return np.asarray((sums / counts + 1e-6 * usual + 1e-300)[bins], dtype=np.float64)


def levels(facts: Facts, usual: Floats) -> Floats:
    """float64 [samples]: log of |d| for its likelihood; NaN below FEWEST tokens in doubt."""
    samples = len(facts.pairs.samples)
    size = np.bincount(facts.sample, weights=facts.size, minlength=samples)
    whole = np.bincount(facts.sample, weights=usual, minlength=samples)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.log(size / whole + FLOOR)
    found[np.bincount(facts.sample, weights=facts.doubt > DOUBT, minlength=samples) < FEWEST] = (
        np.nan
    )
    return np.asarray(found, dtype=np.float64)


def typical(facts: Facts, usual: Floats) -> Floats:
    """float64 [samples]: mean log of a token's |d| for its likelihood, over tokens in doubt."""
    samples = len(facts.pairs.samples)
    doubtful = facts.doubt > DOUBT
    if not doubtful.any():
        return np.full(samples, np.nan)
    ratio = np.log(facts.size[doubtful] / usual[doubtful] + FLOOR)
    sample = facts.sample[doubtful]
    sums = np.bincount(sample, weights=ratio, minlength=samples)
    counts = np.bincount(sample, minlength=samples)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = sums / counts
    found[counts < FEWEST] = np.nan
    return np.asarray(found, dtype=np.float64)


Levels = tuple[Floats, Floats]


def both_levels(facts: Facts) -> Levels:
    """`levels` and `typical`, computed once for many contrasts."""
    if "levels" not in facts.kept:
        usual = expected(facts)
        facts.kept["levels"] = levels(facts, usual), typical(facts, usual)
    found: Levels = facts.kept["levels"]
    return found


def contrast(facts: Facts, members: Flags, both: Levels | None = None) -> Contrast:
    """Members against the other samples by Student's test; twice the chance of the better level."""
    tests = [_student(level, members) for level in (both or both_levels(facts))]
    chance, inside, outside = min(tests)
    if inside == 0 or outside == 0:
        return Contrast(1.0, 1.0, 0.0, inside, outside)
    # sums of samples, since hundreds of places are tried
    count, rest = int(facts.counts[members].sum()), int(facts.counts[~members].sum())
    usual = float(facts.sums[~members].sum()) / rest if rest else 0.0
    mean = float(facts.sums[members].sum()) / count if count else 0.0
    excess = max(0.0, mean - usual) * count / facts.total if facts.total > 0.0 else 0.0
    return Contrast(
        ratio=mean / usual if usual > 0.0 else math.inf,
        chance=min(1.0, 2.0 * chance),
        excess=excess,
        members=inside,
        others=outside,
    )


def _student(level: Floats, members: Flags) -> tuple[float, int, int]:
    known = np.isfinite(level)
    inside, outside = level[known & members], level[known & ~members]
    if len(inside) == 0 or len(outside) == 0:
        return 1.0, len(inside), len(outside)
    freedom = len(inside) + len(outside) - 2
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    spread = math.sqrt((squares + 2.0 * SPREAD**2) / (freedom + 2.0))
    error = spread * math.sqrt(1.0 / len(inside) + 1.0 / len(outside))
    t = (float(inside.mean()) - float(outside.mean())) / error
    return student_tail(t, freedom + 2.0), len(inside), len(outside)


def outstanding(facts: Facts, both: Levels | None = None) -> Flags:
    """bool [samples]: samples far above the bulk by both levels."""
    one, two = (_above(level) for level in (both or both_levels(facts)))
    return one & two


def _above(level: Floats) -> Flags:
    """bool [samples]: samples far above the bulk, which is the closest half of them.

    The spread of the bulk is that of the shortest interval with half of the samples, so up to half
    may stand out. Fewer than five samples have no bulk.
    """
    known = np.isfinite(level)
    ordered = np.sort(level[known])
    count = len(ordered)
    found = np.zeros(len(level), dtype=bool)
    if count < 5:
        return found
    half = count // 2 + 1
    widths = ordered[half - 1 :] - ordered[: count - half + 1]
    at = int(np.argmin(widths))
    centre = float(np.median(ordered[at : at + half]))
    spread = max(SPREAD / 2.0, float(widths[at]) / 1.349)
    found[known] = level[known] > centre + OUT * spread
    return found
