"""Tokens whose router chose other experts carry the mismatch.

Null hypothesis: whether a token was flipped says nothing of its |d| (for its entropy). Flips occur
where the router's margin is small, so margins at flips are shown beside.
"""

from __future__ import annotations

import math

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding
from verify.onpolicy.causes.statistics import ALPHA, binomial_tail, normal_tail, ranks, times
from verify.onpolicy.causes.table import cause
from verify.onpolicy.routing import RoutingCheck

CARRIED = 0.4
FEWEST = 2
NEARLY_ALL = 0.9


def detect(facts: Facts, routing: RoutingCheck | None) -> Finding | None:
    """What flipped tokens carry above the level of the others."""
    if routing is None:
        return None
    flips = routing.flips[facts.rows]
    known = flips >= 0
    flipped = flips > 0
    count, kept = int(flipped.sum()), int((known & ~flipped).sum())
    if count < FEWEST:
        return None
    size, doubt = facts.size, facts.doubt
    share = facts.share(flipped)
    level = float(size[flipped].sum() / doubt[flipped].sum())
    said = [
        f"{count} of {count + kept} tokens have other experts in some layer and carry {share:.0%} "
        "of |d|"
    ]
    said += [
        f"layer {one.layer}: {one.flipped} of {one.rows} rows flipped"
        + (
            f", router margin {one.margin_flipped:.3g} there and {one.margin_kept:.3g} elsewhere"
            if one.margin_flipped is not None and one.margin_kept is not None
            else ""
        )
        for one in routing.layers[:4]
    ]
    said += [f"{fault.where}: {fault.what}" for fault in routing.faults[:3]]
    if kept < FEWEST:
        excess, chance, ratio = share, 0.0, math.inf
    else:
        usual = float(size[known & ~flipped].sum() / doubt[known & ~flipped].sum())
        ratio = level / usual if usual > 0.0 else math.inf
        excess = share * max(0.0, 1.0 - 1.0 / ratio)
        loudness = size / doubt
        chance = 2.0 * min(
            _rank_test(loudness, flipped, known), _among_loudest(loudness, flipped, known)
        )
        said.append(
            f"their |d| for their entropy is {times(ratio)} the others' (chance {chance:.1g})"
        )
    few_kept = kept < (1.0 - NEARLY_ALL) * (count + kept)
    return Finding(
        cause(
            "routing-flips",
            weight=excess,
            claimed=excess >= CARRIED and (chance < ALPHA or few_kept),
            where=f"{count} tokens",
            fitted={"share": share, "ratio": float(min(ratio, 1e9)), "flipped": float(count)},
            for_=tuple(said),
            against=(f"tokens with equal routing carry {1.0 - share:.0%}",) if share < 0.9 else (),
        )
    )


def _among_loudest(values: np.ndarray, members: np.ndarray, known: np.ndarray) -> float:
    """Chance that so many of the largest values, as many as there are members, are members'."""
    inside = members[known]
    count = int(inside.sum())
    loudest = np.argsort(-values[known], kind="stable")[:count]
    hits = int(inside[loudest].sum())
    return binomial_tail(hits, count, count / len(inside))


def _rank_test(values: np.ndarray, members: np.ndarray, known: np.ndarray) -> float:
    """One-sided chance of the members' rank sum (Wilcoxon, normal approximation)."""
    order = ranks(values[known])
    inside = members[known]
    n, m = int(inside.sum()), int((~inside).sum())
    mean = n * (n + m + 1) / 2.0
    spread = math.sqrt(n * m * (n + m + 1) / 12.0)
    return normal_tail((float(order[inside].sum()) - mean) / spread) if spread > 0.0 else 1.0
