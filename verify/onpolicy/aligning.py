"""Aligns one sample of the trainer with one of the rollout, token by token, or says why not.

By ids alone. A list that covers the prompt too is cut where its own first entry shows that it does;
nothing else is cut, padded or moved to make it fit. What is left out is said in a note.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.lengths import Fault, check_lengths, fitting_ends
from verify.onpolicy.samples import ROLLOUT, SIDES, TRAINER, Sample, Series

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Aligned:
    """The tokens of one sample that both sides speak of. All arrays are [n].

    tokens: int64, None where the record has no ids. trainer, rollout: float64. counted, present:
    bool, as in Pairs.
    """

    tokens: Ids | None
    trainer: NDArray[np.float64]
    rollout: NDArray[np.float64]
    counted: NDArray[np.bool_]
    present: NDArray[np.bool_]


@dataclass
class Findings:
    """What aligning one sample brought up: faults by kind, and notes that many samples share."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        self.faults.append((kind, what))


def align(trainer: Sample, rollout: Sample) -> tuple[Aligned | None, Findings]:
    """One sample of each side, or one record twice; None where nothing can be scored."""
    found = Findings()
    records = {TRAINER: trainer, ROLLOUT: rollout}
    missing = [side for side in SIDES if side not in records[side].series]
    for side in missing:
        found.add("no-logprobs", _without_values(records[side], side))
    if missing:
        return None, found
    starts = {
        side: 0 if record.prompt is None else len(record.prompt) for side, record in records.items()
    }
    ids = _ids(trainer, rollout, starts, found)
    if ids is None:
        return None, found
    common = _common(ids, records, found)
    if common < 0 or not _same_prompt(trainer, rollout, found):
        return None, found
    series: dict[str, Series | None] = {}
    masks: dict[str, NDArray[np.bool_] | None] = {}
    for side, record in records.items():
        length = _length(ids[side], record.series[side])
        series[side] = _fitted(side, record.series[side], length, starts[side], found)
        masks[side] = _mask(side, record, length, starts[side], found)
    one, two = series[TRAINER], series[ROLLOUT]
    if one is None or two is None or _misfits(one, two, found):
        _tell_ends(records, found)
        return None, found
    found.faults += check_lengths(trainer, rollout, series, masks)
    return _cut(ids, one, two, masks, common, found), found


def _without_values(record: Sample, side: str) -> str:
    others = ", ".join(sorted(record.series)) or "none"
    return f"no log-probabilities of the {side} in {record.place}; it has those of: {others}"


def _ids(
    trainer: Sample, rollout: Sample, starts: dict[str, int], found: Findings
) -> dict[str, Ids | None] | None:
    """Ids of the response by side. starts: tokens before it, set where the ids show them."""
    a, b = trainer.tokens, rollout.tokens
    if trainer is rollout:
        if a is None:
            found.notes.append(
                "the record has no token ids; that its two lists speak of the same tokens is its"
                " own word"
            )
        return {TRAINER: a, ROLLOUT: a}
    if a is None or b is None:
        shared = _shared_values(trainer, rollout)
        if not shared:
            lacking = [side for side, ids in ((TRAINER, a), (ROLLOUT, b)) if ids is None]
            found.add("no-token-ids", f"no token ids on the side of: {', '.join(lacking)}")
            return None
        found.notes.append(
            f"token ids of one side only; both records carry the same {shared} log-probabilities,"
            " value for value, so that they speak of the same tokens"
        )
        return {TRAINER: a if a is not None else b, ROLLOUT: b if b is not None else a}
    extra = _prompt_on_both(a, b, trainer, rollout)
    if extra:
        found.notes.append(
            "token ids of both sides cover prompt and response, with no value for the first; the"
            " prompt is not compared"
        )
        starts.update(dict.fromkeys(SIDES, extra))
        return {TRAINER: a[extra:], ROLLOUT: b[extra:]}
    return {
        TRAINER: _without_prompt(TRAINER, a, b, (trainer.prompt, rollout.prompt), starts, found),
        ROLLOUT: _without_prompt(ROLLOUT, b, a, (rollout.prompt, trainer.prompt), starts, found),
    }


