"""Another temperature on one side: d has the sign of a - 1 on likely tokens, the other on unlikely.

With t = a r - log sum p^a, every token with p > 1/2 moves towards 0 (a > 1) or away from it, by
log sum p^a <= 0 there. Below, d changes its sign where the surprise passes Renyi's entropy of the
position. Null hypothesis: signs of d are symmetric on both kinds of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.facts import CAP, Facts, Finding, Floats
from verify.onpolicy.causes.laws import CERTAIN, Split, mass, split
from verify.onpolicy.causes.settings import said_to_be_raw, shown, temperatures
from verify.onpolicy.causes.statistics import ALPHA
from verify.onpolicy.causes.table import cause
from verify.onpolicy.samples import ROLLOUT, TRAINER

CUTS = (-1.0, -1.5, -2.0, -3.0, -4.0, -5.0, -6.0, -8.0)
"""Where unlikely may begin; the chance is multiplied by their number."""
ONE_WAY = 0.9
"""Net share of |d| of likely tokens that no noise and no other weights give."""
PURE = 0.3
"""Net share of |d| that likely tokens, and unlikely ones, must have in their direction."""


def detect(facts: Facts) -> Finding | None:
    """The law with the fitted ratio a = T of the rollout / T of the trainer."""
    found = best_split(facts)
    if found is None:
        return None
    law, sign, cut = found
    likely, unlikely = (law.up, law.down) if sign > 0 else (law.down, law.up)
    chance = min(1.0, len(CUTS) * 2 * law.surprise)
    pure = abs(likely.purity) >= PURE and abs(unlikely.purity) >= PURE
    if chance >= ALPHA and abs(likely.purity) >= ONE_WAY:
        # too few unlikely tokens to be sure of them; but no mass is missing, so they make up for it
        gaps = mass(facts), mass(facts, -1.0)
        if min(abs(gap.z) for gap in gaps) < 3.0:
            chance = min(1.0, len(CUTS) * 2 * likely.surprise)
    ratio, residual, how = fit(facts)
    fitted = {"likely": likely.purity, "unlikely": unlikely.purity}
    said = [
        f"of {likely.count} tokens more likely than 1/2 |d| leans {likely.purity:+.0%}, of "
        f"{unlikely.count} less likely than e^{cut:g} {unlikely.purity:+.0%}: opposite signs "
        f"(chance {chance:.1g})",
        "T of the rollout / T of the trainer "
        + (f"is about {ratio:.3g}" if ratio is not None else "could not be fitted")
        + f" ({how}"
        + (f", residual {residual:.1g})" if residual is not None else ")"),
    ]
    declared, recorded, against = _recorded(facts, ratio)
    return Finding(
        cause(
            "temperature",
            weight=law.support,
            claimed=chance < ALPHA and pure and law.support >= 0.15,
            chance=chance,
            fitted=fitted if ratio is None else {"ratio": ratio, **fitted},
            for_=(*declared, *said, *recorded),
            against=against,
        )
    )


def _recorded(
    facts: Facts, ratio: float | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What is said of temperatures: that the sides disagree, what fits, and what speaks against.

    ratio: of the rollout's to the trainer's, from the values, None where it is not known.
    """
    sampled, scored = temperatures(facts)
    ours = f"temperature {shown(sampled)}"
    if sampled and said_to_be_raw(facts):
        ours, sampled = f"{ours} that is not in the recorded values", [1.0]
    theirs = f"the trainer's {'file says temperature' if facts.pairs.own else 'is'} {shown(scored)}"
    if sampled and scored and sampled != scored:
        said = f"the record says {ours} of the sampler, {theirs}: they disagree"
        if len(sampled) == len(scored) == 1 and scored[0] > 0.0:
            stated = sampled[0] / scored[0]
            said += f", by a ratio of {stated:.3g}"
            if ratio is not None and (stated - 1.0) * (ratio - 1.0) < 0.0:
                return (), (), (f"{said}, and the values disagree the other way",)
        return (said,), (), ()
    if any(abs(one - 1.0) > 1e-6 for one in sampled):
        both = ", on both sides: one may not apply it, or apply it twice" if scored else ""
        return (), (f"the record says {ours}{both}",), ()
    if sampled:
        return (), (), (f"the record says {ours} (it may not know)",)
    if any(abs(one - 1.0) > 1e-6 for one in scored):
        return (), (f"{theirs}, and nothing is said of the sampler's",), ()
    return (), (), ()


