"""Rounded values: exact bfloat16 or float16 log-probabilities, or logits that were rounded.

A float32 number is a bfloat16 number by a chance of 2^-16 (float16: 2^-13), so a side on such a
grid rounded. Logits that were rounded before an exact softmax leave no grid in log-probabilities;
but differences of two alternatives at one place are differences of two logits, over the
temperature, and so multiples of a power of two over it: they make a line in a spectrum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding, Floats
from verify.onpolicy.causes.settings import temperatures
from verify.onpolicy.causes.statistics import ALPHA, binomial_tail
from verify.onpolicy.causes.table import cause
from verify.onpolicy.samples import ROLLOUT, TRAINER

FORMATS = (("bfloat16", 16, 8), ("float16", 13, 11))
"""Name, zero bits at the end of a float32 that holds it, bits of its mantissa."""
ON_GRID = 0.99
FEWEST = 16
FREQUENCIES = (8.0, 16.0, 32.0, 64.0, 128.0)
TEMPERATURES = np.arange(0.3, 2.0, 5e-4)
AROUND = np.linspace(0.75, 1.25, 101)
DIFFERENCES = 400
LOGITS = 16.0


@dataclass(frozen=True)
class Grid:
    """One side's grid. name: of FORMATS, or "4 decimals". compatible: share of |d| in rounding."""

    side: str
    name: str
    bits: int
    share: float
    compatible: float


def detect(facts: Facts) -> Finding | None:
    """A grid on one side, or on the logits behind one side."""
    found = [one for side in (ROLLOUT, TRAINER) if (one := grid(facts, side)) is not None]
    if found:
        return _on_grid(facts, found)
    return _spectral(facts)


def grid(facts: Facts, side: str) -> Grid | None:
    """The coarsest format that holds (nearly) all values of a side; zeros do not count."""
    values = facts.rollout if side == ROLLOUT else facts.trainer
    values = values[(np.abs(values) > 1e-4) & (np.abs(values) < 50.0)]
    if len(np.unique(values)) < FEWEST:
        return None
    narrow = values.astype(np.float32)
    exact = narrow.astype(np.float64) == values
    low = narrow.view(np.uint32)
    for name, zeros, bits in FORMATS:
        on = exact & ((low & np.uint32((1 << zeros) - 1)) == 0)
        if on.mean() >= ON_GRID and binomial_tail(int(on.sum()), len(on), 2.0**-zeros) < ALPHA:
            return Grid(side, name, bits, float(on.mean()), _compatible(facts, side, bits))
    for digits in (2, 3, 4):
        scaled = values * 10.0**digits
        near = np.abs(scaled - np.rint(scaled)) < 1e-3
        if near.mean() >= 0.999:
            step = np.full(len(facts), 0.5 * 10.0**-digits)
            held = float(np.minimum(facts.size, step).sum()) / facts.total
            return Grid(side, f"{digits} decimals", 0, float(near.mean()), held)
    return None


def _compatible(facts: Facts, side: str, bits: int) -> float:
    """The share of |d| that rounding the result alone, by half a step, can give."""
    values = np.abs(facts.rollout if side == ROLLOUT else facts.trainer)
    step = np.ldexp(1.0, np.frexp(np.maximum(values, 1e-30))[1] - bits) / 2.0
    return float(np.minimum(facts.size, step).sum()) / facts.total if facts.total else 0.0


def _on_grid(facts: Facts, found: list[Grid]) -> Finding:
    said = [
        f"{one.share:.1%} of the {one.side} values are exact {one.name} numbers"
        if one.bits
        else f"{one.share:.1%} of the {one.side} values have at most {one.name}"
        for one in found
    ]
    held = max(one.compatible for one in found)
    spread = math.sqrt(float((facts.clipped**2).mean()))
    said.append(
        f"d has mean {facts.clipped.mean():+.2g} and rms {spread:.2g}; rounding the result "
        f"explains {held:.0%} of |d|, the rest would be rounded logits"
    )
    both = len(found) == 2
    # logits up to LOGITS, rounded as well, move a token by about one step of theirs
    step = LOGITS * 2.0 ** -max(one.bits for one in found)
    wide = float(np.minimum(facts.size, step).sum()) / facts.total
    weight = held if both or not found[0].bits else max(held, wide)
    against = ("both sides are rounded, so both lie on the same grid",) if both else ()
    return Finding(
        cause(
            "low-precision-head",
            weight=weight,
            claimed=weight >= 0.1,
            where=" and ".join(f"{one.side} side" for one in found),
            fitted={"bits": float(found[0].bits), "rms": spread, "rounding": held},
            for_=tuple(said),
            against=against,
        )
    )


