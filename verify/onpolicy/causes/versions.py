"""Weights of another version: told by versions, by the step at which it began, or by a fit.

- recorded versions: samples, or tokens, whose version is not the trainer's differ more;
- steps: the mismatch begins at a step and stays (null hypothesis: levels of samples do not depend
  on the step; all steps are tried, of many MOST_STEPS);
- other steps' scorings: the rollout agrees with one of them.

Versions that differ and are recorded say that the data are off-policy, which may be meant.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verify.onpolicy.causes.dropout import values_of
from verify.onpolicy.causes.facts import Facts, Finding, Flags, Floats
from verify.onpolicy.causes.groups import BY_SAMPLE, Contrast, both_levels, contrast
from verify.onpolicy.causes.statistics import binomial_tail, times
from verify.onpolicy.causes.table import cause

LOUDER = 1.5
KERNELS = 1e-4
"""Nats: mean |d| up to which a change of kernels explains as well what began at a step."""
RECORDED = 1e-3
"""Versions are one hypothesis, which nobody searched for."""
NEARER = 0.1
PARTIAL = (
    "weights changed during these responses and every token says so: off-policy as recorded; "
    "correct for it by importance ratios, or set a bound"
)
FEWEST = 8
MOST_STEPS = 512
"""Steps that are tried as the first of other weights; of more, evenly spaced ones."""


def detect(facts: Facts) -> Finding | None:
    """The strongest of the three."""
    found = [one for one in (_matched(facts), _recorded(facts), _onset(facts)) if one is not None]
    if not found:
        return None
    found.sort(key=lambda one: (not one.cause.claimed, -one.cause.weight))
    first = found[0]
    more = [line for one in found[1:] if one.cause.claimed for line in one.cause.for_]
    if not more:
        return first
    whole = first.cause
    return replace(first, cause=replace(whole, for_=(*whole.for_, *more)))


def behind(facts: Facts) -> Flags | None:
    """bool [n]: tokens whose recorded version is not the trainer's; None where none is recorded."""
    found = np.zeros(len(facts), dtype=bool)
    known = False
    for index, one in enumerate(facts.pairs.samples):
        mine = one.rollout.meta.get("rollout_version", one.trainer.meta.get("rollout_version"))
        their = one.trainer.meta.get("trainer_version", one.rollout.meta.get("trainer_version"))
        if mine is None or their is None:
            continue
        known = True
        length = one.stop - one.start
        if isinstance(mine, list | tuple):
            if len(mine) != length:
                continue  # pairing says so
            other = np.array([str(version) != str(their) for version in mine])
        else:
            other = np.full(length, str(mine) != str(their))
        rows = slice(facts.bounds[index], facts.bounds[index + 1])
        found[rows] = other[facts.position[rows]]
    return found if known else None


def _recorded(facts: Facts) -> Finding | None:
    rows = behind(facts)
    if rows is None or not rows.any():
        return None
    equal = ~rows
    share = facts.share(rows)
    by_token = any(isinstance(one, list | tuple) for one in facts.meta("rollout_version"))
    whole = np.bincount(facts.sample, weights=rows, minlength=len(facts.pairs.samples))
    members = whole >= 0.5 * np.maximum(facts.counts, 1)
    said = [
        f"{int(rows.sum())} of {len(facts)} tokens were sampled by another version than scored them"
        f" and carry {share:.0%} of |d|"
    ]
    if not equal.any():
        said.append("no token has equal versions to compare with")
        return Finding(
            cause(
                "stale-weights",
                weight=share,
                claimed=True,
                where="all samples",
                for_=tuple(said),
            )
        )
    size, doubt = facts.size, facts.doubt
    usual = float(size[equal].sum() / doubt[equal].sum())
    ratio = float(size[rows].sum() / doubt[rows].sum()) / usual if usual > 0.0 else np.inf
    seen = contrast(facts, members) if (members & (facts.counts > 0)).any() else None
    chance = seen.chance if seen is not None and seen.others else 1.0
    if chance >= RECORDED:
        chance = min(chance, _within(facts, rows))
    said.append(
        f"their |d| for their entropy is {times(ratio)} that of tokens with equal "
        f"versions (chance {chance:.1g})"
    )
    excess = share * max(0.0, 1.0 - 1.0 / ratio) if ratio > 0 else 0.0
    return Finding(
        cause(
            "stale-weights",
            weight=excess,
            claimed=ratio > LOUDER and chance < RECORDED,
            where=f"{int((members & (facts.counts > 0)).sum())} samples",
            fitted={"ratio": float(min(ratio, 1e9))},
            for_=tuple(said),
            structural=None if not by_token else False,
            remedy="" if not by_token else PARTIAL,
        ),
        rows,
    )


def _within(facts: Facts, rows: Flags) -> float:
    """Chance that tokens of another version carry so much inside samples that have both."""
    size = facts.size / np.maximum(facts.doubt, 1e-6)
    differences = []
    for index in range(len(facts.pairs.samples)):
        mine = slice(facts.bounds[index], facts.bounds[index + 1])
        one, two = size[mine][rows[mine]], size[mine][~rows[mine]]
        if len(one) >= 3 and len(two) >= 3:
            differences.append(float(np.median(one)) - float(np.median(two)))
    wins = sum(value > 0.0 for value in differences)
    return binomial_tail(wins, len(differences), 0.5) if differences else 1.0


