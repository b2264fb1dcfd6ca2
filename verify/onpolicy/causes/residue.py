"""What is left: unbiased noise that may be numeric drift, and mismatches that fit no mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verify.onpolicy.causes.dropout import repeated
from verify.onpolicy.causes.facts import CAP, Facts, names
from verify.onpolicy.causes.groups import outstanding
from verify.onpolicy.causes.laws import few_carry_all, mass
from verify.onpolicy.causes.statistics import errors, quantile
from verify.onpolicy.causes.table import Cause, cause
from verify.onpolicy.samples import ROLLOUT, TRAINER

SMALL = 2.0**-6
"""Median |d| for its entropy: what rounding logits up to 16 to bfloat16 gives (half of 2^-5)."""
ROUNDED = 2.0**-20
"""|d| that rounding logits up to 16 to float32 gives any token, one that is certain too."""
WIDEST = 0.2
"""99 percent of |d| that such a model stays below."""
GROSS = 1.0
_ALIKE = "other weights or a random operation of this size"
TELLING = 8
"""Different values that another logarithm needs: one loud token is a multiple of any other."""


def detect(facts: Facts, suspected: Sequence[str] = ()) -> list[Cause]:
    """numeric-drift if the noise is unbiased and small, else cannot-tell, and drift behind it.

    cannot-tell is a claim where the noise is gross or uneven: then it is no drift, whatever it is.
    suspected: names of causes that may carry most of |d| but lack evidence for a claim.
    """
    if not len(facts) or facts.total <= 0.0:
        return []
    base = other_logarithm(facts)
    if base is not None:
        return [base]
    away = outstanding(facts)
    beyond = np.where(facts.rounded, 0.0, np.maximum(0.0, facts.size - ROUNDED))
    size = float(beyond.sum() / facts.doubt.sum())
    middle = float(np.median(beyond / np.maximum(facts.doubt, 1e-6)))
    wide = quantile(facts.size, 0.99)
    gap = mass(facts)
    signed = mass(facts.without(facts.rounded))
    biased = abs(signed.z) > 4.0 and signed.net > 0.2
    uneven = few_carry_all(facts)
    again = facts.kept.get("repeated") if "repeated" in facts.kept else repeated(facts)
    fixed = again is not None and again.differing == 0
    said = (
        f"{again.groups} contexts occur again: d is "
        + ("the same each time, so it is no noise" if fixed else f"another in {again.differing}")
        if again is not None
        else "no context occurs again, so noise and a fixed difference look alike"
    )
    numbers = (
        f"|d| for its entropy: median {middle:.3g}, mean {size:.3g}; 99 % of |d| below {wide:.3g}",
        f"mean of exp(d) - 1 is {gap.gap:+.2g} ({errors(gap.z)})",
        said,
    )
    small = middle <= SMALL and wide <= WIDEST and not biased and not fixed
    strange = []
    if away.any():
        stand = "stands" if away.sum() == 1 else "stand"
        strange.append(f"{names(facts, np.flatnonzero(away))} {stand} out, by nothing recorded")
    if size > GROSS:
        strange.append("far more than another order of sums gives")
    if biased:
        strange.append("the noise is biased, and no law of temperature, support or penalty fits")
    if uneven is not None:
        strange.append(uneven)
    if small and not strange and not suspected:
        return [
            cause(
                "numeric-drift",
                weight=1.0,
                claimed=True,
                fitted={"median": middle, "p99": wide},
                for_=numbers,
                against=(f"{_ALIKE} look the same",),
            )
        ]
    drift = cause(
        "numeric-drift",
        weight=0.0,  # its share is what cannot be told
        claimed=False,
        fitted={"median": middle, "p99": wide},
        against=(
            *(strange or _alternatives(small)),
            *(f"{name} may carry most of it" for name in suspected),
        ),
    )
    unknown = cause(
        "cannot-tell",
        weight=1.0,
        claimed=bool(strange),
        for_=(*strange, *numbers),
        remedy=_record(facts),
    )
    return [unknown, drift]


def other_logarithm(facts: Facts) -> Cause | None:
    """One side is a constant multiple of the other, such as logarithms to another base."""
    t, r = facts.trainer, facts.rollout
    telling = (r < -1e-3) & (r > -CAP)  # what is nearly certain is a multiple of anything
    if len(np.unique(r[telling])) < TELLING:
        return None
    ratio = float(np.median(t[telling] / r[telling]))
    left = np.minimum(np.abs(t / CAP - ratio * (r / CAP)), 1.0) * CAP
    if abs(ratio - 1.0) < 0.02 or float(left.mean()) > 0.1 * float(facts.size.mean()):
        return None
    shown = {math.log(2): "bits", math.log(10): "decimal logarithms"}
    unit = next(
        (
            name
            for base, name in shown.items()
            if any(abs(ratio * factor - 1.0) < 0.02 for factor in (base, 1.0 / base))
        ),
        "",
    )
    return cause(
        "cannot-tell",
        weight=1.0,
        claimed=True,
        fitted={"ratio": ratio},
        for_=(
            f"the trainer's values are {ratio:.5g} times the rollout's at every token (mean "
            f"deviation {float(left.mean()):.2g})" + (f": one side is in {unit}" if unit else ""),
        ),
        remedy="write natural logarithms on both sides",
    )


def _alternatives(small: bool) -> tuple[str, ...]:
    said = f"{_ALIKE} look the same"
    return (said if small else f"larger than low precision gives; {said}",)


def _record(facts: Facts) -> str:
    """What is missing of what would tell causes apart."""
    missing = []
    if all(one is None for one in facts.meta("rollout_version")):
        missing.append("the version of the weights on both sides")
    if all(one is None for one in facts.meta("step")):
        missing.append("the step")
    if all(one is None for one in facts.meta("rank")):
        missing.append("the ranks")
    if facts.evidence.trainer_again is None:
        missing.append("a second scoring by the trainer")
    samples = facts.pairs.samples
    if not any(one.trainer.routing.get(TRAINER) for one in samples):
        missing.append("the experts that both sides chose")
    if not any(one.rollout.top.get(ROLLOUT) for one in samples):
        missing.append("the alternatives with their log-probabilities")
    listed = "; ".join(missing) or "the logits of some tokens on both sides"
    record = f"record {listed}: verify.onpolicy.recorder is ten lines for the engine"
    evidence = facts.evidence
    options = [
        option
        for option, given in (
            ("--version V=FILE (the same tokens scored by other versions of the weights)",
             evidence.steps),
            ("--trainer-again FILE (scored a second time)", evidence.trainer_again),
            ("--weights FILE (what `verify weights --format json` printed of both sides)",
             evidence.weights),
        )
        if given is None
    ]  # fmt: skip
    return f"give {', '.join(options)}; {record}" if options else record
