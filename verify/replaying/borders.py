"""Where in a whole run a resumed one goes on: found by its state, not by what it says.

No script has to tell its step number: the state that it loaded is the one that some step of the
whole run began with, so the step that began with most of it is the one. The more parameters agree
the better, then the more of buffers and optimizer state, then generators; of equals the one that is
expected. The first step only counts if no other one has more of all but the parameters.

A checkpoint may be saved inside of a step as recorded: behind a validation, which comes after the
optimizer's step, or behind a step that a loss scaler skipped. So a step has parts, one for each
pass of training in it, with the state that it found, and a run may go on at any of them. What the
resumed run does before its own, such as a validation, changes nothing that the state does not show.

Then both recordings are written again from that step on, numbered alike, with the state that it
begins with as their start, so that any comparison of recordings can compare them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

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
        self._openings: dict[int, list[tuple[int, dict[Key, int]]]] = {}

    def end(self, number: int) -> State:
        """The state that a step left."""
        step = self.steps[number]
        return _values(step, dict(_border_places(step.program)))

    @property
    def start(self) -> State:
        """What the recording began with; it has no step when it is of a run without a start."""
        return self.end(START) if START in self.steps else {}

    def openings(self, number: int) -> list[tuple[int, dict[Key, int]]]:
        """Where a step, and each pass of training in it, begins: the place of its first entry, and
        those of the state there by the keys of borders."""
        program = self.steps[number].program
        found = self._openings.get(id(program))
        if found is None:
            found = self._openings[id(program)] = _openings(program)
        return found

    def places(self, number: int, part: int = 0) -> dict[Key, int]:
        """Where in a step's entries the state is that a part of it began with."""
        return self.openings(number)[part][1] if part < len(self.openings(number)) else {}

    def opening(self, number: int, part: int = 0) -> State:
        """The state that a part of a step began with, 0 for the step itself."""
        return _values(self.steps[number], self.places(number, part))

    def rest(self, number: int, part: int) -> tuple[tuple[str, str, str], ...]:
        """Names, kinds and paths of what a step records from a part on."""
        openings = self.openings(number)
        first = openings[part][0] if part < len(openings) else 0
        definitions = self.steps[number].program.definitions[first:]
        return tuple((one.name, one.kind, one.path) for one in definitions)

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
    parameters agree. part: of the next step, at which it goes on: 0 unless it was saved behind a
    validation or a skipped step. begun: of the resumed run's first step, where it does: 0 unless it
    validates first. fits: how much of parameters and other state agrees, whether the same events
    follow, and how many generators agree."""

    step: int
    whole: bool
    part: int = 0
    begun: int = 0
    fits: tuple[int, int, bool, int] = (0, 0, False, 0)


def resumed_at(whole: Mapping[int, States], resumed: Mapping[int, States], expected: int) -> Border:
    """The border of `whole` at which a resumed run goes on, by the state that its first step began
    with, or any pass of training in it that no gradient came before."""
    found: list[Border] = []
    for part in range(_first_parts(resumed)):
        begun = {
            rank: one.opening(0, part) if 0 in one.steps else one.start
            for rank, one in resumed.items()
        }
        rest = {rank: one.rest(0, part) for rank, one in resumed.items() if 0 in one.steps}
        found.append(replace(border_of(whole, begun, expected, rest), begun=part))
        if found[-1].whole and found[-1].fits[2]:
            break
    return max(found, key=lambda one: (one.fits, -one.begun))


def border_of(
    whole: Mapping[int, States],
    begun: Mapping[int, State],
    expected: int,
    rest: Mapping[int, tuple[tuple[str, str, str], ...]] = MappingProxyType({}),
) -> Border:
    """The border of `whole` at which a run begins. begun: its state there, by rank. expected: the
    step before that border. rest: what its first step records, which tells parts of a step apart
    that begin with one state."""
    scores: dict[tuple[int, int], tuple[int, int, int]] = {}
    ranks = sorted(set(whole) & set(begun))
    steps = set.intersection(*(set(whole[rank].steps) for rank in ranks)) if ranks else set()
    for number in steps - {START}:
        for part in range(min(max(1, len(whole[rank].openings(number))) for rank in ranks)):
            states = {rank: whole[rank].opening(number, part) for rank in ranks}
            scores[number - 1, part] = _alike(states, begun)
    if not scores:
        return Border(expected, False)
    last = max(steps)  # behind it no step begins
    ends = {rank: whole[rank].end(last) for rank in ranks}
    scores[last, 0] = _alike(ends, begun)

    def follows(place: tuple[int, int]) -> bool:
        number, part = place[0] + 1, place[1]
        return number <= last and all(
            whole[rank].rest(number, part) == rest[rank] for rank in ranks if rank in rest
        )

    def likely(place: tuple[int, int]) -> tuple[int, bool, int]:
        return (-abs(place[0] - expected), follows(place), -place[1])

    best = max(scores, key=lambda place: (scores[place], likely(place)))
    if best[0] == START:  # weights may not have been loaded, and all else was
        other = max(scores, key=lambda place: (scores[place][1:], likely(place)))
        best = other if scores[other][1] > scores[best][1] else best
    parameters = sum(key[1] == "parameter" for rank in ranks for key in begun[rank])
    score = scores[best]
    fits = (score[0], score[1], follows(best), score[2])
    return Border(best[0], score[0] == parameters > 0, best[1], fits=fits)


def cut(recording: Recording, number: int, part: int) -> Recording:
    """A recording whose step `number` begins with one of its parts."""
    if part == 0:
        return recording
    steps = []
    for step in recording.steps:
        if step.number == number:
            first = _openings(step.program)[part][0]
            program = Program(step.program.definitions[first:])
            step = replace(step, program=program, lanes=step.lanes[first * LANES_BYTES :])
        steps.append(step)
    return replace(recording, steps=tuple(steps))


def _alike(states: Mapping[int, State], begun: Mapping[int, State]) -> tuple[int, int, int]:
    score = [0, 0, 0]
    for rank, state in states.items():
        for key, value in begun[rank].items():
            if state.get(key) == value:
                score[{"parameter": 0, "rng": 2}.get(key[1], 1)] += 1
    return (score[0], score[1], score[2])


def _first_parts(resumed: Mapping[int, States]) -> int:
    """Parts of the first step that begin before any gradient; at least 1."""
    counts = []
    for one in resumed.values():
        if 0 not in one.steps:
            return 1
        kinds = [d.kind for d in one.steps[0].program.definitions]
        gradient = next((i for i, kind in enumerate(kinds) if kind.startswith("grad")), len(kinds))
        counts.append(sum(first < gradient for first, _ in one.openings(0)))
    return max(1, min(counts, default=1))


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


def _openings(program: Program) -> list[tuple[int, dict[Key, int]]]:
    """Runs of entries that hold the state before what comes next."""
    runs: list[tuple[int, dict[Key, int]]] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    before = None
    for index, one in enumerate(program.definitions):
        found = found_state(one)
        if found is not None:
            if before is None:
                runs.append((index, {}))
                seen.clear()
            runs[-1][1][(*found, seen[found])] = index
            seen[found] += 1
        before = found
    return runs


def _write(writer: TraceWriter, number: int, step: Step, *, opening: bool = False) -> None:
    """Writes a step without the state that it began with, or that state as a start."""
    ids: list[int] = []
    lanes: list[bytes] = []
    for index, one in enumerate(step.program.definitions):
        found = found_state(one)
        names = [(one.name, one.kind, one.path)]
        if opening:
            if found is None and ids:
                break
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
