"""Values that are no log-probabilities: NaN, infinities, and one number that stands everywhere.

A constant such as 0.0 or -100.0 betrays itself by its neighbours: honest values next to it in size
agree with the other side, and its own do not. Under the null hypothesis, that this value is a
log-probability like those nearest to it, |d| of its tokens and of its neighbours are exchangeable.
So a true 0.0 (a certain token, or the only one that top-p kept) is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.facts import Facts, Finding, Flags, Floats, names
from verify.onpolicy.causes.statistics import ALPHA, binomial_tail, quantile
from verify.onpolicy.causes.table import Cause, cause
from verify.onpolicy.pairing import Pairs
from verify.onpolicy.samples import ROLLOUT, TRAINER

NEIGHBOURS = 64
CANDIDATES = 8
ALONE = 10.0
"""A value that occurs once or twice must differ by this many times the largest other |d|."""
LEAST = 0.05
"""In nats: what a probability of 1 may be wrong by before it is called one (5 percent)."""


@dataclass(frozen=True, eq=False)
class Atom:
    """One constant of one side. rows: bool over the facts' rows.

    usual: what 95 % of |d| of the values next to it are within, None without such values.
    """

    side: str
    value: float
    rows: Flags
    chance: float
    usual: float | None


def detect_infinite(pairs: Pairs) -> Cause | None:
    """NaN and infinities among counted tokens: their d is not a number, so they come first."""
    said: list[str] = []
    hidden: list[str] = []
    samples: list[NDArray[np.int32]] = []
    for side, values in ((TRAINER, pairs.trainer), (ROLLOUT, pairs.rollout)):
        for name, bad in (
            ("NaN", np.isnan(values)),
            ("-inf", np.isneginf(values)),
            ("+inf", np.isposinf(values)),
        ):
            bad = bad & pairs.present
            counted = bad & pairs.counted
            if counted.any():
                first = int(np.flatnonzero(counted)[0])
                samples.append(pairs.sample[counted])
                said.append(
                    f"{int(counted.sum())} counted tokens have {name} on the {side} side, first in "
                    f"sample {pairs.samples[int(pairs.sample[first])].key} at position "
                    f"{int(pairs.position[first])}: {_MEANS[name]}"
                )
            elif bad.any():
                hidden.append(
                    f"{int(bad.sum())} tokens outside the mask have {name} on the {side} side"
                )
    if not said:
        return None
    concerned = np.unique(np.concatenate(samples))
    facts_keys = [pairs.samples[int(index)].key for index in concerned[:4]]
    more = f" and {len(concerned) - 4} more" if len(concerned) > 4 else ""
    return cause(
        "sentinel",
        weight=1.0,
        claimed=True,
        where=f"samples {', '.join(facts_keys)}{more}",
        for_=tuple(said),
        against=tuple(hidden),
    )


_MEANS = {
    "NaN": "logits were not finite there; a neutral value would hide it",
    "-inf": "a sampled token cannot have probability 0 where it was sampled from; either it lies "
    "outside this side's support (top-k, a mask), or this is a placeholder",
    "+inf": "no probability has it",
}


def atoms(facts: Facts) -> list[Atom]:
    """Constants that are no log-probabilities, the one that carries most of |d| first."""
    found = []
    for side, values in ((ROLLOUT, facts.rollout), (TRAINER, facts.trainer)):
        found += _atoms(facts, side, values)
    return sorted(found, key=lambda atom: -float(facts.size[atom.rows].sum()))


def _atoms(facts: Facts, side: str, values: Floats) -> list[Atom]:
    if len(values) == 0 or facts.total <= 0.0:
        return []
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    fresh = np.ones(len(ordered), dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(fresh)
    ends = np.append(starts[1:], len(ordered))
    carried = np.add.reduceat(facts.size[order], starts)
    worth = np.where(ordered[starts] >= 0.0, carried, np.where(ends - starts >= 3, carried, -1.0))
    found = []
    for group in np.argsort(-worth, kind="stable")[:CANDIDATES]:
        if worth[group] <= 0.0:
            break
        atom = _judge(facts, side, values, order, int(starts[group]), int(ends[group]))
        if atom is not None:
            found.append(atom)
    return found


def _judge(
    facts: Facts, side: str, values: Floats, order: NDArray[np.intp], start: int, end: int
) -> Atom | None:
    members = order[start:end]
    value = float(values[members[0]])
    reach = max(NEIGHBOURS, (end - start) // 2)
    near = np.concatenate([order[max(0, start - reach) : start], order[end : end + reach]])
    sizes = facts.size[members]
    if len(near) == 0:
        return _alone_in_file(facts, side, value, members)
    usual = quantile(facts.size[near], 0.95)
    bar = max(1.5 * usual, LEAST if value >= 0.0 else 0.0)
    out = sizes > bar
    several = int(out.sum())
    if several == 0:
        return None
    chance = binomial_tail(several, len(members), 0.05 + 1.0 / np.sqrt(len(near)))
    others = (facts.trainer if side == ROLLOUT else facts.rollout)[members][out]
    distinct = len(np.unique(others))
    if chance > ALPHA and value >= 0.0:
        chance *= min(
            1.0,
            2.0
            * min(_at_the_end(facts, members[out]), _side_by_side(facts, members, members[out])),
        )
    if chance > ALPHA:
        elsewhere = np.delete(facts.size, members)
        largest = float(elsewhere.max()) if len(elsewhere) else 0.0
        alone = sizes > max(ALONE * largest, LEAST)
        if value > 0.1:
            alone |= out  # no probability exceeds 1: one is enough
        if not alone.any() or (value < 0.0 and alone.sum() < 3):
            return None
        out, chance = alone, 0.0
    elif distinct < max(2, several // 4):
        return None  # the same context again and again, not a placeholder
    rows = np.zeros(len(facts), dtype=bool)
    rows[members[out]] = True
    return Atom(side, value, rows, chance, usual)


def _at_the_end(facts: Facts, rows: NDArray[np.intp]) -> float:
    """Chance that so many of these tokens are the last of their responses."""
    last = _last(facts)
    return binomial_tail(int(last[rows].sum()), len(rows), float(last.mean()))


def _side_by_side(facts: Facts, members: NDArray[np.intp], rows: NDArray[np.intp]) -> float:
    """Chance that so many of these tokens stand next to another of the same value."""
    same = np.zeros(len(facts) + 1, dtype=bool)
    same[members] = True
    sample = np.append(facts.sample, -1)
    beside = (same[rows + 1] & (sample[rows + 1] == sample[rows])) | (
        same[rows - 1] & (sample[rows - 1] == sample[rows])
    )
    share = min(0.5, 2.0 * len(members) / len(facts))
    return binomial_tail(int(beside.sum()) / 2.0, len(rows) / 2.0, share)


def _alone_in_file(facts: Facts, side: str, value: float, members: NDArray[np.intp]) -> Atom | None:
    """A side of one value: there are no neighbours, so it must be far from the other side."""
    out = members[facts.size[members] > LEAST]
    others = (facts.trainer if side == ROLLOUT else facts.rollout)[out]
    if len(np.unique(others)) < 3:
        return None
    rows = np.zeros(len(facts), dtype=bool)
    rows[out] = True
    return Atom(side, value, rows, 0.0, None)


def detect(facts: Facts) -> Finding | None:
    """Constants at the ends of responses, over whole samples, or scattered."""
    found = atoms(facts)
    if not found:
        return None
    rows = np.zeros(len(facts), dtype=bool)
    said = []
    for atom in found:
        rows |= atom.rows
        count = int(atom.rows.sum())
        others = (facts.trainer if atom.side == ROLLOUT else facts.rollout)[atom.rows]
        said.append(
            f"{count} tokens have exactly {atom.value:g} on the {atom.side} side where the other "
            f"says {others.min():.3g} to {others.max():.3g} (mean |d| "
            f"{facts.size[atom.rows].mean():.3g}); "
            + (
                "that side has no other value"
                if atom.usual is None
                else f"of the values next to it 95 % are within {atom.usual:.3g}"
            )
        )
    said += places(facts, rows)
    concerned = np.unique(facts.sample[rows])
    sides = {atom.side for atom in found if atom.value == 0.0}
    honest = sum(
        int(
            np.count_nonzero(((facts.rollout if side == ROLLOUT else facts.trainer) == 0.0) & ~rows)
        )
        for side in sides
    )
    against = (
        (
            f"{honest} further exact zeros are as near the other side as values next to them: "
            "certain tokens, not counted",
        )
        if honest
        else ()
    )
    return Finding(
        cause(
            "sentinel",
            weight=facts.share(rows),
            claimed=True,
            where=names(facts, concerned),
            fitted={"value": found[0].value, "tokens": float(rows.sum())},
            for_=tuple(said),
            against=against,
        ),
        rows,
    )


def places(facts: Facts, rows: Flags) -> list[str]:
    """Where in their responses these rows stand: sentences with counts."""
    kinds = runs(facts, rows)
    said = [f"{count} {_PLACES[kind]}" for kind, count in kinds.items() if count]
    finish = facts.meta("finish_reason")
    last = np.zeros(len(facts.pairs.samples), dtype=bool)
    last[facts.sample[rows & _last(facts)]] = True
    reasons = sorted({str(one) for one in finish if one is not None})
    if len(reasons) > 1 and kinds["last"]:
        for reason in reasons:
            of = np.array([str(one) == reason for one in finish])
            said.append(f"last token of {int((last & of).sum())} of {int(of.sum())} {reason!r}")
    return ["they are: " + ", ".join(said)] if said else []


_PLACES = {
    "whole": "whole samples",
    "last": "last tokens alone (an end token added by hand?)",
    "tail": "runs at the end (padding, not certainty)",
    "head": "runs at the beginning",
    "inside": "runs inside a response",
    "single": "single tokens inside a response",
}


def runs(facts: Facts, rows: Flags) -> dict[str, int]:
    """How many runs of marked rows are whole samples, last tokens, tails, heads, inside, single."""
    kinds = dict.fromkeys(_PLACES, 0)
    marked = np.flatnonzero(rows)
    if len(marked) == 0:
        return kinds
    sample = facts.sample
    breaks = (np.diff(marked) != 1) | (np.diff(sample[marked]) != 0)
    firsts = marked[np.append(True, breaks)]
    lasts = marked[np.append(breaks, True)]
    opening = np.append(True, sample[1:] != sample[:-1])
    closing = np.append(sample[1:] != sample[:-1], True)
    for first, last in zip(firsts, lasts, strict=True):
        head, tail = bool(opening[first]), bool(closing[last])
        if head and tail:
            kinds["whole"] += 1
        elif tail:
            kinds["last" if first == last else "tail"] += 1
        elif head:
            kinds["head"] += 1
        else:
            kinds["single" if first == last else "inside"] += 1
    return kinds


def _last(facts: Facts) -> Flags:
    sample = facts.sample
    return np.append(sample[1:] != sample[:-1], True) if len(sample) else np.zeros(0, dtype=bool)
