"""Pairs what the trainer and the sampler say of the same token: by sample key, then by token id.

Never by text, and never by guessing: lists that do not fit their tokens, other tokens and other
prompts are reported as misalignments and not scored, and so is a list that would be compared with
itself. What remains stands in columns, one row per token, that numbers, metrics and causes are
computed from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.aligning import Aligned, align
from verify.onpolicy.matching import elsewhere, matches
from verify.onpolicy.misalignments import Misalignment
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Problem, Sample
from verify.onpolicy.sides import assign
from verify.onpolicy.spelling import coarseness, same_float32

__all__ = ["Misalignment", "Paired", "Pairs", "pair"]

ONE_SOURCE = (
    "both sides are of one file and equal in every value; they are so too where a trainer that does"
    " not score again writes the sampler's values as its own"
)


@dataclass(frozen=True, eq=False)
class Paired:
    """One sample that both sides speak of. Its tokens are rows start .. stop of the columns.

    trainer and rollout are the same object where one record holds both sides. tokens: int64 [n], or
    None where one record holds both sides' values and no ids.
    """

    key: str
    trainer: Sample
    rollout: Sample
    tokens: NDArray[np.int64] | None
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Pairs:
    """Columns over all tokens of all samples that could be aligned, in the trainer's order.

    sample: int32 [N], index into samples. position: int32 [N], in the response. token: int64 [N],
    -1 where it is unknown. trainer, rollout: float64 [N], log-probabilities, NaN where absent.
    counted: bool [N], the mask (True without one). present: bool [N], both sides have a value
    there, NaN and infinities included. misalignments: what could not be aligned, or only in part.
    problems, notes: of the files and of pairing. config: of both files, the rollout's first; own:
    that of each, where the trainer's file speaks for the trainer alone, else empty.
    """

    samples: tuple[Paired, ...]
    sample: NDArray[np.int32]
    position: NDArray[np.int32]
    token: NDArray[np.int64]
    trainer: NDArray[np.float64]
    rollout: NDArray[np.float64]
    counted: NDArray[np.bool_]
    present: NDArray[np.bool_]
    misalignments: tuple[Misalignment, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def scored(self) -> NDArray[np.bool_]:
        """bool [N]: the mask counts it and both sides have a value."""
        return self.counted & self.present

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """bool [N]: scored, and neither value is NaN or infinite."""
        return self.scored & np.isfinite(self.trainer) & np.isfinite(self.rollout)

    @cached_property
    def difference(self) -> NDArray[np.float64]:
        """float64 [N]: trainer - rollout; NaN where a value is absent or NaN, or both infinite."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.trainer - self.rollout


def pair(trainer: Dump, rollout: Dump | None = None) -> Pairs:
    """Aligns two dumps, or, where `rollout` is None, the two sides that one dump holds.

    Of two dumps the trainer's values are taken from the first and the rollout's from the second.
    Where one record of a key holds the trainer's values and another the rollout's, one dump is
    paired by key too. Records of one key, as where the prompt's id was written for each of its
    responses, are told apart by their token ids. Nothing raises: what does not fit is in
    misalignments.
    """
    sides = assign(trainer, rollout)
    trainer, rollout = sides.trainer, sides.rollout
    built = _Columns()
    for match in matches(trainer, rollout):
        if match.note:
            built.note(match.note, match.key)
        fault = sides.fault or match.fault
        if fault:
            records = (*match.trainer, *match.rollout)
            built.misaligned(fault[0], match.key, records, fault[1])
        else:
            built.add(match.key, match.trainer[0], match.rollout[0])
    dumps = (trainer,) if rollout is None else (rollout, trainer)
    notes = [note for dump in dumps for note in dump.notes]
    notes += sides.notes
    config = {name: value for dump in reversed(dumps) for name, value in dump.config.items()}
    problems = tuple(problem for dump in dumps for problem in dump.problems)
    if rollout is not None:
        built.misalignments = elsewhere(built.misalignments, trainer, rollout)
    pairs = built.pairs(problems, notes, config, sides.own)
    if rollout is None and pairs.scored.any() and not np.any(pairs.difference[pairs.scored]):
        return replace(pairs, notes=(*pairs.notes, ONE_SOURCE))
    return pairs


class _Columns:
    """Gathers aligned samples and joins them once, at the end."""

    def __init__(self) -> None:
        self.samples: list[Paired] = []
        self.parts: list[Aligned] = []
        self.rows = 0
        self.misalignments: list[Misalignment] = []
        self.notes: dict[str, list[str]] = {}

    def misaligned(self, kind: str, key: str, samples: Sequence[Sample], what: str) -> None:
        places = tuple(dict.fromkeys(sample.place for sample in samples))
        self.misalignments.append(Misalignment(kind, key, places, what))

    def note(self, what: str, key: str) -> None:
        self.notes.setdefault(what, []).append(key)

    def add(self, key: str, trainer: Sample, rollout: Sample) -> None:
        aligned, found = align(trainer, rollout)
        for kind, what in found.faults:
            self.misaligned(kind, key, (trainer, rollout), what)
        for note in found.notes:
            self.note(note, key)
        if aligned is None:
            return
        stop = self.rows + len(aligned.trainer)
        self.samples.append(Paired(key, trainer, rollout, aligned.tokens, self.rows, stop))
        self.parts.append(aligned)
        self.rows = stop

    def pairs(
        self,
        problems: tuple[Problem, ...],
        notes: list[str],
        config: Mapping[str, Any],
        own: Mapping[str, Mapping[str, Any]],
    ) -> Pairs:
        lengths = np.array([len(part.trainer) for part in self.parts], np.int64)
        starts = np.cumsum(lengths) - lengths
        trainer = _joined([part.trainer for part in self.parts], np.float64)
        rollout = _joined([part.rollout for part in self.parts], np.float64)
        spelled = same_float32(trainer, rollout)
        if spelled.any():
            trainer[spelled] = rollout[spelled] = trainer[spelled].astype(np.float32)
            notes.append(
                "tokens with the same float32 on both sides, written in two ways, which count as"
                f" equal: {int(spelled.sum())}"
            )
        for side, column in ((TRAINER, trainer), (ROLLOUT, rollout)):
            if few := coarseness(column):
                notes.append(
                    f"the {side}'s values are written with at most {few}; a difference below the"
                    " last one is not seen"
                )
        for note, keys in self.notes.items():
            count = "1 sample" if len(keys) == 1 else f"{len(keys)} samples"
            notes.append(f"{count}, first {keys[0]}: {note}")
        return Pairs(
            tuple(self.samples),
            np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            (np.arange(self.rows, dtype=np.int64) - np.repeat(starts, lengths)).astype(np.int32),
            _joined([_known(part) for part in self.parts], np.int64),
            trainer,
            rollout,
            _joined([part.counted for part in self.parts], np.bool_),
            _joined([part.present for part in self.parts], np.bool_),
            tuple(self.misalignments),
            problems,
            tuple(notes),
            config,
            own,
        )


def _known(part: Aligned) -> NDArray[np.int64]:
    return np.full(len(part.trainer), -1, np.int64) if part.tokens is None else part.tokens


def _joined(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
