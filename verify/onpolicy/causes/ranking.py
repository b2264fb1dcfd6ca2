"""Which causes there are and in which order: by the share of the mismatch that each one carries.

Data that are no log-probabilities come out first, then tokens and samples that one cause explains,
each taken out before the next is looked for; what is left is held against the laws of the sign of
d, and against noise. A claim is what a detector states at its error rate; the order of claims is
that of their weights, with what could not be scored at all in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from verify.onpolicy import routing
from verify.onpolicy.causes import (
    alternatives,
    dropout,
    flips,
    masks,
    other_tokens,
    penalties,
    places,
    positions,
    precision,
    prompts,
    residue,
    sentinels,
    shift,
    support,
    temperature,
    versions,
)
from verify.onpolicy.causes.facts import CAP, Facts, Finding, gather
from verify.onpolicy.causes.table import UNKNOWN, Cause, Evidence, cause
from verify.onpolicy.causes.weights import with_weights
from verify.onpolicy.numbers import Numbers
from verify.onpolicy.pairing import Pairs

LOCAL: tuple[Callable[[Facts], Finding | None], ...] = (
    alternatives.detect,
    masks.detect,
    sentinels.detect,
    shift.detect,
)
BY_SAMPLE: tuple[Callable[[Facts], Finding | None], ...] = (
    places.detect,
    versions.detect,
    positions.detect,
    prompts.detect,
)
SUSPECTED = 0.6
"""Weight of a cause that is not claimed, from which on noise is not claimed either."""
NO_EVIDENCE = 0.5
NOISES = {"low-precision-head", "routing-flips", "dropout"}


def diagnose(pairs: Pairs, numbers: Numbers, evidence: Evidence) -> tuple[Cause, ...]:
    """Ranked causes, claimed ones first; none where every compared token agrees."""
    found = list(other_tokens.detect(pairs))
    facts = gather(pairs, evidence)
    infinite = int(np.count_nonzero(pairs.scored)) - len(facts)
    whole = facts.total + CAP * infinite
    if infinite:
        bad = sentinels.detect_infinite(pairs)
        if bad is not None:
            found.append(_scaled(bad, CAP * infinite / whole))
    if whole > 0.0 and len(facts):
        found += _values(facts, whole, found)
    merged = with_weights(_merged(found), evidence.weights)
    kept = [one for one in merged if one.claimed or not _unlikely(one)]
    # where nothing is claimed, that it cannot be told is the answer, and it says what to record
    first = {"other-tokens" if any(one.claimed for one in kept) else UNKNOWN}
    return tuple(
        sorted(kept, key=lambda one: (not one.claimed, one.name not in first, -one.weight))
    )


def _unlikely(one: Cause) -> bool:
    """Whether chance alone gives as much, and nothing was held back because of it."""
    return one.chance is not None and one.chance >= NO_EVIDENCE and one.weight < SUSPECTED


def _values(facts: Facts, whole: float, before: list[Cause]) -> list[Cause]:
    """Causes that speak from the values, each with its share of the whole mismatch."""
    found: list[Cause] = []
    rest = facts
    for detector in LOCAL:
        seen = detector(rest)
        if seen is not None:
            found.append(_of(seen, rest, whole))
            rest = _rest(rest, seen)
    random = dropout.detect(rest) if rest.total > 0.0 else None
    if random is not None and random.cause.claimed:
        # its few large differences fall on some places more than on others by themselves
        _everywhere(rest, whole, found, [random, versions.detect(rest)])
    elif rest.total > 0.0:
        rest, noises = _samples(rest, whole, found)
        if rest.total > 0.0:
            _everywhere(rest, whole, found, [random, *noises])
    if rest.total > 0.0 and not any(one.claimed for one in (*before, *found)):
        suspected = [one.name for one in found if one.weight >= SUSPECTED]
        found += residue.detect(rest, suspected)
    return found


def _samples(rest: Facts, whole: float, found: list[Cause]) -> tuple[Facts, list[Finding | None]]:
    """Causes told by the samples they concern; the strongest is taken out before another try.

    What concerns all samples alike has nothing to be compared with: it is left to `_everywhere`.
    """
    noises: list[Finding | None] = []
    for _ in range(2):
        seen = [one for detector in BY_SAMPLE if (one := detector(rest)) is not None]
        claims = sorted(
            (one for one in seen if one.cause.claimed),
            key=lambda o: (o.cause.name != "wrong-prompt", -o.cause.weight),
        )  # a wrong prompt says more than the place at which it happened
        partial = [one for one in claims if one.explains is not None and not one.explains.all()]
        if not partial:
            noises += [one for one in claims if one.cause.name == "stale-weights"]
            found += [_of(one, rest, whole) for one in seen if one not in noises]
            break
        found.append(_of(partial[0], rest, whole))
        rest = _rest(rest, partial[0])
        if rest.total <= 0.0:
            break
    return rest, noises


def _everywhere(
    rest: Facts, whole: float, found: list[Cause], known: Sequence[Finding | None]
) -> None:
    """Causes that concern all tokens alike: laws of the sign first, then noise of known origin."""
    logarithm = residue.other_logarithm(rest)
    if logarithm is not None:
        found.append(logarithm)
        return
    laws = [one for one in (temperature.detect(rest), penalties.detect(rest)) if one is not None]
    laws += support.detect(rest)
    laws.sort(key=lambda one: (not one.cause.claimed, -one.cause.weight))
    strength = laws[0].cause.weight if laws and laws[0].cause.claimed else 0.0
    for place, one in enumerate(laws):
        found.append(_of(one if place == 0 else _beside(one, laws[0]), rest, whole))
    noises = [precision.detect(rest), flips.detect(rest, routing.check(rest.pairs)), *known]
    left = (1.0 - strength) * (rest.total / whole if whole > 0.0 else 0.0)
    for noise in noises:
        if noise is None:
            continue
        its = _of(noise, rest, whole)
        if its.name == "stale-weights":  # recorded for all tokens: what the others leave
            told = [c.weight for c in found if c.claimed and c.name in NOISES]
            its = _scaled(its, max(0.05, 1.0 - sum(told)))
        found.append(_scaled(its, min(1.0, left / its.weight)) if its.weight else its)


def _beside(one: Finding, first: Finding) -> Finding:
    """The weaker of two laws: they overlap, so it stays a claim only where it carries half."""
    if not one.cause.claimed or one.cause.weight >= 0.5 * first.cause.weight:
        return one
    against = (*one.cause.against, f"{first.cause.name} explains more of the same signs")
    return replace(one, cause=replace(one.cause, claimed=False, against=against))


def _rest(facts: Facts, seen: Finding) -> Facts:
    if not seen.cause.claimed or seen.explains is None:
        return facts
    return facts.without(seen.explains)


def _of(seen: Finding, facts: Facts, whole: float) -> Cause:
    return _scaled(seen.cause, facts.total / whole if whole > 0.0 else 0.0)


def _scaled(one: Cause, factor: float) -> Cause:
    return replace(one, weight=min(1.0, max(0.0, one.weight * factor)))


def _merged(found: list[Cause]) -> list[Cause]:
    """One entry for each name: weights add up, sentences follow each other."""
    by_name: dict[str, Cause] = {}
    for one in found:
        known = by_name.get(one.name)
        if known is None:
            by_name[one.name] = one
            continue
        strong, weak = sorted((known, one), key=lambda c: (not c.claimed, -c.weight))
        by_name[one.name] = cause(
            one.name,
            weight=strong.weight + (weak.weight if weak.claimed else 0.0),
            claimed=strong.claimed,
            where=strong.where or weak.where,
            fitted={**weak.fitted, **strong.fitted},
            for_=(*strong.for_, *(weak.for_ if weak.claimed or not strong.claimed else ())),
            against=(*strong.against, *weak.against),
            remedy=strong.remedy,
            structural=strong.structural or (weak.structural and weak.claimed),
            chance=strong.chance,
            of=strong.of,
        )
    return list(by_name.values())
