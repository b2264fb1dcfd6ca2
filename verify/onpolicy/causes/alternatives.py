"""The first entry of a list of alternatives, taken for the value of the sampled token.

Alternatives are sorted by likelihood, so the first is the most likely token, sampled or not. Then
the value of every position is the largest of its list, also where the sampled token is another.
Null hypothesis: tokens are drawn from the sampler's own values, so a token that is not the most
likely one has a value below the largest.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding, names
from verify.onpolicy.causes.table import cause
from verify.onpolicy.samples import ROLLOUT

FEWEST = 20
ALWAYS = 0.99
LEAST = 3
CLOSE = 1e-6
MOST = 20_000


def detect(facts: Facts) -> Finding | None:
    """Positions whose rollout value is the largest alternative's although it is another token."""
    first, other, looked = _compare(facts)
    if looked < FEWEST or first.sum() < ALWAYS * looked or other.sum() < LEAST:
        return None
    concerned = np.unique(facts.sample[other])
    rows = first & (facts.size > 0.0)
    return Finding(
        cause(
            "other-tokens",
            weight=facts.share(rows),
            claimed=True,
            where=names(facts, concerned),
            fitted={"positions": float(looked), "others": float(other.sum())},
            for_=(
                f"the rollout's value is the largest of its alternatives at {int(first.sum())} of "
                f"{looked} positions, but at {int(other.sum())} of them the sampled token is not "
                "that alternative: the top-1 value was read in place of the sampled token's",
            ),
            remedy="read the alternative whose id is the sampled token's, never the first one",
        ),
        rows,
    )


def _compare(facts: Facts) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows whose value is the largest, those of them whose token is another, positions seen."""
    first = np.zeros(len(facts), dtype=bool)
    other = np.zeros(len(facts), dtype=bool)
    looked = 0
    for index, one in enumerate(facts.pairs.samples):
        top = one.rollout.top.get(ROLLOUT)
        if top is None or len(top) != one.stop - one.start:
            continue
        for row in range(int(facts.bounds[index]), int(facts.bounds[index + 1])):
            place = top[int(facts.position[row])]
            if not place:
                continue
            looked += 1
            largest = max(place.values())
            if abs(facts.rollout[row] - largest) <= CLOSE:
                first[row] = True
                own = place.get(int(facts.token[row]))
                other[row] = own is None or own < largest - CLOSE
        if looked >= MOST:
            break
    return first, other, looked