def best_split(facts: Facts) -> tuple[Split, int, float] | None:
    """The split with the largest support: law, sign of a - 1, and where unlikely begins."""
    likely = (facts.middle > CERTAIN) & ~facts.rounded
    best: tuple[Split, int, float] | None = None
    order = np.sort(facts.middle[facts.middle <= CERTAIN])
    for cut in CUTS:
        if np.searchsorted(order, cut) < 4:
            continue
        unlikely = facts.middle < cut
        for sign in (1, -1):
            law = split(facts, likely, unlikely) if sign > 0 else split(facts, unlikely, likely)
            if law.support > 0.0 and (best is None or law.support > best[0].support):
                best = (law, sign, cut)
    return best


def fit(facts: Facts) -> tuple[float | None, float | None, str]:
    """a = T of the rollout / T of the trainer, None where no number fits; residual and method.

    With logits the best a is searched. Without, let w = exp(d) - 1. Over tokens that the rollout's
    distribution drew, sums of w f estimate the difference of the means of f under both models, and
    w itself has mean 0; so t = a r + constant gives a = sum w t / sum w r, for any a. Where the
    trainer's distribution was the one that drew, w = exp(-d) - 1.
    """
    exact = _with_logits(facts)
    if exact is not None:
        return exact
    forward, backward = mass(facts), mass(facts, -1.0)
    signed = facts.clipped if abs(forward.z) <= abs(backward.z) else -facts.clipped
    weights = np.expm1(np.clip(signed, -CAP, 5.0))
    below = float(weights @ facts.rollout)
    ratio = float(weights @ facts.trainer) / below if below else 0.0
    return (ratio if 0.01 < ratio < 100.0 else None), None, "from moments"


def _with_logits(facts: Facts) -> tuple[float, float | None, str] | None:
    logits = facts.evidence.logits or {}
    for side, given, other in (
        (TRAINER, facts.trainer, facts.rollout),
        (ROLLOUT, facts.rollout, facts.trainer),
    ):
        if not logits.get(side):
            continue
        rows, table = _table(facts, logits[side])
        if not len(rows):
            continue
        token = facts.token[rows]
        own = _best_scale(table, token, given[rows])
        their = _best_scale(table, token, other[rows])
        ratio = own[0] / their[0] if side == TRAINER else their[0] / own[0]
        return ratio, max(own[1], their[1]), f"from logits of the {side}"
    return None


def _table(facts: Facts, logits: Mapping[str, NDArray[Any]]) -> tuple[np.ndarray, Floats]:
    """Rows of the facts that have logits, up to about 2,000, and these logits."""
    rows: list[np.ndarray] = []
    parts: list[Floats] = []
    for index, one in enumerate(facts.pairs.samples):
        table = logits.get(one.key)
        mine = np.arange(facts.bounds[index], facts.bounds[index + 1])
        if table is None or not len(mine) or len(table) <= facts.position[mine].max():
            continue
        if facts.token[mine].max() >= table.shape[1] or facts.token[mine].min() < 0:
            continue
        rows.append(mine)
        parts.append(np.asarray(table, dtype=np.float64)[facts.position[mine]])
        if sum(map(len, rows)) > 2000:
            break
    if not rows:
        return np.empty(0, dtype=np.int64), np.empty((0, 0))
    return np.concatenate(rows), np.concatenate(parts)


def _best_scale(table: Floats, token: np.ndarray, given: Floats) -> tuple[float, float]:
    """The factor on logits whose log-softmax is nearest to the given values; mean |residual|."""

    def residual(scale: float) -> float:
        scaled = table * scale
        peak = scaled.max(axis=1)
        total = peak + np.log(np.exp(scaled - peak[:, None]).sum(axis=1))
        return float(np.abs(scaled[np.arange(len(token)), token] - total - given).mean())

    grid = np.exp(np.linspace(math.log(0.1), math.log(10.0), 93))
    best = min(grid, key=residual)
    low, high = best / 1.06, best * 1.06
    for _ in range(40):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        low, high = (low, b) if residual(a) < residual(b) else (a, high)
    best = (low + high) / 2.0
    nearest = round(best, 6)
    return (
        (nearest, residual(nearest))
        if residual(nearest) <= residual(best)
        else (
            best,
            residual(best),
        )
    )
