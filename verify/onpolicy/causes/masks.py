"""Counted tokens that the policy did not sample: tool output and other turns inside a response.

Tokens that nobody sampled have no probability of the sampler; it writes 0.0 for them, and the
trainer finds them less likely than sampled ones. So runs of such zeros between sampled tokens are
the mask's fault, and zeros of sampled tokens are a sentinel.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes import sentinels
from verify.onpolicy.causes.facts import Facts, Finding, Flags, names
from verify.onpolicy.causes.statistics import ALPHA, binomial_tail
from verify.onpolicy.causes.table import cause

SHORTEST = 2
MOSTLY = 0.8
EDGES = 4


def detect(facts: Facts) -> Finding | None:
    """Runs of exact zeros inside responses, with counted and sampled tokens on both sides."""
    rows = np.zeros(len(facts), dtype=bool)
    for atom in sentinels.atoms(facts):
        if atom.value == 0.0:
            rows |= atom.rows
    edge = edges(facts) & rows
    if (
        edge.sum() >= EDGES
        and binomial_tail(int(edge.sum()), int(rows.sum()), float(edges(facts).mean())) < ALPHA
        and edge.sum() >= 0.8 * rows.sum()
    ):
        return _displaced(facts, edge)
    inner, count = inside(facts, rows)
    if inner.sum() < MOSTLY * rows.sum() or not inner.any():
        return None  # scattered zeros come to stand side by side as well
    concerned = np.unique(facts.sample[inner])
    other = np.minimum(facts.trainer, facts.rollout)
    elsewhere = other[~rows]
    usual = float(elsewhere.mean()) if len(elsewhere) else 0.0
    singles = int(np.count_nonzero(rows & ~inner))
    return Finding(
        cause(
            "mask",
            weight=facts.share(inner),
            claimed=True,
            where=names(facts, concerned),
            fitted={"tokens": float(inner.sum()), "runs": float(count)},
            for_=(
                f"{int(inner.sum())} counted tokens in {count} runs inside responses have exactly "
                "0.0 on one side: observation tokens in the loss",
                f"the other side gives them {float(other[inner].mean()):.3g} on average, and "
                f"{usual:.3g} to sampled tokens",
            ),
            against=(f"{singles} zeros stand at the ends or alone",) if singles else (),
        ),
        inner,
    )


def edges(facts: Facts) -> Flags:
    """Counted tokens next to one that is not, inside a response: where turns begin and end."""
    pairs = facts.pairs
    counted, sample = pairs.counted, pairs.sample
    found = np.zeros(len(counted), dtype=bool)
    border = (sample[1:] == sample[:-1]) & (counted[1:] != counted[:-1])
    found[1:] |= border
    found[:-1] |= border
    return (found & counted)[facts.rows]


def _displaced(facts: Facts, edge: Flags) -> Finding:
    concerned = np.unique(facts.sample[edge])
    return Finding(
        cause(
            "mask",
            weight=facts.share(edge),
            claimed=True,
            where=names(facts, concerned),
            fitted={"tokens": float(edge.sum())},
            for_=(
                f"{int(edge.sum())} counted tokens have exactly 0.0 on one side, all of them where "
                "a turn begins or ends: the mask is displaced against the tokens",
            ),
        ),
        edge,
    )


def inside(facts: Facts, rows: Flags) -> tuple[Flags, int]:
    """The marked rows in runs of SHORTEST or more that no end of a response touches; their number.

    A marked token whose other side is certain too interrupts no run.
    """
    found = np.zeros(len(rows), dtype=bool)
    zero = rows | (facts.trainer == 0.0) | (facts.rollout == 0.0)
    marked = np.flatnonzero(zero)
    if len(marked) == 0:
        return found, 0
    sample = facts.sample
    breaks = (np.diff(marked) != 1) | (np.diff(sample[marked]) != 0)
    firsts = marked[np.append(True, breaks)]
    lasts = marked[np.append(breaks, True)]
    count = 0
    for first, last in zip(firsts, lasts, strict=True):
        if last - first + 1 < SHORTEST or first == 0 or last == len(rows) - 1:
            continue
        if sample[first - 1] != sample[first] or sample[last + 1] != sample[last]:
            continue
        found[first : last + 1] = rows[first : last + 1]
        count += 1 if rows[first : last + 1].any() else 0
    return found, count
