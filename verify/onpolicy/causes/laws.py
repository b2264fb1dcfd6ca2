"""Laws of the sign of d: which mechanism moves which tokens up, and which down.

With p and q two distributions over the same tokens and d = log q - log p of a token drawn from p,
exp(d) has mean 1 at every position, whatever the two models are: q and p both sum to 1. So a mean
of exp(d) - 1 that is not 0 is mass that one side gives to what the other cannot choose. And

- q = p^a / sum p^a (temperature): every token with p > 1/2 moves in one direction, and the unlikely
  ones in the other;
- q without what truncation or padding added to p's support: every token moves in one direction;
- p after penalties: tokens that were seen before move up, the others down.

Noise has no law. Under the null hypothesis that signs are symmetric and independent,
P(sum d > z sqrt(sum d^2)) <= exp(-z^2 / 2) for any sizes (Efron 1969), and the number of signs is
binomial; `surprise` is twice the smaller of both bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.onpolicy.causes.facts import Facts, Flags, Floats
from verify.onpolicy.causes.statistics import binomial_tail, quantile

CERTAIN = math.log(0.5)


@dataclass(frozen=True)
class Lean:
    """How far d leans to one side on some tokens.

    sum: of d. size: of |d|. purity: sum / size, -1 to 1. surprise: bound of the chance.
    """

    sum: float
    size: float
    purity: float
    surprise: float
    count: int


def lean(facts: Facts, rows: Flags) -> Lean:
    """Of d of these rows; sums over each kind of token are what may have either sign."""
    values = facts.clipped[rows]
    total, size = float(values.sum()), float(np.abs(values).sum())
    sums = _sums(facts, values, rows)
    square = float(sums @ sums)
    z = abs(total) / math.sqrt(square) if square > 0.0 else 0.0
    signs = int(np.count_nonzero(sums > 0.0)), int(np.count_nonzero(sums < 0.0))
    with_sum = max(signs[0] if total > 0.0 else signs[1], 0)
    counted = binomial_tail(with_sum, sum(signs), 0.5)
    surprise = min(1.0, 2.0 * min(math.exp(-min(700.0, z * z / 2.0)), counted))
    return Lean(total, size, total / size if size > 0.0 else 0.0, surprise, len(values))


def _sums(facts: Facts, values: Floats, rows: Flags | None = None) -> Floats:
    """Sums of values over each kind of token that occurs."""
    kind = facts.kind if rows is None else facts.kind[rows]
    counts = np.bincount(kind)
    return np.asarray(np.bincount(kind, weights=values)[counts > 0], dtype=np.float64)


@dataclass(frozen=True)
class Split:
    """A law with two kinds of tokens. support: net share of the sum of |d| that obeys it, 0 to 1.

    up, down: leans of the tokens that should rise and fall; surprise: of both together, 1.0 where
    one of them is not certain by itself.
    """

    support: float
    up: Lean
    down: Lean
    surprise: float


def split(facts: Facts, up: Flags, down: Flags) -> Split:
    """How far d is positive on `up` and negative on `down`."""
    one, two = lean(facts, up), lean(facts, down)
    size = float(np.abs(facts.clipped).sum())
    right = one.sum > 0.0 and two.sum < 0.0
    support = (one.sum - two.sum) / size if right and size > 0.0 else 0.0
    both = one.surprise * two.surprise  # Fisher's combination, of two independent kinds
    surprise = both * (1.0 - math.log(both)) if both > 0.0 else 0.0
    if max(one.surprise, two.surprise) > 0.01:
        surprise = 1.0
    return Split(support, one, two, min(1.0, surprise) if right else 1.0)


@dataclass(frozen=True)
class Mass:
    """Mean of exp(d) - 1 (gap), its share of the mean of |exp(d) - 1| (net), and z.

    kinds: z if only kinds of tokens are independent.
    """

    gap: float
    net: float
    z: float
    kinds: float


def mass(facts: Facts, sign: float = 1.0) -> Mass:
    """Mass that one side lacks: gap below 0, the rollout has a smaller support than the trainer.

    sign -1 takes the trainer's distribution for the one that was sampled.
    """
    d = sign * facts.clipped
    if len(d) == 0:
        return Mass(0.0, 0.0, 0.0, 0.0)
    moved = np.expm1(np.clip(d, -50.0, 5.0))
    size = float(np.abs(moved).mean())
    mean = float(moved.mean())
    error = float(moved.std()) / math.sqrt(len(d))
    apart = max(error, float(np.linalg.norm(_sums(facts, moved - mean))) / len(d))
    z = mean / error if error > 0.0 else 0.0
    kinds = mean / apart if apart > 0.0 else 0.0
    return Mass(mean, abs(mean) / size if size > 0.0 else 0.0, z, kinds)


def few_carry_all(facts: Facts) -> str | None:
    """Gross differences at a few tokens while the others agree to the last digits."""
    doubtful = facts.doubt > 1e-3
    size = facts.size[doubtful] / facts.doubt[doubtful]
    if len(size) < 50:
        return None
    middle = quantile(size, 0.5)
    few = size > max(100.0 * middle, 0.05)
    share = float(facts.size[doubtful][few].sum()) / facts.total
    if few.sum() >= 3 and share > 0.8 and few.mean() < 0.25:
        return (
            f"{int(few.sum())} of {len(size)} tokens carry {share:.0%} of |d|, more than 100 times "
            "the median"
        )
    return None
