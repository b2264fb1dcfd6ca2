"""One list displaced against the other: d vanishes when the lists are moved by a few tokens.

Null hypothesis: moving the lists makes a token's |d| smaller as often as larger. Tokens are
counted, so it holds for any distribution; and the sum of |d| has to fall to SMALLER of itself,
which chance does not do to noise: noise grows when values are compared with their neighbours.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding, Flags, Floats, names
from verify.onpolicy.causes.statistics import ALPHA, binomial_tail
from verify.onpolicy.causes.table import cause

LAGS = (1, -1, 2, -2, 3, -3)
SMALLER = 0.4
APART = 0.3
"""Of the mean deviation of a list from its mean: what |d| of unrelated lists exceeds."""
LEAST = 2e-3
"""Of the sum of |d|: less is a loop that fits every lag."""
FEWEST = 5
"""Tokens that a sample needs: fewer fit by chance."""


def detect(facts: Facts) -> Finding | None:
    """The lag at which most samples fit; lag +1 compares trainer[i] with rollout[i + 1]."""
    best: tuple[float, int, Flags, Floats] | None = None
    for lag in LAGS:
        moved, valid = displaced(facts, lag)
        fits = _samples(facts, moved, valid)
        if not fits.any():
            continue
        rows = valid & fits[facts.sample]
        gain = float(facts.size[rows].sum() - moved[rows].sum())
        if best is None or gain > best[0]:
            best = (gain, lag, fits, moved)
    if best is None:
        return None
    _, lag, fits, moved = best
    valid = np.isfinite(moved)
    rows = fits[facts.sample]
    inner = rows & valid
    wins = int(np.count_nonzero(moved[inner] < facts.size[inner]))
    ties = int(np.count_nonzero(moved[inner] == facts.size[inner]))
    count = int(inner.sum()) - ties
    tried = len(LAGS) * max(1, int(np.count_nonzero(facts.counts)))
    chance = tried * min(binomial_tail(wins, count, 0.5), _equal(facts, inner, moved))
    before, after = float(facts.size[inner].mean()), float(moved[inner].mean())
    shifted = np.flatnonzero(fits)
    everywhere = len(shifted) == int(np.count_nonzero(facts.counts >= FEWEST))
    return Finding(
        cause(
            "shift",
            weight=facts.share(rows),
            claimed=chance < ALPHA and facts.share(rows) >= LEAST,
            chance=min(1.0, chance),
            where="" if everywhere else names(facts, shifted),
            fitted={"lag": float(lag), "before": before, "after": after},
            for_=(
                f"comparing trainer[i] with rollout[i{lag:+d}] takes mean |d| from {before:.3g} to "
                f"{after:.3g} over {int(inner.sum())} tokens of {len(shifted)} samples",
                f"{wins} of {count} tokens come nearer (chance {min(1.0, chance):.1g}, all lags "
                "and samples included)",
            ),
            against=()
            if everywhere
            else (f"{int(np.count_nonzero(facts.counts)) - len(shifted)} samples do not move",),
        ),
        rows,
    )


def _equal(facts: Facts, inner: Flags, moved: Floats) -> float:
    """Chance that so many tokens agree exactly once moved, for values that repeat as these do."""
    exact = int(np.count_nonzero((moved[inner] == 0.0) & (facts.size[inner] > 0.0)))
    _, counts = np.unique(facts.rollout[inner], return_counts=True)
    repeat = float(((counts / counts.sum()) ** 2).sum())
    if exact < FEWEST or len(counts) < FEWEST:
        return 1.0
    return binomial_tail(exact, int(inner.sum()), min(0.5, 2.0 * repeat))


def displaced(facts: Facts, lag: int) -> tuple[Floats, Flags]:
    """|trainer[i] - rollout[i + lag]| at each row, NaN (and False) without such a neighbour.

    A neighbour counts whether the mask does or not, as long as both sides have a value there.
    """
    pairs = facts.pairs
    at = facts.rows + lag
    inside = (at >= 0) & (at < len(pairs.sample))
    at = np.where(inside, at, 0)
    valid = inside & (pairs.sample[at] == facts.sample) & pairs.present[at]
    moved = np.abs(facts.trainer - pairs.rollout[at])
    valid &= np.isfinite(moved)
    moved[~valid] = np.nan
    return moved, valid


def _samples(facts: Facts, moved: Floats, valid: Flags) -> Flags:
    """bool [samples]: which have tokens enough, and lose most of their |d| when moved."""
    samples = len(facts.pairs.samples)
    sample = facts.sample[valid]
    after = np.bincount(sample, weights=moved[valid], minlength=samples)
    before = np.bincount(sample, weights=facts.size[valid], minlength=samples)
    count = np.bincount(sample, minlength=samples)
    # lists that are displaced are as far apart as unrelated ones: noise in a loop is not
    centre = np.bincount(sample, weights=facts.rollout[valid], minlength=samples) / np.maximum(
        count, 1
    )
    away = np.abs(facts.rollout[valid] - centre[sample])
    apart = np.bincount(sample, weights=away, minlength=samples)
    nearer = np.bincount(sample, weights=moved[valid] < facts.size[valid], minlength=samples)
    return np.asarray(
        (count >= FEWEST - 1)
        & (after < SMALLER * before)
        & (before > APART * apart)
        & (nearer > 0.6 * count),
        dtype=np.bool_,
    )