def _prompt_on_both(a: Ids, b: Ids, trainer: Sample, rollout: Sample) -> int:
    """Length of the prompt that both sides' ids begin with, else 0.

    A response may repeat its prompt: only the missing value of a first token, which nothing
    predicts, tells that the prompt itself is there.
    """
    prompt = trainer.prompt if trainer.prompt is not None else rollout.prompt
    if prompt is None or not len(prompt):
        return 0
    for ids, series in ((a, trainer.series[TRAINER]), (b, rollout.series[ROLLOUT])):
        starts = len(series.values) == len(ids) and bool(series.absent[:1].any())
        if not starts or not np.array_equal(ids[: len(prompt)], prompt):
            return 0
    return len(prompt)


def _shared_values(trainer: Sample, rollout: Sample) -> str:
    """The side whose log-probabilities both records carry, equal and not all the same number."""
    for side in SIDES:
        one, two = trainer.series.get(side), rollout.series.get(side)
        if one is None or two is None or len(one.values) != len(two.values):
            continue
        if np.array_equal(one.values, two.values) and len(np.unique(one.values)) > 1:
            return side
    return ""


def _without_prompt(
    side: str,
    ids: Ids,
    others: Ids,
    prompts: tuple[Ids | None, ...],
    starts: dict[str, int],
    found: Findings,
) -> Ids:
    """The ids of the response where they begin with the prompt and the other side's do not."""
    extra = len(ids) - len(others)
    if extra <= 0 or not np.array_equal(ids[extra:], others):
        return ids
    for prompt in prompts:
        if prompt is not None and np.array_equal(ids[:extra], prompt):
            found.notes.append(
                f"the {side}'s token ids cover prompt and response; the prompt is not compared"
            )
            starts[side] = extra
            return ids[extra:]
    return ids


def _common(ids: dict[str, Ids | None], records: dict[str, Sample], found: Findings) -> int:
    """How many tokens both sides have from the start on; -1 where they are other tokens."""
    a, b = ids[TRAINER], ids[ROLLOUT]
    if a is None or b is None:
        return min(_length(ids[side], records[side].series[side]) for side in SIDES)
    if a is b or np.array_equal(a, b):
        return len(a)
    shorter = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shorter] != b[:shorter])
    if unequal.size:
        found.add("other-tokens", _other_tokens(a, b, int(unequal[0]), len(unequal), records))
        return -1
    longer, side = (a, TRAINER) if len(a) > len(b) else (b, ROLLOUT)
    extra = len(longer) - shorter
    tail = f"{len(a)} tokens of the trainer, {len(b)} of the rollout, the first {shorter} equal"
    if extra == 1:
        last = int(longer[-1])
        ends = {int(end) for one in records.values() for end in one.meta.get("eos_token_ids") or ()}
        named = " = EOS" if last in ends else "" if ends else " (EOS?)"
        found.add("end-token", f"the {side} has 1 token more, id {last}{named}; {tail}")
    else:
        found.add("truncated", f"the {side} has {extra} tokens more; {tail}")
    return shorter


def _other_tokens(a: Ids, b: Ids, first: int, count: int, records: dict[str, Sample]) -> str:
    text = (
        f"ids differ from position {first}: {a[first]} of the trainer, {b[first]} of the rollout;"
        f" {len(a)} and {len(b)} tokens, {count} of the first {min(len(a), len(b))} differ"
    )
    gap = abs(len(a) - len(b))
    short, long = sorted((a, b), key=len)
    if gap and len(short) and np.array_equal(long[gap:], short):
        side = TRAINER if short is a else ROLLOUT
        return f"{text}; the {side}'s are the other's without the first {gap}"
    one, two = (records[side].text for side in SIDES)
    if one is not None and one == two:
        return f"{text}; the text is the same: decoded and encoded again"
    return text


def _same_prompt(trainer: Sample, rollout: Sample, found: Findings) -> bool:
    a, b = trainer.prompt, rollout.prompt
    if a is None or b is None or a is b or np.array_equal(a, b):
        return True
    longer, shorter, side = (a, b, TRAINER) if len(a) > len(b) else (b, a, ROLLOUT)
    extra = len(longer) - len(shorter)
    lengths = f"{len(a)} tokens of the trainer, {len(b)} of the rollout"
    if not extra or not np.array_equal(longer[extra:], shorter):
        unequal = np.flatnonzero(a[: min(len(a), len(b))] != b[: min(len(a), len(b))])
        first = int(unequal[0]) if unequal.size else min(len(a), len(b))
        found.add("other-prompt", f"prompts differ from position {first}; {lengths}")
        return False
    stated = (trainer if side == TRAINER else rollout).meta.get("padding")
    if stated == extra or (extra > 1 and len(np.unique(longer[:extra])) == 1):
        found.notes.append(f"the {side}'s prompt is padded on the left; padding is not compared")
        return True
    added = f"the {side}'s prompt has {extra} more at its start"
    one = f", id {longer[0]}: a start token, or padding that meta.padding does not state"
    found.add("other-prompt", f"{added}{one if extra == 1 else ''}; {lengths}")
    return False


