"""Tails of tests, which detectors compare with the rate of false claims that they allow themselves.

`binomial_tail` is an upper bound (Chernoff), so what is counted holds for noise of any shape.
`normal_tail` and `student_tail` are approximations for sums of ranks and for levels of samples:
with few samples whose levels have a heavy tail they are exceeded more often than they say. Each
chance is that of the null hypothesis which the detector names.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ALPHA = 1e-5
"""What a detector that counts tokens allows itself as the rate of false claims."""

MOST = 1000
"""Values that are permuted."""

Floats = NDArray[np.float64]


def binomial_tail(successes: float, trials: float, chance: float) -> float:
    """An upper bound of P(at least `successes` of `trials`), each with probability `chance`."""
    if trials <= 0 or successes <= trials * chance:
        return 1.0
    if chance <= 0.0:
        return 0.0
    share = min(1.0, successes / trials)
    divergence = share * math.log(share / chance)
    if share < 1.0:
        divergence += (1.0 - share) * math.log((1.0 - share) / (1.0 - chance))
    return math.exp(-min(700.0, trials * divergence))


def normal_tail(z: float) -> float:
    """P(Z > z) of a standard normal variable."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def student_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's distribution, by Hill's normal approximation; 1.0 without freedom.

    Source: Hill (1970), Algorithm 395. Off by less than one percent of itself from 3 degrees on.
    """
    if freedom < 1.0 or t <= 0.0:
        return 1.0
    if freedom < 3.0:  # exact for one degree, and an upper bound for two
        return 0.5 - math.atan(t) / math.pi
    a = freedom - 0.5
    b = 48.0 * a * a
    z2 = a * math.log1p(t * t / freedom)
    z = math.sqrt(z2)
    z *= 1.0 + (z2 + 3.0) / b
    z -= (
        z * (((4.0 * z2 + 33.0) * z2 + 240.0) * z2 + 855.0) / (10.0 * b * (b + 0.8 * z2 * z2 + 100))
    )
    return normal_tail(max(0.0, z))


def ranks(values: Floats) -> Floats:
    """Ranks from 1, the mean rank for equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse], dtype=np.float64)


def correlation(x: Floats, y: Floats) -> float:
    """Pearson's correlation; 0.0 where one side is constant."""
    if len(x) < 2:
        return 0.0
    a, b = x - x.mean(), y - y.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0.0 else 0.0


def permutation_tail(x: Floats, y: Floats, draws: int = 2000, seed: int = 0) -> float:
    """One-sided p-value of Spearman's correlation of x and y being positive.

    Student's approximation for the far tail beyond what `draws` permutations resolve, and for more
    than MOST values, where permutations take seconds and say the same.
    """
    a, b = ranks(x), ranks(y)
    seen = correlation(a, b)
    if len(x) < 4 or seen <= 0.0:
        return 1.0
    t = seen * math.sqrt((len(x) - 2) / max(1e-12, 1.0 - seen * seen))
    approximate = student_tail(t, len(x) - 2)
    if len(x) > MOST or (approximate < 0.01 and len(x) >= 10):
        return approximate
    generator = np.random.default_rng(seed)
    drawn = np.array([correlation(a, generator.permutation(b)) for _ in range(draws)])
    return float(np.count_nonzero(drawn >= seen - 1e-12) + 1) / (draws + 1)


def errors(z: float) -> str:
    """`4.3 standard errors`; beyond 100 how many says nothing more, of values that are constant."""
    if abs(z) > 100.0:
        return "more than 100 standard errors"
    return f"{z:.1f} standard errors"


def times(ratio: float) -> str:
    """`2.5 times`; beyond 1e9, as where the others agree exactly, how many says nothing more."""
    return "more than 1e9 times" if ratio > 1e9 else f"{ratio:.3g} times"


def quantile(values: Floats, share: float) -> float:
    """The quantile, 0.0 of nothing."""
    return float(np.quantile(values, share)) if len(values) else 0.0
