"""One side normalises over fewer tokens: d has one sign, and which tokens are missing tells why.

Let c be the value over the smaller set and f over the larger; 1 - exp(-|c - f|) = x is the mass of
what is missing, at every position. Null hypothesis: both sides have the same support, so exp(d) has
mean 1. If it does not, either truncation removed unlikely tokens, or padding added columns:

- truncation keeps the likely tokens. What it removed are fewer than V tokens, each less likely
  than the chosen one, so x < V exp(f); and where one token was kept, c is exactly 0;
- the mean of exp(-c) over tokens drawn from a distribution is the number of tokens in it. Weighted
  by x it is k for top-k, the same whether much is missing or little; and near V for a whole
  vocabulary that padding joined;
- near certainty truncation removes much of what is not the chosen token, padding a small part;
- among alternatives: no sampled token has a rank beyond k, though chance would have drawn some.

Each speaks for one or the other with a weight in units of log odds; they are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding, Floats, prompt_of
from verify.onpolicy.causes.laws import lean, mass
from verify.onpolicy.causes.settings import (
    PENALISING,
    TRUNCATING,
    disagreeing,
    in_force,
    said_to_be_raw,
    told,
)
from verify.onpolicy.causes.statistics import ALPHA, errors, quantile
from verify.onpolicy.causes.table import cause
from verify.onpolicy.samples import ROLLOUT, TRAINER

NET = 0.2
"""Net share of |exp(d) - 1| that must have one sign."""
SURE = 4.3
"""Standard errors of the mean of exp(d) - 1: by chance once in 60,000."""
BACK = 3.0
QUIET = 0.85
PURE = 0.8
KINDS = 3.5
"""The same where only kinds of tokens are independent, unless nearly all |d| has one sign."""
LEAST_MASS = 1e-3
BOUNDED = 0.1


@dataclass(frozen=True)
class Missing:
    """What is known of the mass that one side lacks. x, cut, full: float64 [n].

    alone: tokens whose value is exactly 0. beyond: tokens with more missing than less likely ones
    can hold. tokens: how many the side chooses among. uneven: in standard errors, how much larger
    that is where much is missing. near: of what is not the chosen token, the share that is missing
    near certainty. rank: largest rank, of how many tokens, and the chance that none has a larger.
    """

    side: str
    x: Floats
    cut: Floats
    full: Floats
    vocabulary: int
    alone: int
    beyond: int
    tokens: float
    uneven: float
    near: float | None
    rank: tuple[int, int, float] | None


def detect(facts: Facts) -> list[Finding]:
    """Truncated support and padded vocabulary, the likelier first; empty without a gap."""
    gap = mass(facts)
    if gap.net < NET or abs(gap.z) < SURE or not _many(facts, gap.gap < 0.0):
        return []
    back = mass(facts, -1.0)
    if back.z * gap.z >= 0.0 or abs(back.z) < BACK:
        return []  # the trainer's distribution may be the one that was sampled
    # most |d| must have the sign as well: a heavy tail of exp(d) is no support, nor is a loop
    signs = lean(facts, np.ones(len(facts), dtype=bool))
    pure = abs(signs.purity) >= PURE and signs.surprise < ALPHA
    if signs.purity * gap.gap <= 0.0 or not (pure or abs(gap.kinds) >= KINDS):
        return []
    missing = describe(facts, gap.gap < 0.0)
    odds, for_truncation, for_padding = _weigh(facts, missing)
    support = min(gap.net, abs(signs.purity)) if gap.gap > 0.0 else gap.net
    common = (
        f"mean of exp(d) - 1 is {gap.gap:+.3g} ({errors(abs(gap.z))} from 0, which any "
        f"two models over the same tokens give); {gap.net:.0%} of it has one sign",
        f"the {missing.side} lacks {float(missing.x.mean()):.2%} of the mass on average",
    )
    chance = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, odds))))
    truncated = Finding(
        cause(
            "truncated-support",
            weight=support * (1.0 if odds > 0.0 else 0.5 * chance),
            claimed=odds > 0.0,
            where=f"{missing.side} side",
            fitted=_fitted(missing),
            for_=(*common, *for_truncation),
            against=tuple(for_padding),
        )
    )
    padded_side = TRAINER if missing.side == ROLLOUT else ROLLOUT
    padded = Finding(
        cause(
            "padded-vocabulary",
            weight=support * (1.0 if odds <= 0.0 else 0.5 * (1.0 - chance)),
            claimed=odds <= 0.0,
            where=f"{padded_side} side",
            fitted={"mass": float(missing.x.mean()), "largest": float(missing.x.max())},
            for_=(*common, *for_padding),
            against=tuple(for_truncation),
        )
    )
    return [truncated, padded] if odds > 0.0 else [padded, truncated]


def _many(facts: Facts, rollout_lacks: bool) -> bool:
    """Whether the sign holds for tokens at large, not for the loudest alone.

    By the self-normalised sum of the quieter QUIET of those in doubt.
    """
    doubtful = facts.clipped[facts.doubt > 1e-3]
    quiet = doubtful[np.abs(doubtful) <= quantile(np.abs(doubtful), QUIET)]
    square = math.sqrt(float(quiet @ quiet))
    if square <= 0.0:
        return False
    z = float(quiet.sum()) / square * (-1.0 if rollout_lacks else 1.0)
    return z >= 2.5


def describe(facts: Facts, rollout_lacks: bool) -> Missing:
    """The mass that the rollout, or the trainer, lacks at each token."""
    cut, full = (facts.rollout, facts.trainer) if rollout_lacks else (facts.trainer, facts.rollout)
    x = np.maximum(0.0, -np.expm1(np.minimum(full - cut, 0.0)))
    vocabulary = vocabulary_of(facts)
    real = x > LEAST_MASS
    alone = int(np.count_nonzero((cut == 0.0) & real))
    room = math.log(vocabulary) + full
    beyond = int(np.count_nonzero(real & (np.log(np.maximum(x, 1e-300)) > room + 0.1)))
    tokens, uneven = _chosen_among(x, cut)
    certain = (cut > -0.05) & (cut < -1e-4)
    near = None
    if certain.sum() >= 6:
        near = float(np.median(x[certain] / -np.expm1(np.minimum(full[certain], -1e-300))))
    side = ROLLOUT if rollout_lacks else TRAINER
    rank = _largest_rank(facts) if rollout_lacks else None
    return Missing(side, x, cut, full, vocabulary, alone, beyond, tokens, uneven, near, rank)


def _chosen_among(x: Floats, cut: Floats) -> tuple[float, float]:
    """The mean of exp(-c) weighted by x; and its excess where most is missing, in errors."""
    order = np.argsort(-x, kind="stable")
    weights = x[order]
    values = weights * np.exp(np.minimum(-cut[order], 40.0))
    total = float(weights.sum())
    if total <= 0.0:
        return 0.0, 0.0
    half = int(np.searchsorted(np.cumsum(weights), total / 2.0)) + 1
    much, little = values[:half], values[half:]
    if len(little) < 8 or len(much) < 8:
        return float(values.sum()) / total, 0.0
    one = float(much.sum()) / float(weights[:half].sum())
    two = float(little.sum()) / max(1e-300, float(weights[half:].sum()))
    error = math.hypot(
        float(np.linalg.norm(much)) / float(much.sum()),
        float(np.linalg.norm(little)) / float(little.sum()),
    )
    uneven = math.log(one / two) / max(0.08, error)
    return float(values.sum()) / total, uneven


def _largest_rank(facts: Facts) -> tuple[int, int, float] | None:
    """Of sampled tokens among the trainer's alternatives: largest rank, tokens, and chance.

    The chance is that of no larger rank in all these draws, by the trainer's own probabilities.
    """
    ranks, lists = [], []
    for one in facts.pairs.samples:
        top = one.trainer.top.get(TRAINER) or ()
        if one.tokens is None or len(top) != one.stop - one.start:
            continue
        own = facts.pairs.trainer[one.start : one.stop]
        for place, value in zip(top, own, strict=True):
            if place:
                values = np.sort(np.fromiter(place.values(), dtype=np.float64))[::-1]
                ranks.append(1 + int(np.count_nonzero(values > value + 1e-6)))
                lists.append(values)
        if len(ranks) > 20_000:
            break
    if len(ranks) < 50:
        return None
    largest = max(ranks)
    longer = [values for values in lists if len(values) > largest]
    logs = [min(0.0, math.log(max(1e-300, float(np.exp(v[:largest]).sum())))) for v in longer]
    return largest, len(ranks), math.exp(max(-700.0, sum(logs)))


def vocabulary_of(facts: Facts) -> int:
    """Tokens of the tokenizer: as recorded, else at least the largest id that occurs."""
    largest = int(facts.pairs.token.max(initial=0)) + 1
    for one in facts.pairs.samples:
        largest = max(largest, int(prompt_of(one).max(initial=0)) + 1)
    stated = [int(value) for value in told(facts, "vocab_size")]
    return max([largest, *stated])


def _weigh(facts: Facts, missing: Missing) -> tuple[float, list[str], list[str]]:
    """Log odds of truncation against padding, and what speaks for either."""
    truncation, padding = [], []
    odds = 0.0
    real = max(1, int(np.count_nonzero(missing.x > LEAST_MASS)))
    if missing.alone >= 2:
        odds += 2.0 + min(4.0, 100.0 * missing.alone / real)
        truncation.append(
            f"{missing.alone} tokens are exactly 0 on that side although the other gives them less:"
            " the only ones kept"
        )
    if missing.beyond >= 2:
        odds -= 1.0 + min(6.0, 500.0 * missing.beyond / real)
        padding.append(
            f"at {missing.beyond} tokens more mass is missing than {missing.vocabulary} tokens "
            "less likely than the chosen one could have"
        )
    share = math.log10(max(1e-6, missing.tokens / missing.vocabulary))
    if missing.alone < 2:
        weight = max(-4.0, min(1.5, -8.5 * (share + 0.65)))
        odds += weight
        (truncation if weight > 0 else padding).append(
            f"where mass is missing the {missing.side} chooses among about {missing.tokens:.3g} of "
            f"{missing.vocabulary} tokens"
        )
        if share < -0.4:
            weight = max(-3.0, min(1.5, 1.5 - 1.2 * missing.uneven))
            odds += weight
            (truncation if weight > 0 else padding).append(
                "that number is the same where much is missing and where little is"
                if weight > 0
                else "that number grows with what is missing, which no fixed k does"
            )
    if missing.near is not None:
        weight = max(-1.0, min(1.5, 0.8 * math.log10(max(1e-4, missing.near) / 0.02)))
        odds += weight
        (truncation if weight > 0 else padding).append(
            f"near certainty {missing.near:.2%} of what is not the chosen token is missing"
        )
    if missing.rank is not None and missing.rank[2] < ALPHA:
        odds += 6.0
        truncation.append(
            f"no sampled token has a rank beyond {missing.rank[0]} among the trainer's "
            f"alternatives in {missing.rank[1]} tokens (chance {missing.rank[2]:.1g})"
        )
    return odds + _recorded(facts, missing, truncation, padding), truncation, padding


def _recorded(facts: Facts, missing: Missing, truncation: list[str], padding: list[str]) -> float:
    """What records say; they may be wrong, so it weighs little."""
    odds = 0.0
    widths, words = told(facts, "logits_width"), told(facts, "vocab_size")
    if widths and words and max(widths) > max(words):
        odds -= 3.0
        padding.append(f"the head has {max(widths):g} columns for {max(words):g} tokens")
    recorded = in_force(facts, TRUNCATING)
    raw = said_to_be_raw(facts)
    if recorded and not raw and missing.side == ROLLOUT:
        odds += 2.5
        truncation.append(f"said to be in force: {', '.join(recorded)}")
    elif recorded and raw:
        odds -= 1.5
        padding.append(
            f"{', '.join(recorded)} is said to be in force, but not in the recorded values"
        )
    elif told(facts, "top_p") and not recorded:
        truncation.append("no truncation is recorded (an engine may take it from the model folder)")
    truncation += disagreeing(facts, (*TRUNCATING, *PENALISING))
    lowered = in_force(facts, PENALISING)
    if lowered:
        truncation.append(f"penalties are said to be in force as well: {', '.join(lowered)}")
    if facts.evidence.generation_config and recorded:
        truncation.append("generation_config.json fills in what a request leaves open")
    if missing.side == TRAINER:
        odds -= 2.0
        padding.append("a trainer that truncates is rare")
    return odds


def _fitted(missing: Missing) -> dict[str, float]:
    """top_p where the missing mass piles up under a bound, else about k; kept mass."""
    bound = quantile(missing.x, 0.995)
    kept = {"kept": 1.0 - float(missing.x.mean())}
    piled = float((missing.x > 0.8 * bound).mean()) if bound > 0.0 else 0.0
    if piled >= BOUNDED and missing.alone:
        return {**kept, "top_p": 1.0 - float(missing.x.max())}
    if missing.rank is not None and missing.rank[2] < ALPHA:
        return {**kept, "top_k": float(missing.rank[0])}
    return {**kept, "top_k": missing.tokens}
