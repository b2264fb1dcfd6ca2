"""The list of figures, each with its formula, and the arithmetic of all of them over columns.

Written for training loops: a few passes over the columns, no Python loop over tokens or samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Value = float | int | None

LN2 = math.log(2.0)
_CHUNK = 16384  # values at once: what is made of them stays in the cache
_LARGEST_LOG = math.log(np.finfo(np.float64).max)
QUANTILES = {"abs_p50": (1, 2), "abs_p90": (9, 10), "abs_p99": (99, 100), "abs_p999": (999, 1000)}


@dataclass(frozen=True)
class Figure:
    """One entry. formula: in words, d = trainer - rollout.

    good: "low" where a bound from above limits the mismatch; "" where a wide one can pass any:
    signed means, in which +d and -d cancel, extremes of one sign, spreads of a constant d.
    """

    name: str
    formula: str
    good: str = ""


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        one.name: one
        for one in (
            Figure("samples", "samples aligned"),
            Figure("misaligned_samples", "ids that do not fit, in whole or in part"),
            Figure("tokens", "tokens of aligned samples"),
            Figure("masked_tokens", "tokens that the mask leaves out"),
            Figure("absent_trainer", "counted tokens without a value of the trainer"),
            Figure("absent_rollout", "counted tokens without a value of the rollout"),
            Figure("compared_tokens", "tokens counted by the mask, with a value on both sides"),
            Figure("finite_tokens", "compared tokens with two finite values: those that d is of"),
            Figure(
                "differing_tokens", "compared tokens with unequal values; two NaN are not", "low"
            ),
            Figure("differing_share", "differing_tokens / compared_tokens", "low"),
            Figure("differing_samples", "samples with a token that differs", "low"),
            Figure(
                "differing_beyond_storage",
                "differing tokens after both sides are rounded to the narrower of the dtypes that"
                " both files name; none without them",
            ),
            Figure("nan_trainer", "compared tokens where the trainer has NaN"),
            Figure("nan_rollout", "compared tokens where the rollout has NaN"),
            Figure("inf_trainer", "compared tokens where the trainer has an infinity"),
            Figure("inf_rollout", "compared tokens where the rollout has an infinity"),
            Figure("above_zero_trainer", "finite values above 0 of the trainer: no probabilities"),
            Figure("above_zero_rollout", "finite values above 0 of the rollout: no probabilities"),
            Figure("hidden_differing", "tokens that differ where the mask is 0"),
            Figure("hidden_abs_max", "max |d| where the mask is 0"),
            Figure("hidden_nonfinite", "tokens with NaN or infinity where the mask is 0"),
            Figure("mean", "mean d"),
            Figure("std", "sqrt(mean((d - mean d)^2))"),
            Figure("abs_mean", "mean |d|", "low"),
            Figure("abs_p50", "smallest |d| that at least 50 % of tokens do not exceed", "low"),
            Figure("abs_p90", "smallest |d| that at least 90 % of tokens do not exceed", "low"),
            Figure("abs_p99", "smallest |d| that at least 99 % of tokens do not exceed", "low"),
            Figure("abs_p999", "smallest |d| that at least 99.9 % of tokens do not exceed", "low"),
            Figure("abs_max", "max |d|", "low"),
            Figure(
                "share_beyond_ln2", "share of tokens with |d| > ln 2: off by a factor of 2", "low"
            ),
            Figure("k1", "mean(-d), estimates KL(rollout || trainer)"),
            Figure("k2", "mean(d^2 / 2), of either direction", "low"),
            Figure("k3", "mean(exp(d) - 1 - d), estimates KL(rollout || trainer)", "low"),
            Figure("k1_reverse", "mean(d): k1 with the sides exchanged"),
            Figure("k2_reverse", "mean(d^2 / 2): k2 with the sides exchanged", "low"),
            Figure("k3_reverse", "mean(exp(-d) - 1 + d): k3 with the sides exchanged", "low"),
            Figure("chi2_token", "mean(exp(2 d)) - 1"),
            Figure("chi2_sequence", "mean over samples of exp(2 sum d), - 1"),
            Figure("ess_token", "(sum w)^2 / (n sum w^2), w = exp(d); 1 when all are equal"),
            Figure("ess_sequence", "(sum w)^2 / (n sum w^2), w = exp(sum d) per sample"),
            Figure("ratio_min", "min exp(d)"),
            Figure("ratio_mean", "mean exp(d)"),
            Figure("ratio_max", "max exp(d)"),
            Figure("sum_mean", "mean over samples of sum d"),
            Figure("sum_min", "min over samples of sum d"),
            Figure("sum_max", "max over samples of sum d"),
            Figure("sum_abs_max", "max over samples of |sum d|", "low"),
            Figure("overflow_tokens", "tokens whose exp(2 |d|) is beyond float64"),
            Figure("overflow_sequences", "samples whose exp(2 |sum d|) is beyond float64"),
        )
    }
)


@dataclass(frozen=True, eq=False)
class Measured:
    """values: by the names of FIGURES. first, largest: rows, -1 for none. sums: float64 [samples],
    sum of d; largest_sum: a sample's index, -1 for none."""

    values: dict[str, Value]
    first: int
    largest: int
    largest_sum: int
    sums: Floats


