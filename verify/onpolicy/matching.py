"""Which record of the trainer belongs to which of the rollout: by key, then by token ids.

A key that several records have, as where the id of a prompt was written for each of its responses,
is told apart by token ids alone. It refuses to guess by order or by text, and to compare a list
with itself because its file was given for both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import stat

from verify.onpolicy.misalignments import Misalignment
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Sample
from verify.rendering.phrases import number

BY_IDS = "the id is that of several records, which are told apart by token ids"

_TELLING = 4
"""Tokens of a response, from which on equal ids are no chance."""

_Sides = tuple[list[Sample], list[Sample]]


@dataclass(frozen=True, eq=False)
class Match:
    """Records of one key. fault: kind and what, where they are not one of each side.

    note: what has to be said of the match, or "".
    """

    key: str
    trainer: list[Sample]
    rollout: list[Sample]
    fault: tuple[str, str] | None = None
    note: str = ""


def matches(trainer: Dump, rollout: Dump | None) -> Iterator[Match]:
    """All records of two dumps, or of one that holds both sides, in the trainer's order."""
    shared = frozenset[str]() if rollout is None else _shared_files(trainer, rollout)
    for key, sides in _by_key(trainer, rollout).items():
        told_apart, rest = _told_apart(sides)
        for ours, theirs in told_apart:
            where = ours.place if len(trainer.files) > 1 else ours.place.record
            name = f"{key} ({where})"
            yield Match(name, [ours], [theirs], _one_list(ours, theirs, shared), BY_IDS)
        ours_left, theirs_left = rest
        if ours_left or theirs_left:
            fault = _unpaired(rest, trainer, rollout)
            fault = fault or _one_list(ours_left[0], theirs_left[0], shared)
            yield Match(key, ours_left, theirs_left, fault)


def _by_key(first: Dump, second: Dump | None) -> dict[str, _Sides]:
    """Samples of both sides by key; of one dump those that hold a side's values stand for it."""
    found: dict[str, _Sides] = {}
    for place, (dump, side) in enumerate(((first, TRAINER), (second or first, ROLLOUT))):
        for sample in dump.samples:
            entry = found.setdefault(sample.key, ([], []))
            if second is not None or side in sample.series or not sample.series:
                entry[place].append(sample)
    return found


def _told_apart(sides: _Sides) -> tuple[list[tuple[Sample, Sample]], _Sides]:
    """Counterparts among records of one key that is on both sides more than once, and the rest."""
    if min(map(len, sides)) < 2:
        return [], sides
    holds_both = {id(one) for one in sides[0]} & {id(one) for one in sides[1]}

    def identity(one: Sample) -> int | bytes | None:
        if id(one) in holds_both:
            return id(one)
        return None if one.tokens is None else one.tokens.tobytes()

    named = [[(identity(one), one) for one in side] for side in sides]
    often = [Counter(name for name, _ in side) for side in named]
    unique = {name for name in often[0] if name is not None and often[0][name] == 1}
    unique &= {name for name in often[1] if often[1][name] == 1}
    counterparts = dict(named[1])
    found = [(one, counterparts[name]) for name, one in named[0] if name in unique]
    ours, theirs = ([one for name, one in side if name not in unique] for side in named)
    return found, (ours, theirs)


def _unpaired(sides: _Sides, trainer: Dump, rollout: Dump | None) -> tuple[str, str] | None:
    for samples, side in zip(sides, (TRAINER, ROLLOUT), strict=True):
        if len(samples) > 1:
            return "duplicate-key", f"{len(samples)} records of the {side} have this id"
    if all(sides):
        return None
    side = ROLLOUT if sides[0] else TRAINER
    if rollout is None:
        return "no-logprobs", f"no record of this id has log-probabilities of the {side}"
    files = ", ".join((rollout if sides[0] else trainer).files)
    return "missing-sample", f"not among the samples of the {side} ({files})"


def _shared_files(one: Dump, two: Dump) -> frozenset[str]:
    """Names of files of `one` that are files of `two` too, under whatever name."""
    by_inode: list[dict[tuple[int, int], str]] = [{}, {}]
    for names, dump in zip(by_inode, (one, two), strict=True):
        for name in dump.files:
            with suppress(OSError, ValueError):  # a dump made in memory has no file
                status = stat(name)
                names[status.st_dev, status.st_ino] = name
    return frozenset(by_inode[0][file] for file in by_inode[0].keys() & by_inode[1].keys())


def _one_list(ours: Sample, theirs: Sample, shared: frozenset[str]) -> tuple[str, str] | None:
    """A list that names no side gets one from its place on the command line: here, both."""
    if ours.place.file not in shared or ours.place.record != theirs.place.record:
        return None
    if {*ours.series} != {TRAINER} or {*theirs.series} != {ROLLOUT}:
        return None
    return "one-list", f"{ours.place} is given as the trainer's and as the rollout's"


def elsewhere(found: Sequence[Misalignment], trainer: Dump, rollout: Dump) -> list[Misalignment]:
    """The same, where the response of a key was found under another key as that.

    A response of the trainer whose ids are those of one other record of the rollout, and which are
    long enough not to be so by chance, was joined by the wrong id.
    """
    if not any(one.kind == "other-tokens" for one in found):
        return list(found)
    ours = {one.key: one.tokens for one in trainer.samples if one.tokens is not None}
    places = {sample.key: at for at, sample in enumerate(rollout.samples)}
    keys: dict[bytes, list[str]] = {}
    for sample in rollout.samples:
        if sample.tokens is not None and len(sample.tokens) >= _TELLING:
            keys.setdefault(sample.tokens.tobytes(), []).append(sample.key)
    moved = {}
    for one in found:
        tokens = ours.get(one.key)
        if one.kind == "other-tokens" and tokens is not None:
            held = keys.get(tokens.tobytes(), [])
            if len(held) == 1 and held[0] != one.key:
                moved[one.key] = held[0]
    steps = {places[held] - places[key] for key, held in moved.items() if key in places}
    further = ""
    if len(moved) > 1 and len(steps) == 1:
        (step,) = steps
        way = "further on" if step > 0 else "further up"
        further = f" ({number(abs(step), 'record')} {way}, as {len(moved):,} responses are)"
    return [
        replace(
            one,
            kind="other-id",
            what=f"the rollout has the trainer's response {one.key} under the id {moved[one.key]}"
            f"{further}; the tokens of both under one id differ",
        )
        if one.kind == "other-tokens" and one.key in moved
        else one
        for one in found
    ]