def _spectral(facts: Facts) -> Finding | None:
    """A line in the spectrum of differences between alternatives of one side, not of the other."""
    lines = {}
    for side in (ROLLOUT, TRAINER):
        differences = _differences(facts, side)
        if len(differences) >= FEWEST:
            lines[side] = (_line(differences, facts), len(differences))
    found = [(line, side, count) for side, (line, count) in lines.items() if line[2] < ALPHA]
    if not found or len(found) == 2:
        return None
    (strength, spacing, chance), side, count = found[0]
    spread = math.sqrt(float((facts.clipped**2).mean()))
    return Finding(
        cause(
            "low-precision-head",
            weight=min(1.0, 2.0 * spacing / float(facts.size.sum() / facts.doubt.sum())),
            claimed=True,
            where=f"{side} side",
            fitted={"spacing": spacing, "line": strength, "rms": spread},
            for_=(
                f"{count} differences between alternatives of the {side} at one place are "
                f"multiples of {spacing:.4g} (line {strength:.2f} of 1, chance {chance:.1g}): "
                "logits were rounded before the softmax",
                f"d has mean {facts.clipped.mean():+.2g} and rms {spread:.2g}",
            ),
        )
    )


def _differences(facts: Facts, side: str) -> Floats:
    """Between the two most likely alternatives of up to DIFFERENCES places."""
    found: list[float] = []
    for one in facts.pairs.samples:
        sample = one.rollout if side == ROLLOUT else one.trainer
        places = sample.top.get(side) or ()
        for place in places[:: max(1, len(places) // 25)]:
            if place is not None and len(place) > 1:
                found += _neighbours(place)
        if len(found) >= DIFFERENCES:
            break
    # contexts that occur again give the same differences, which tell nothing new
    return np.unique(np.round(found[:DIFFERENCES], 5))


def _neighbours(place: Mapping[int, float]) -> list[float]:
    values = sorted((v for v in place.values() if math.isfinite(v)), reverse=True)[:4]
    return [a - b for a, b in pairwise(values) if a - b > 1e-6]


def _line(differences: Floats, facts: Facts) -> tuple[float, float, float]:
    """Strength of the strongest line above what lies around it, its spacing, and its chance.

    Under independent phases P(strength > x) <= exp(-n x^2) for the modulus of their mean. Smooth
    distributions have a broad one at low frequencies, which the surroundings take off.
    """
    recorded = sorted({one for side in temperatures(facts) for one in side})
    known = np.array([t for t in (1.0, *recorded) if 0.1 < t < 10.0])
    best = (0.0, 1.0)
    tried = 0
    for tried_out in (known, TEMPERATURES):
        for frequency in FREQUENCIES if tried_out is known else FREQUENCIES[:3]:
            at = frequency * tried_out
            tried += len(at)
            top = float(at[int(np.argmax(_strength(at, differences)))])
            around = _strength(top * AROUND, differences)
            above = float(_strength(np.array([top]), differences)[0] - np.median(around))
            if above > best[0] + 0.05:
                best = (above, 1.0 / top)
        if len(differences) * best[0] ** 2 > 40.0:
            break
    chance = tried * 10.0 * math.exp(-min(700.0, len(differences) * best[0] ** 2))
    return best[0], best[1], min(1.0, chance)


def _strength(frequencies: Floats, differences: Floats) -> Floats:
    """float64 [f]: modulus of the mean phase, 1.0 where all are multiples of 1 / frequency."""
    phases = np.exp(2j * np.pi * np.outer(frequencies, differences))
    return np.asarray(np.abs(phases.mean(axis=1)), dtype=np.float64)
