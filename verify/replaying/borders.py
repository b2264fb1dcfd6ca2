"""Where in a whole run a resumed one goes on: found by its state, not by what it says.

No script has to tell its step number: the state that it loaded is the one that some step of the
whole run began with, so the step that began with most of it is the one. The more parameters agree
the better, then the more of buffers and optimizer state, then generators; of equals the one that is
expected. The first step only counts if no other one has more of all but the parameters.

Then both recordings are written again from that step on, numbered alike, with the state that it
begins with as their start, so that any comparison of recordings can compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verify.replaying.orders import BEFORE
from verify.tracing.causes import STATE
from verify.tracing.definitions import LANES_BYTES, START, Definition, Key, Program, Recording, Step
from verify.tracing.files import TraceWriter

Value = tuple[str, tuple[int, ...], object, bytes]
"""Dtype, shape, where it lies in a whole, and lanes: equal for equal values."""


State = Mapping[Key, Value]


class States:
    """The states of one rank's recording: at the start, and as each step begins."""

    def __init__(self, recording: Recording) -> None:
        self.steps = {step.number: step for step in recording.steps}
        self._places: dict[int, dict[Key, int]] = {}

    @property
    def start(self) -> State:
        """What the recording began with; it has no step when it is of a run without a start."""
        step = self.steps.get(START)
        return {} if step is None else _values(step, dict(_border_places(step.program)))

    def places(self, number: int) -> dict[Key, int]:
        """Where in a step's entries the state that it began with is, by the keys of borders."""
        program = self.steps[number].program
        found = self._places.get(id(program))
        if found is None:
            found = self._places[id(program)] = dict(_opening_places(program))
        return found

    def opening(self, number: int) -> State:
        """The state that a step began with."""
        return _values(self.steps[number], self.places(number))

    def having(self, key: Key, value: Value) -> list[int]:
        """The steps that began with this very value; START when the recording did."""
        found = [START] if self.start.get(key) == value else []
        for number, step in self.steps.items():
            index = self.places(number).get(key) if number > START else None
            if index is not None and value_at(step, index) == value:
                found.append(number)
        return found


@dataclass(frozen=True)
class Border:
    """The step behind which a run goes on, START for the beginning. whole: whether all of the
    parameters agree."""

    step: int
    whole: bool


def border_of(whole: Mapping[int, States], begun: Mapping[int, State], expected: int) -> Border:
    """The border of `whole` at which a run begins. begun: its state there, by rank. expected: the
    step before that border."""
    scores: dict[int, tuple[int, int, int]] = {}
    ranks = sorted(set(whole) & set(begun))
    steps = set.intersection(*(set(whole[rank].steps) for rank in ranks)) if ranks else set()
    for number in steps - {START}:
        score = [0, 0, 0]
        for rank in ranks:
            places, step = whole[rank].places(number), whole[rank].steps[number]
            for key, value in begun[rank].items():
                if key in places and value_at(step, places[key]) == value:
                    score[{"parameter": 0, "rng": 2}.get(key[1], 1)] += 1
        scores[number - 1] = (score[0], score[1], score[2])
    if not scores:
        return Border(expected, False)
    near = {number: -abs(number - expected) for number in scores}
    best = max(scores, key=lambda number: (scores[number], near[number]))
    if best == START:  # weights may not have been loaded, and all else was
        other = max(scores, key=lambda number: (scores[number][1:], near[number]))
        best = other if scores[other][1] > scores[best][1] else best
    parameters = sum(key[1] == "parameter" for rank in ranks for key in begun[rank])
    return Border(best, scores[best][0] == parameters > 0)


def found_state(one: Definition) -> tuple[str, str, str] | None:
    """Name, kind and path of the state that an entry at the beginning of a step holds, as borders
    have them; None for all other entries."""
    if one.kind == "rng" and one.path == BEFORE:
        return one.name, "rng", ""
    if one.kind == "probe" and one.path.endswith(BEFORE):
        kind, _, name = one.name.partition(" ")
        return name, kind, one.path.removesuffix(BEFORE).rstrip()
    return None


def write_rest(run: Mapping[int, Recording], first: int, shift: int, folder: Path) -> Path:
    """Writes a run from its step `first` on, with the state that this step began with as the start.

    shift: what is added to the numbers of steps. Without such a step the run's own start is kept.
    """
    for recording in run.values():
        writer = TraceWriter(folder, recording.header)
        numbers = [step.number for step in recording.steps]
        for step in recording.steps:
            if step.number == first:
                _write(writer, START, step, opening=True)
            elif step.number == START and first not in numbers:
                _write(writer, START, step)
            if step.number >= first > START:
                _write(writer, step.number + shift, step)
        if recording.complete:
            writer.close(recording.reason or "finished", recording.skipped)
        else:
            writer.leave()
    return folder


def value_at(step: Step, index: int) -> Value:
    """The value of an entry."""
    one = step.program.definitions[index]
    lanes = step.lanes[index * LANES_BYTES : (index + 1) * LANES_BYTES]
    return (one.dtype, one.shape, one.whole, lanes)


def places_of(program: Program) -> dict[Key, int]:
    """Where each event of a program is."""
    return {key: index for index, key in enumerate(program.keys)}


def _values(step: Step, places: Mapping[Key, int]) -> State:
    return {key: value_at(step, index) for key, index in places.items()}


def _border_places(program: Program) -> Iterator[tuple[Key, int]]:
    for index, one in enumerate(program.definitions):
        if one.kind in STATE and one.path != BEFORE:
            yield program.keys[index], index


def _opening_places(program: Program) -> Iterator[tuple[Key, int]]:
    for index, one in enumerate(program.definitions):
        found = found_state(one)
        if found is not None:
            yield (*found, program.occurrences[index]), index


def _write(writer: TraceWriter, number: int, step: Step, *, opening: bool = False) -> None:
    """Writes a step without the state that it began with, or that state as a start."""
    ids, lanes = [], []
    for index, one in enumerate(step.program.definitions):
        found = found_state(one)
        names = [(one.name, one.kind, one.path)]
        if opening:
            if found is None:
                continue
            names = [found, (one.name, one.kind, one.path)] if one.kind == "rng" else [found]
        elif found is not None and one.kind != "rng":
            continue
        for name in names:
            fields = (*name, one.dtype, one.shape)
            ids.append(writer.define(*fields, module=one.module, whole=one.whole))
            lanes.append(step.lanes[index * LANES_BYTES : (index + 1) * LANES_BYTES])
    writer.step(number, ids, b"".join(lanes), failed=step.failed and not opening)