def _length(ids: Ids | None, series: Series) -> int:
    return len(series.values) if ids is None else len(ids)


def _fitted(side: str, series: Series, length: int, start: int, found: Findings) -> Series | None:
    """The values of the response; None, and a fault, where the list does not say which they are."""
    given = len(series.values)
    if given == length:
        return series
    if start and given == start + length:
        first = series.values[0]
        if series.absent[0] or np.isnan(first) or first == 0:
            found.notes.append(
                f"the {side}'s list covers prompt and response and its first entry is empty;"
                " the last entries, one per token of the response, are used"
            )
            return Series(series.values[start:], series.absent[start:], series.stored)
        found.add(
            "prompt-included",
            f"the {side}'s list has {given} entries for {start} + {length} tokens and begins with"
            f" {first:.6g}, though nothing predicts the first token",
        )
        return None
    extra = given - length
    which = f"{extra} too many" if extra > 0 else f"{-extra} too few"
    hint = " (stop token?)" if extra == 1 else ""
    found.add("length", f"the {side}: ids {length}, log-probabilities {given}: {which}{hint}")
    return None


def _mask(
    side: str, record: Sample, length: int, start: int, found: Findings
) -> NDArray[np.bool_] | None:
    mask = record.mask
    if mask is None or len(mask) == length:
        return mask
    if start and len(mask) == start + length:
        found.notes.append(
            f"the {side}'s mask covers prompt and response; its last entries are used"
        )
        return mask[start:]
    fault = ("mask-length", f"mask of {len(mask)} entries for {length} tokens in {record.place}")
    if fault not in found.faults:  # one record may be both sides
        found.faults.append(fault)
    return None


def _misfits(one: Series, two: Series, found: Findings) -> bool:
    kinds = {kind for kind, _ in found.faults}
    sizes = len(one.values), len(two.values)
    if sizes[0] != sizes[1] and not kinds & {"end-token", "truncated"}:
        found.add(
            "length", f"log-probabilities: {sizes[0]} of the trainer, {sizes[1]} of the rollout"
        )
        return True
    return "mask-length" in kinds


def _tell_ends(records: dict[str, Sample], found: Findings) -> None:
    """Adds to a fault of length at which end the surplus seems to be, in numbers."""
    told = fitting_ends(*(records[side].series[side].values for side in SIDES))
    if told:
        found.faults = [
            (kind, f"{what}; {told}") if kind == "length" else (kind, what)
            for kind, what in found.faults
        ]


def _cut(
    ids: dict[str, Ids | None],
    one: Series,
    two: Series,
    masks: dict[str, NDArray[np.bool_] | None],
    common: int,
    found: Findings,
) -> Aligned:
    tokens = ids[TRAINER]
    ours, theirs = masks[TRAINER], masks[ROLLOUT]
    if ours is not None and theirs is not None and ours is not theirs:
        _compare_masks(ours[:common], theirs[:common], found)
    mask = ours if ours is not None else theirs
    return Aligned(
        None if tokens is None else tokens[:common],
        one.values[:common],
        two.values[:common],
        np.ones(common, bool) if mask is None else mask[:common],
        ~(one.absent[:common] | two.absent[:common]),
    )


def _compare_masks(ours: NDArray[np.bool_], theirs: NDArray[np.bool_], found: Findings) -> None:
    added = np.flatnonzero(ours & ~theirs)
    if added.size:
        found.add(
            "other-mask",
            f"the trainer counts {added.size} tokens that the rollout's mask leaves out, the first"
            f" at position {added[0]}; masks count {int(ours.sum())} and {int(theirs.sum())}",
        )
    elif np.any(theirs & ~ours):
        found.notes.append("the trainer's mask leaves out tokens that the rollout's counts")
