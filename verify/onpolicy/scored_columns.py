"""The columns that the field's metrics are made of, and the ways in which they are reduced.

t: trainer, r: rollout, d = t - r, of the tokens that the mask counts and both sides have a value
for; samples without such a token are left out. Clamps, thresholds and the choice of deviation are
those of the projects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.pairing import Pairs

Floats = NDArray[np.float64]
CLAMP = 20.0  # verl's and miles' bound on a log ratio
THRESHOLD = 2.0  # the default upper bound of an importance weight in verl and TRL


@dataclass(frozen=True, eq=False)
class Scored:
    """t, r: float64 [N], N > 0. starts: int64 [S], where each sample begins in them."""

    t: Floats
    r: Floats
    starts: NDArray[np.int64]

    @cached_property
    def d(self) -> Floats:
        return self.t - self.r

    @cached_property
    def minus_d(self) -> Floats:
        return self.r - self.t

    @cached_property
    def minus_t(self) -> Floats:
        return -self.t

    @cached_property
    def minus_r(self) -> Floats:
        return -self.r

    @cached_property
    def size(self) -> Floats:
        return np.abs(self.d)

    @cached_property
    def square(self) -> Floats:
        return self.d * self.d

    @cached_property
    def ratio(self) -> Floats:
        return np.exp(self.d)

    @cached_property
    def exp_size(self) -> Floats:
        return np.exp(self.size)

    @cached_property
    def k3(self) -> Floats:
        return np.expm1(self.d) - self.d

    @cached_property
    def k3_reverse(self) -> Floats:
        return np.expm1(self.minus_d) + self.d

    @cached_property
    def probabilities_apart(self) -> Floats:
        return np.abs(np.exp(self.t) - np.exp(self.r))

    @cached_property
    def weights(self) -> Floats:
        """verl's importance weights: exp of d clamped to +-20."""
        return np.exp(np.clip(self.d, -CLAMP, CLAMP))

    @cached_property
    def bounded(self) -> Floats:
        """verl's weights clamped to 1/2 .. 2, for its deviation and sample size."""
        return np.clip(self.weights, 1 / THRESHOLD, THRESHOLD)

    @cached_property
    def truncated(self) -> Floats:
        """TRL's importance weights: exp(d), at most 2."""
        return np.minimum(self.ratio, THRESHOLD)

    @cached_property
    def miles_k3(self) -> Floats:
        d = np.clip(self.d, -CLAMP, CLAMP)
        return np.clip(np.exp(d) - 1 - d, -10.0, 10.0)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(np.append(self.starts, len(self.t)))

    def sums(self, column: Floats) -> Floats:
        """Of each sample, [S]."""
        return np.add.reduceat(column, self.starts)

    def means(self, column: Floats) -> Floats:
        """Of each sample, [S]."""
        return self.sums(column) / self.lengths


Value = Callable[[Scored], float]


def scored_columns(pairs: Pairs) -> Scored | None:
    """The columns of what was compared; None where nothing was."""
    scored = pairs.scored
    counts = np.bincount(pairs.sample[scored], minlength=len(pairs.samples))
    counts = counts[counts > 0]
    if not counts.size:
        return None
    return Scored(pairs.trainer[scored], pairs.rollout[scored], np.cumsum(counts) - counts)


def of_tokens(reduce: Callable[[Floats], float], column: str) -> Value:
    """reduce over all tokens of a column of Scored."""
    return lambda scored: float(reduce(getattr(scored, column)))


def of_samples(
    reduce: Callable[[Floats], float], column: str, change: Callable[[Floats], Floats] | None = None
) -> Value:
    """reduce over the samples' means of a column, each changed first where `change` is given."""

    def value(scored: Scored) -> float:
        means = scored.means(getattr(scored, column))
        return float(reduce(means if change is None else change(means)))

    return value


def mean(column: Floats) -> float:
    return float(np.mean(column))


def most(column: Floats) -> float:
    return float(np.max(column))


def least(column: Floats) -> float:
    return float(np.min(column))


def unbiased(column: Floats) -> float:
    """Standard deviation over n - 1, as torch's; NaN for a single value, as torch's."""
    return float(np.std(column, ddof=1)) if len(column) > 1 else float("nan")


def unbiased_or_0(column: Floats) -> float:
    return float(np.std(column, ddof=1)) if len(column) > 1 else 0.0


def share_above(bound: float) -> Callable[[Floats], float]:
    return lambda column: float(np.mean(column > bound))


def share_below(bound: float) -> Callable[[Floats], float]:
    return lambda column: float(np.mean(column < bound))


def pearson(scored: Scored) -> float:
    a, b = np.exp(scored.t), np.exp(scored.r)
    a, b = a - np.mean(a), b - np.mean(b)
    return float(np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)))


def jensen_shannon(scored: Scored) -> float:
    mixture = np.log(0.5 * np.exp(scored.t) + 0.5 * np.exp(scored.r))
    one, two = (np.exp(x - mixture) - (x - mixture) - 1 for x in (scored.t, scored.r))
    return float(np.mean(0.5 * one + 0.5 * two))


def mean_with_zeros(column: Floats) -> float:
    """The mean with NaN and infinities taken as 0, as NeMo-RL does."""
    return float(np.mean(np.nan_to_num(column, nan=0.0, posinf=0.0, neginf=0.0)))


def mean_square_less_1(column: Floats) -> float:
    return float(np.mean(column * column)) - 1


def chi2_seq(scored: Scored) -> float:
    return float(np.mean(np.exp(2 * np.clip(scored.sums(scored.d), -CLAMP, CLAMP)))) - 1


def verl_deviation(column: Floats) -> float:
    if len(column) < 2:
        return 0.0
    return float(np.sqrt(np.maximum(np.mean(column * column) - np.mean(column) ** 2, 0.0)))


def verl_sample_size(column: Floats) -> float:
    return float(1 / np.mean((column / (np.mean(column) + 1e-8)) ** 2))


def reverse_kl(scored: Scored) -> float:
    return float(np.mean(np.exp(scored.r) * scored.minus_d))


def count(scored: Scored) -> float:
    return len(scored.t)


def from_1(means: Floats) -> Floats:
    return np.abs(means - 1)
