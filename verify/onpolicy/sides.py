"""Whose values two dumps hold, before they are paired: one missing, both exchanged, both the same.

A file that says whose its values are is believed. Where that does not fit its place on the command
line, the whole pair has one fault; where both files hold the same side, the place decides and a
note says so, as two engines are compared by what each of them dumped.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Sample

_NAMES = {
    TRAINER: {"rollout_version": "trainer_version", "rollout_rank": "rank"},
    ROLLOUT: {"trainer_version": "rollout_version", "rank": "rollout_rank"},
}
"""Settings of the other side, under the name that they get in a file taken for this side's."""


@dataclass(frozen=True, eq=False)
class Assigned:
    """Dumps with their sides settled. rollout: None where one dump holds both.

    fault: kind and what, of all samples. own: by side what its file says of all of it, where the
    trainer's file holds no other side's values; else empty.
    """

    trainer: Dump
    rollout: Dump | None
    fault: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def assign(trainer: Dump, rollout: Dump | None) -> Assigned:
    """The dumps as they are to be paired, and what has to be said of that. Raises nothing."""
    ours = _held(trainer)
    if rollout is None:
        return Assigned(trainer, None, _lacking(trainer, ours))
    theirs = _held(rollout)
    if (ours, theirs) == ({ROLLOUT}, {TRAINER}):
        what = (
            "the first file holds the rollout's log-probabilities alone, the second the trainer's"
        )
        return Assigned(trainer, rollout, ("exchanged-files", what))
    notes: list[str] = []
    if ours == theirs == {ROLLOUT}:
        trainer = _taken_for(trainer, TRAINER)
        notes.append("both files hold the sampler's values; the first is taken for the trainer's")
    elif ours == theirs == {TRAINER}:
        rollout = _taken_for(rollout, ROLLOUT)
        notes.append("both files hold the trainer's values; the second is taken for the sampler's")
    if _held(trainer) != {TRAINER}:
        return Assigned(trainer, rollout)
    if _held(rollout) == {ROLLOUT}:
        notes += _copies(trainer, rollout)
    own = {TRAINER: trainer.config, ROLLOUT: rollout.config}
    return Assigned(trainer, rollout, None, tuple(notes), own)


def _held(dump: Dump) -> set[str]:
    return {side for sample in dump.samples for side in sample.series}


def _lacking(dump: Dump, held: set[str]) -> tuple[str, str] | None:
    """Where the only file holds one side's values: the other file was not given."""
    if len(held) != 1:
        return None
    (side,) = held
    other = TRAINER if side == ROLLOUT else ROLLOUT
    file = dump.files[0] if dump.files else "(memory)"
    return "missing-file", f"{file} holds the {side}'s log-probabilities alone: no {other}'s file"


def _taken_for(dump: Dump, side: str) -> Dump:
    """The dump with its values, alternatives, routing and settings under the name of `side`."""
    names = _NAMES[side]

    def named(given: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in given.items()}

    def moved(given: Mapping[str, Any]) -> dict[str, Any]:
        return {name if side in given else side: value for name, value in given.items()}

    def taken(one: Sample) -> Sample:
        meta = named(one.meta)
        if isinstance(meta.get("trainer_version"), list):
            del meta["trainer_version"]  # a trainer scores with one version of its weights
        return replace(
            one,
            series=moved(one.series),
            routing=moved(one.routing),
            top=moved(one.top),
            meta=meta,
        )

    return replace(dump, samples=tuple(map(taken, dump.samples)), config=named(dump.config))


def _copies(trainer: Dump, rollout: Dump) -> list[str]:
    """A word on files that are copies of each other; a file given twice is a fault elsewhere."""
    if not trainer.files or len(trainer.files) != len(rollout.files):
        return []
    for one, two in zip(trainer.files, rollout.files, strict=True):
        with suppress(OSError, ValueError):  # a dump made in memory has no file
            if not os.path.samefile(one, two) and filecmp.cmp(one, two, shallow=False):
                continue
        return []
    return [
        f"{trainer.files[0]} and {rollout.files[0]} are equal byte for byte: a copy of one side's"
        " dump says nothing of the other side; give the file that the other side wrote"
    ]
