"""Responses scored behind another prompt: some samples differ grossly, most at their beginning.

A wrong prompt matters most to the first tokens of a response; later ones are given by the response
itself. Or lists of values stand in other rows: one side's list of sample i is the other side's of
sample j. Samples that differ without either may have any cause that follows samples.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes import places
from verify.onpolicy.causes.facts import CAP, Facts, Finding, Flags, Floats, names
from verify.onpolicy.causes.groups import outstanding
from verify.onpolicy.causes.statistics import ALPHA, correlation, normal_tail, ranks
from verify.onpolicy.causes.table import cause

FEWEST = 5
REPAIRED = 0.1
NEAREST = 0.01
"""Of the distance to its own list: what is nearer counts as no nearer, since values repeat."""
LOOKED = 512
"""Tokens of a list that are compared with other lists, evenly spaced."""
FALLS = 1.5
DOWN = 0.2
MOST_SAMPLES = 20_000


def detect(facts: Facts) -> Finding | None:
    """Exchanged lists first; then samples that stand out and fall off along the response."""
    return _exchanged(facts) or _behind_another(facts)


def _exchanged(facts: Facts) -> Finding | None:
    partner = exchanged(facts)
    if not partner:
        return None
    members = np.zeros(len(facts.pairs.samples), dtype=bool)
    members[list(partner)] = True
    rows = members[facts.sample]
    steps = {other - index for index, other in partner.items()}
    keys = facts.pairs.samples
    shown = ", ".join(f"{keys[a].key} -> {keys[b].key}" for a, b in list(partner.items())[:3])
    where = common_places(facts, members)
    offset = f", all by {steps.pop():+d}" if len(steps) == 1 else ""
    return Finding(
        cause(
            "wrong-prompt",
            weight=facts.share(rows),
            claimed=True,
            where=names(facts, np.flatnonzero(members)),
            fitted={"samples": float(len(partner))},
            for_=(
                f"the trainer's values of {len(partner)} samples are the rollout's of other samples"
                f" ({shown}{offset}): pairing them so removes the difference",
                *where,
            ),
        ),
        rows,
    )


def exchanged(facts: Facts) -> dict[int, int]:
    """For samples that differ: whose rollout values their trainer values are, if anybody's.

    An unrelated list comes q times as near by a chance of about q for each token that carries the
    distance, so short lists, or lists of certain tokens with an open one, are exchanged with
    nobody. The chance counts all lists that were tried.
    """
    pairs = facts.pairs
    mean = facts.means
    loud = np.flatnonzero(np.nan_to_num(mean) > 0.0)
    usual = facts.total / max(1, len(facts))
    loud = loud[mean[loud] >= 0.5 * usual][:MOST_SAMPLES]
    lengths: dict[int, list[int]] = {}
    for index in loud:
        one = pairs.samples[index]
        if one.stop - one.start >= FEWEST:
            lengths.setdefault(one.stop - one.start, []).append(int(index))
    groups = {length: group for length, group in lengths.items() if 2 <= len(group) <= 256}
    tried = sum(len(group) * (len(group) - 1) for group in groups.values())
    found: dict[int, int] = {}
    for length, group in groups.items():
        spans = [slice(pairs.samples[i].start, pairs.samples[i].stop) for i in group]
        step = -(-length // LOOKED)
        t = np.stack([pairs.trainer[span][::step] for span in spans])
        r = np.stack([pairs.rollout[span][::step] for span in spans])
        for place, number in enumerate(group):
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                apart = np.minimum(np.abs(t[place] - r), CAP)
                known = np.isfinite(apart)
                distance = np.where(known, apart, 0.0).sum(axis=1) / known.sum(axis=1)
            if not np.isfinite(distance[place]):
                continue
            best = int(np.nanargmin(distance))
            if best == place or distance[best] >= REPAIRED * distance[place]:
                continue
            nearer = max(NEAREST, float(distance[best] / distance[place]))
            if tried * nearer ** _carrying(apart[place][known[place]]) < ALPHA:
                found[number] = group[best]
    return found


def _carrying(sizes: Floats) -> float:
    """How many tokens carry a sum: as many as would with equal shares (1 to n)."""
    square = float(sizes @ sizes)
    return float(sizes.sum()) ** 2 / square if square > 0.0 else 0.0


def _behind_another(facts: Facts) -> Finding | None:
    members = outstanding(facts)
    if not members.any():
        place = places.detect(facts)
        if place is not None and place.cause.claimed and place.members is not None:
            members = place.members
    everywhere = not members.any()
    rows = members[facts.sample] if not everywhere else np.ones(len(facts), dtype=bool)
    fall = _fall(facts, rows)
    if fall is None:
        return None
    first, last, chance = fall
    if everywhere and facts.total < 0.2 * len(facts):
        return None
    down = float(facts.clipped[rows].sum() / max(1e-300, facts.size[rows].sum()))
    others = facts.size[~rows]
    quiet = float(others.mean()) if len(others) else 0.0
    claimed = chance < ALPHA and first > FALLS * last and down < -DOWN
    if not claimed:
        return None
    said = (
        f"mean |d| {float(facts.size[rows].mean()):.3g} in these samples, {quiet:.3g} in the "
        "others",
        f"|d| for its entropy falls from {first:.3g} in the first quarter of the responses to "
        f"{last:.3g} in the last (chance {chance:.1g})",
        f"the trainer finds these tokens less likely: d leans {down:+.0%}",
        *common_places(facts, members),
    )
    return Finding(
        cause(
            "wrong-prompt",
            weight=facts.share(rows),
            claimed=True,
            where=names(facts, np.flatnonzero(members)) if not everywhere else "",
            fitted={"first": first, "last": last},
            for_=said,
        ),
        rows if not everywhere else None,
    )


def common_places(facts: Facts, members: Flags) -> tuple[str, ...]:
    """Ranks that hold all of these samples and no others."""
    said = []
    for field, shown in places.KINDS.items():
        values = np.array([str(one) for one in facts.meta(field)])
        inside = set(values[members])
        if len(inside) == 1 and "None" not in inside and not (set(values[~members]) & inside):
            said.append(f"they are the samples of {shown} {inside.pop()}")
    return tuple(said)


def _fall(facts: Facts, rows: Flags) -> tuple[float, float, float] | None:
    """Levels in the first and last quarter of the responses, and the chance that |d| falls so."""
    if rows.sum() < 4 * FEWEST:
        return None
    lengths = np.bincount(facts.pairs.sample, minlength=len(facts.pairs.samples))
    place = facts.position[rows] / np.maximum(1, lengths[facts.sample[rows]] - 1)
    size, doubt = facts.size[rows], facts.doubt[rows]
    head, tail = place <= 0.25, place >= 0.75
    if not head.any() or not tail.any():
        return None
    first = float(size[head].sum() / doubt[head].sum())
    last = float(size[tail].sum() / doubt[tail].sum())
    loudness = size / np.maximum(doubt, 1e-6)
    seen = -_correlation_of_ranks(loudness, place)
    chance = normal_tail(seen * np.sqrt(max(1, len(place) - 1)))
    return first, last, float(chance)


def _correlation_of_ranks(x: Floats, y: Floats) -> float:
    return correlation(ranks(x), ranks(y))