def measure_columns(
    trainer: Floats,
    rollout: Floats,
    bounds: NDArray[np.int64],
    counted: Flags | None = None,
    present: Flags | None = None,
) -> Measured:
    """All figures of the columns float64 [N]; bounds [S + 1]: where each sample begins, and N.

    counted, present: bool [N], None for all.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _measured(trainer, rollout, bounds, counted, present)


def _measured(
    trainer: Floats,
    rollout: Floats,
    bounds: NDArray[np.int64],
    counted: Flags | None,
    present: Flags | None,
) -> Measured:
    rows = len(trainer)
    difference = trainer - rollout
    scored = _both(counted, present)
    finite: Flags | None = np.isfinite(trainer)
    finite &= np.isfinite(rollout)
    if scored is not None:
        finite &= scored
    clean = bool(finite.all())
    if clean:
        scored = finite = None
    compared = rows if scored is None else int(np.count_nonzero(scored))
    differs = difference != 0
    if not clean:
        # inf - inf is NaN, and NaN != 0: equal infinities are equal, and two NaN are not counted
        differs &= (trainer != rollout) & ~(np.isnan(trainer) & np.isnan(rollout))
        if scored is not None:
            differs &= scored
    differing = int(np.count_nonzero(differs))
    sums, any_finite = _per_sample(difference, finite, bounds)
    values: dict[str, Value] = {
        **dict.fromkeys(FIGURES),
        "misaligned_samples": 0,
        "samples": len(bounds) - 1,
        "tokens": rows,
        "compared_tokens": compared,
        "differing_tokens": differing,
        "differing_share": differing / compared if compared else None,
        "differing_samples": _samples_with(differs, bounds) if differing else 0,
        **_strange(trainer, rollout, scored, finite, counted, present),
        **_hidden(trainer, rollout, difference, counted, present),
    }
    d = difference if finite is None else difference[finite]
    size = np.abs(d)
    values["finite_tokens"] = d.size
    largest = int(np.argmax(size)) if d.size and size.any() else -1
    if largest >= 0 and finite is not None:
        largest = int(np.flatnonzero(finite)[largest])
    values |= _of_tokens(d, size)
    values |= _of_samples(sums if any_finite is None else sums[any_finite])
    heaviest = int(np.argmax(np.abs(sums))) if sums.size and values.get("sum_abs_max") else -1
    return Measured(values, int(np.argmax(differs)) if differing else -1, largest, heaviest, sums)


def _both(one: Flags | None, two: Flags | None) -> Flags | None:
    if one is None or two is None:
        return two if one is None else one
    return one & two


def _per_sample(
    difference: Floats, finite: Flags | None, bounds: NDArray[np.int64]
) -> tuple[Floats, Flags | None]:
    """Sum of d per sample, and which samples have any (None: all)."""
    lengths = np.diff(bounds)
    held = lengths > 0
    sums = np.zeros(len(lengths))
    if held.any():
        kept = difference if finite is None else np.where(finite, difference, 0.0)
        sums[held] = np.add.reduceat(kept, bounds[:-1][held])
        if finite is not None:
            some = np.zeros(len(lengths), bool)
            some[held] = np.logical_or.reduceat(finite, bounds[:-1][held])
            return sums, some
    return sums, None if held.all() else held


def _samples_with(flags: Flags, bounds: NDArray[np.int64]) -> int:
    starts = bounds[:-1][np.diff(bounds) > 0]
    return int(np.count_nonzero(np.logical_or.reduceat(flags, starts)))


def _strange(
    trainer: Floats,
    rollout: Floats,
    scored: Flags | None,
    finite: Flags | None,
    counted: Flags | None,
    present: Flags | None,
) -> dict[str, Value]:
    """Counts of what is no log-probability. NaN next to an absent value counts as absent too."""
    found: dict[str, Value] = {
        "masked_tokens": 0 if counted is None else int(np.count_nonzero(~counted))
    }
    missing = None if present is None else ~present if counted is None else counted & ~present
    for side, column in (("trainer", trainer), ("rollout", rollout)):
        found[f"absent_{side}"] = 0 if missing is None else _count(np.isnan(column), missing)
        for name, of in (("nan", np.isnan), ("inf", np.isinf)):
            where = 0 if finite is None else _count(of(column), scored)
            found[f"{name}_{side}"] = where
        above = int(np.count_nonzero(column > 0)) if len(column) else 0
        found[f"above_zero_{side}"] = _count(column > 0, finite) if above else 0
    return found


def _count(flags: Flags, among: Flags | None) -> int:
    return int(np.count_nonzero(flags if among is None else flags & among))


def _hidden(
    trainer: Floats,
    rollout: Floats,
    difference: Floats,
    counted: Flags | None,
    present: Flags | None,
) -> dict[str, Value]:
    if counted is None or counted.all():
        return {"hidden_differing": 0, "hidden_abs_max": None, "hidden_nonfinite": 0}
    hidden = ~counted if present is None else ~counted & present
    a, b, d = trainer[hidden], rollout[hidden], difference[hidden]
    both = np.isfinite(a) & np.isfinite(b)
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    return {
        "hidden_differing": int(np.count_nonzero(unequal)),
        "hidden_abs_max": float(np.max(np.abs(d[both]))) if both.any() else None,
        "hidden_nonfinite": int(np.count_nonzero(~both)),
    }


def _of_tokens(d: Floats, size: Floats) -> dict[str, Value]:
    """Figures of d [n]; size: |d|, in an order of its own afterwards."""
    n = len(d)
    if not n:
        return {"overflow_tokens": 0}
    mean, low, high = float(np.mean(d)), float(np.min(d)), float(np.max(d))
    totals = dict.fromkeys(("square", "deviation", "k3", "k3_reverse", "more", "chi2"), 0.0)
    for start in range(0, n, _CHUNK):
        part = d[start : start + _CHUNK]
        more, less = np.expm1(part), np.expm1(-part)  # near 0, exp(d) - 1 would cancel
        for name, terms in (
            ("square", part * part),
            ("deviation", (part - mean) ** 2),
            ("k3", more - part),
            ("k3_reverse", less + part),
            ("more", more),
            ("chi2", more * (more + 2.0)),
        ):
            totals[name] += float(np.sum(terms))
    means = {name: total / n for name, total in totals.items()}
    counts = {
        "share_beyond_ln2": int(np.count_nonzero(size > LN2)) / n,
        "overflow_tokens": int(np.count_nonzero(size > _LARGEST_LOG / 2)),
    }
    abs_mean, places = float(np.mean(size)), _places(n)
    size.partition(sorted(set(places.values())))  # a sort costs ten times as much
    return {
        "mean": mean,
        "std": math.sqrt(means["deviation"]),
        "abs_mean": abs_mean,
        **{name: float(size[place]) for name, place in places.items()},
        "abs_max": max(0.0, -low, high),
        **counts,
        "k1": 0.0 - mean,
        "k2": means["square"] / 2,
        "k3": means["k3"],
        "k1_reverse": mean,
        "k2_reverse": means["square"] / 2,
        "k3_reverse": means["k3_reverse"],
        "chi2_token": means["chi2"],
        "ess_token": _effective(d, high),
        "ratio_min": float(np.exp(low)),
        "ratio_mean": 1.0 + means["more"],
        "ratio_max": float(np.exp(high)),
    }


def _places(n: int) -> dict[str, int]:
    """Where each quantile stands in n sorted values: ceil(q n) - 1, in whole numbers."""
    return {name: -(-over * n // under) - 1 for name, (over, under) in QUANTILES.items()}


def _of_samples(sums: Floats) -> dict[str, Value]:
    if not sums.size:
        return {"overflow_sequences": 0}
    return {
        "chi2_sequence": float(np.mean(np.expm1(2.0 * sums))),
        "ess_sequence": _effective(sums, float(np.max(sums))),
        "sum_mean": float(np.mean(sums)),
        "sum_min": float(np.min(sums)),
        "sum_max": float(np.max(sums)),
        "sum_abs_max": float(np.max(np.abs(sums))),
        "overflow_sequences": int(np.count_nonzero(np.abs(sums) > _LARGEST_LOG / 2)),
    }


def _effective(logs: Floats, high: float) -> float:
    """(sum w)^2 / (n sum w^2), w = exp(logs - high): the scale does not matter, none overflows."""
    total = squares = 0.0
    for start in range(0, len(logs), _CHUNK):
        weights = np.exp(logs[start : start + _CHUNK] - high)
        total += float(np.sum(weights))
        squares += float(np.sum(weights * weights))
    return total * total / (len(logs) * squares)