def _onset(facts: Facts) -> Finding | None:
    steps = facts.meta("step")
    numbers = np.array([float(one) if isinstance(one, int) else np.nan for one in steps])
    both = both_levels(facts)
    known = np.isfinite(numbers) & np.isfinite(both[0])
    both = np.where(known, both[0], np.nan), np.where(known, both[1], np.nan)
    values = np.unique(numbers[known])
    if len(values) < 2:
        return None
    best: tuple[Contrast, float, np.ndarray] | None = None
    begins = values[1 :: -(-(len(values) - 1) // MOST_STEPS)]
    for begin in begins:
        members = known & (numbers >= begin)
        seen = contrast(facts, members, both)
        if best is None or seen.chance < best[0].chance:
            best = (seen, float(begin), members)
    assert best is not None
    seen, begin, members = best
    chance = min(1.0, seen.chance * len(begins))
    if seen.ratio < LOUDER:
        return None
    rows = members[facts.sample]
    before, after = float(facts.size[~rows].mean()), float(facts.size[rows].mean())
    return Finding(
        cause(
            "stale-weights",
            weight=seen.excess,
            claimed=chance < BY_SAMPLE and after > KERNELS,
            chance=chance,
            where=f"from step {begin:g} on",
            fitted={"step": begin, "ratio": float(min(seen.ratio, 1e9))},
            for_=(
                f"mean |d| is {before:.3g} before step {begin:g} and {after:.3g} from it on "
                f"({seen.others} and {seen.members} samples, chance {chance:.1g})",
            ),
        ),
        rows,
    )


def _matched(facts: Facts) -> Finding | None:
    """Another version's scoring, of another step in this file or given, that the rollout fits."""
    found = [one for one in (_of_other_versions(facts), _of_former_step(facts)) if one is not None]
    if not found:
        return None
    other, said = max(found, key=lambda one: int(np.isfinite(one[0]).sum()))
    known = np.isfinite(other)
    before = float(facts.size[known].mean())
    after = float(np.abs(other - facts.rollout)[known].mean())
    gain = float(facts.size[known].sum()) * (1.0 - after / before) / facts.total
    return Finding(
        cause(
            "stale-weights",
            weight=gain,
            claimed=after < NEARER * before and gain >= 0.05,
            where=f"{int(known.sum())} tokens",
            fitted={"before": before, "after": after},
            for_=(
                f"the rollout agrees with the trainer of {said}: mean |d| goes from {before:.3g} "
                f"to {after:.3g} over {int(known.sum())} tokens",
            ),
        ),
        known if not known.all() else None,
    )


def _of_other_versions(facts: Facts) -> tuple[Floats, str] | None:
    """For samples that fit another version's scoring than their own: its values, NaN elsewhere."""
    steps, versions = facts.meta("step"), facts.meta("trainer_version")
    own = [str(s if v is None else v) for v, s in zip(versions, steps, strict=True)]
    usual = facts.by_sample(facts.size)
    best = NEARER * usual
    values = np.full(len(facts), np.nan)
    named: dict[int, str] = {}
    for version, dump in (facts.evidence.steps or {}).items():
        other = values_of(facts.pairs, dump)[facts.rows]
        with np.errstate(invalid="ignore"):
            apart = facts.by_sample(np.abs(other - facts.rollout))
            nearer = np.flatnonzero((apart < best) & (facts.counts >= FEWEST))
        for index in nearer:
            best[index] = apart[index]
            rows = slice(facts.bounds[index], facts.bounds[index + 1])
            mine = str(version) == own[index]
            values[rows] = np.nan if mine else other[rows]
            named[int(index)] = "" if mine else str(version)
    shown = sorted({name for name in named.values() if name})
    if not shown:
        return None
    return values, ", ".join(shown[:4])


def _of_former_step(facts: Facts) -> tuple[Floats, str] | None:
    """Contexts that were scored at several steps: the trainer's values one step before."""
    numbers = np.array([int(s) if isinstance(s, int) else -1 for s in facts.meta("step")])
    if len(np.unique(numbers[numbers >= 0])) < 2:
        return None
    step = numbers[facts.sample]
    digest = facts.context.prefixes[facts.rows]
    order = np.lexsort((step, digest))
    order = order[(step[order] >= 0) & (digest[order] != 0)]
    same = digest[order][1:] == digest[order][:-1]
    later = step[order][1:] > step[order][:-1]
    now, former = order[1:][same & later], order[:-1][same & later]
    loud = facts.size[now] > 0.0
    now, former = now[loud], former[loud]
    moved = np.abs(facts.trainer[now] - facts.trainer[former]) > 0.0
    if moved.sum() < FEWEST:
        return None
    values = np.full(len(facts), np.nan)
    values[now] = facts.trainer[former]
    return values, "the step before"
