"""A random operation while the trainer scored: it disagrees with itself as with the sampler.

Told by a second scoring of the same tokens, or by contexts that occur several times in one file
(the first tokens of responses to one prompt): the sampler gives them equal values, the trainer does
not. Kernels that add in another order disagree with themselves as well, but in the last bits, and
less than with the sampler. With independent noise of one size on both scorings, E|t - t'| is
sqrt(2) E|t - r|; `own` is the measured share of that. Contexts that occur again are a hint, never
a claim: noise that depends on the batch differs there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.facts import Facts, Finding, Floats
from verify.onpolicy.causes.table import cause
from verify.onpolicy.pairing import Pairs
from verify.onpolicy.samples import TRAINER, Dump

OWN = 0.4
"""Share of |d| that the trainer's disagreement with itself must explain."""
GROSS = 5e-3
"""Nats, root mean square: below, the order of sums explains it as well."""
FEWEST = 20
FEW = 8


def detect(facts: Facts) -> Finding | None:
    """From a second scoring where there is one, else from contexts that occur again."""
    again = facts.evidence.trainer_again
    if again is not None:
        return _twice(facts, again)
    return _repeated(facts)


def _twice(facts: Facts, again: Dump) -> Finding | None:
    second = values_of(facts.pairs, again)[facts.rows]
    known = np.isfinite(second)
    if known.sum() < FEWEST:
        return None
    own = np.minimum(np.abs(facts.trainer - second)[known], 50.0)
    size = facts.size[known]
    if float(size.sum()) <= 0.0:
        return None
    share = float(own.mean()) / (math.sqrt(2.0) * float(size.mean()))
    gross = math.sqrt(float((own**2).mean()))
    differ = int(np.count_nonzero(own))
    numbers = (
        f"trainer against trainer: {differ} of {len(own)} tokens differ, mean {own.mean():.3g}, "
        f"rms {gross:.3g}; trainer against rollout mean {size.mean():.3g}"
    )
    if differ == 0:
        return Finding(
            cause(
                "dropout",
                weight=0.0,
                claimed=False,
                against=("two scorings are equal: " + numbers,),
            )
        )
    random = share >= OWN and gross >= GROSS
    return Finding(
        cause(
            "dropout",
            weight=share if gross >= GROSS else 0.0,
            claimed=random,
            fitted={"own": share, "rms": gross},
            for_=(
                numbers,
                f"its own disagreement is {share:.0%} of what independent noise of "
                "this size would give",
            ),
            against=()
            if random
            else ("small beside the mismatch: sums in another order give as much",),
        )
    )


def values_of(pairs: Pairs, again: Dump) -> Floats:
    """float64 [N]: another dump's trainer values of the same tokens, NaN where it has none."""
    found = np.full(len(pairs.sample), np.nan)
    by_key = {one.key: one for one in again.samples}
    for one in pairs.samples:
        other = by_key.get(one.key)
        series = next(iter(other.series.values()), None) if other is not None else None
        if other is not None and TRAINER in other.series:
            series = other.series[TRAINER]
        if series is None or len(series.values) != one.stop - one.start:
            continue
        ids = other.tokens if other is not None else None
        if ids is not None and one.tokens is not None and not np.array_equal(ids, one.tokens):
            continue
        found[one.start : one.stop] = np.where(series.absent, np.nan, series.values)
    return found


@dataclass(frozen=True)
class Repeats:
    """Contexts with the same token that occur several times, where the sides differ.

    own, their: mean spread of the trainer's and the rollout's values inside such a group. level:
    mean |d|. differing: groups in which d is not always the same.
    """

    groups: int
    differing: int
    own: float
    their: float
    level: float
    gross: float


def repeated(facts: Facts) -> Repeats | None:
    """None where fewer than FEW contexts occur again with a difference between the sides."""
    loud = facts.size > 1e-6
    groups, inverse = _groups(np.where(loud, facts.context.prefixes[facts.rows], 0))
    if groups < FEW:
        return None
    inside = inverse >= 0
    trainer = _spread(facts.trainer[inside], inverse[inside], groups)
    sampler = _spread(facts.rollout[inside], inverse[inside], groups)
    moved = _spread(facts.d[inside], inverse[inside], groups)
    level = float(facts.size[inside].mean())
    return Repeats(
        groups,
        int(np.count_nonzero(moved > 0.02 * level)),
        float(trainer.mean()),
        float(sampler.mean()),
        level,
        math.sqrt(float((trainer**2).mean())),
    )


def _repeated(facts: Facts) -> Finding | None:
    """A hint, never a claim: kernels whose order of sums depends on the batch do the same."""
    seen = facts.kept["repeated"] = repeated(facts)
    if seen is None:
        return None
    share = seen.own / (seen.level * math.sqrt(2.0))
    random = share >= OWN and seen.gross >= GROSS and seen.their < 0.1 * seen.own
    return Finding(
        cause(
            "dropout",
            weight=0.5 * min(1.0, share) if random else 0.0,
            claimed=False,
            fitted={"own": share, "rms": seen.gross},
            for_=(
                f"{seen.groups} contexts occur again: the trainer's values of the same token are "
                f"{seen.own:.3g} apart on average, the sampler's {seen.their:.3g}",
            )
            if random
            else (),
            against=()
            if random
            else (
                f"{seen.groups} contexts occur again, and the trainer's values of the same token "
                f"are {seen.own:.3g} apart on average (mean |d| {seen.level:.3g})",
            ),
        )
    )


def _groups(digests: NDArray[np.uint64]) -> tuple[int, NDArray[np.int64]]:
    """How many digests occur again, and for each row the number of its group, -1 without."""
    values, inverse, counts = np.unique(digests, return_inverse=True, return_counts=True)
    again = (counts > 1) & (values != 0)
    number = np.cumsum(again) - 1
    return int(again.sum()), np.where(again, number, -1)[inverse]


def _spread(values: Floats, groups: NDArray[np.int64], count: int) -> Floats:
    """Largest minus smallest of each group."""
    high, low = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(high, groups, values)
    np.minimum.at(low, groups, values)
    return high - low
