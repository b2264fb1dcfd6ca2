"""Penalties in the sampler alone: tokens seen before rise in d, all others fall.

The sampler lowers the logits of tokens in the context, so what it took from them it gives to the
rest: d > 0 for seen tokens (by up to the penalty), d <= 0 for the others. Likelihood is no part of
it, which tells it from a temperature. Null hypothesis: signs of d are symmetric on both kinds.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding, Flags
from verify.onpolicy.causes.laws import Split, split
from verify.onpolicy.causes.settings import PENALISING, disagreeing, in_force, told
from verify.onpolicy.causes.statistics import ALPHA, quantile
from verify.onpolicy.causes.table import cause

PURE = 0.25
FEWEST = 5


def detect(facts: Facts) -> Finding | None:
    """Seen in prompt and response (repetition), or in the response (presence, frequency)."""
    found = best_split(facts)
    if found is None:
        return None
    law, where, seen = found
    chance = min(1.0, 2 * law.surprise)
    pure = law.up.purity >= PURE and law.down.purity <= -PURE
    again = _grows(facts, seen)
    said = [
        f"d is {facts.d[seen].mean():+.3g} on {law.up.count} tokens already in the {where} and "
        f"{facts.d[~seen].mean():+.3g} on {law.down.count} others; |d| leans {law.up.purity:+.0%} "
        f"and {law.down.purity:+.0%} (chance {chance:.1g})"
    ]
    if again is not None:
        said.append(
            f"tokens seen once rise by {again[0]:.3g}, tokens seen more often by {again[1]:.3g}"
        )
    recorded = in_force(facts, PENALISING)
    said += [f"said to be in force: {', '.join(recorded)}"] if recorded else []
    said += disagreeing(facts, PENALISING)
    against = [
        f"{name} is said to be {value:g} (an engine may take it from generation_config.json)"
        for name in PENALISING
        for value in told(facts, name)
        if not recorded
    ]
    return Finding(
        cause(
            "penalties",
            weight=law.support,
            claimed=chance < ALPHA and pure and law.support >= 0.15,
            chance=chance,
            fitted={"largest": quantile(facts.d[seen], 0.99)},
            for_=tuple(said),
            against=tuple(against),
        )
    )


def best_split(facts: Facts) -> tuple[Split, str, Flags] | None:
    """The law, which context it counts, and the rows that were seen there."""
    best: tuple[Split, str, Flags] | None = None
    for where, counts in zip(("prompt and response", "response"), facts.context.seen, strict=True):
        mine = counts[facts.rows]
        if (mine < 0).any():
            return None  # ids are unknown
        seen = mine > 0
        if seen.sum() < FEWEST or (~seen).sum() < FEWEST:
            continue
        law = split(facts, seen, ~seen)
        if law.support > 0.0 and (best is None or law.support > best[0].support):
            best = (law, where, seen)
    return best


def _grows(facts: Facts, seen: Flags) -> tuple[float, float] | None:
    """Medians of d of tokens seen once, and of those seen more often, in the response."""
    counts = facts.context.seen[1][facts.rows]
    once, often = facts.d[seen & (counts == 1)], facts.d[seen & (counts > 1)]
    if len(once) < FEWEST or len(often) < FEWEST:
        return None
    return float(np.median(once)), float(np.median(often))
