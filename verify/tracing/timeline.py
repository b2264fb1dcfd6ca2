"""What a picture of a comparison shows: ranks and modules over the steps, and the first step that
differs, event by event.

It looks at the recordings once more, one rank at a time, since a comparison keeps counts only. It
refuses to draw what does not add up to the counts of the comparison: the recordings have changed
since, as those of a run that is still going do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from verify.errors import InputFileError
from verify.tracing.causes import Cause, Known, origins
from verify.tracing.definitions import Program
from verify.tracing.findings import TraceDiff
from verify.tracing.rank_diffs import within
from verify.tracing.timeline_events import SHOWN, State, StepEvents, events_of
from verify.tracing.timeline_lanes import LIMIT, Lane, Lanes, Spot, lanes, spot
from verify.tracing.timeline_marks import Compared, Side, walk

Pairs = Iterable[tuple[int | None, Side, Side]]
States = dict[int, State]  # by the number of the step
_IN_STEP = (State.ORIGIN, State.DIFFERS, State.ONLY, State.EQUAL, State.NONE)
# Where steps or ranks share a cell, what was not compared must not hide behind what is equal.
_IN_CELL = (State.ORIGIN, State.DIFFERS, State.ONLY, State.NONE, State.EQUAL)


@dataclass(frozen=True)
class Row:
    """The states of a rank or of a lane, one for each step. name: None is the sum over ranks."""

    name: int | Lane | None
    states: tuple[State, ...]

    def runs(self, steps: Sequence[int]) -> Iterator[tuple[State, int, int]]:
        """State, first step and last step of neighbours that have one state."""
        pairs = zip(self.states, steps, strict=True)
        for state, group in groupby(pairs, key=lambda pair: pair[0]):
            numbers = [number for _, number in group]
            yield state, numbers[0], numbers[-1]


@dataclass(frozen=True)
class Timeline:
    """steps: the columns. rank: the one that `lanes` and `events` are of. folded: how many modules
    share a lane with others. events: of the step to look at, None when all is equal."""

    steps: tuple[int, ...]
    ranks: tuple[Row, ...]
    rank: int | None
    lanes: tuple[Row, ...]
    folded: int
    events: StepEvents | None

    @property
    def first(self) -> int | None:
        """The step to look at: the first that differs, or that has something of one run only."""
        return None if self.events is None else self.events.number


def timeline(
    found: TraceDiff, pairs: Pairs, *, shown_lanes: int = LIMIT, shown_events: int = SHOWN
) -> Timeline:
    """The picture of a comparison. pairs: what each run has of each rank; they are taken one after
    the other, and those that were not compared may lack a side. Raises InputFileError."""
    if not found.ranks:  # digests of other kinds: nothing can be drawn
        return Timeline((), (), None, (), 0, None)
    expected = {one.rank: (one.compared, one.differing) for one in found.ranks}
    focus = _focus(found)
    looked = focus[0] if focus else found.ranks[0].rank
    guilty = _guilty(found)
    ranks: dict[int | None, States] = {}
    near: _Near | None = None
    counts: dict[int | None, tuple[int, int]] = {}
    for rank, a, b in pairs:
        if rank == looked:
            near = _Near(guilty.get(rank, {}), focus, shown_events)
            near.lanes = _lanes(a, b, found, focus, shown_lanes)
        ranks[rank] = states = {}
        compared = differing = 0
        for step in walk(a, b, found.steps[1]):
            inside = within(step.number, found.steps)
            if inside:
                compared, differing = compared + step.compared, differing + step.differing
                states[step.number] = _state(step, guilty.get(rank, {}))
            if near is not None and rank == looked:
                near.take(step, inside)
        counts[rank] = (compared, differing)
    if any(counts.get(rank) != known for rank, known in expected.items()):
        raise InputFileError(
            f"{found.a} or {found.b} has changed while it was compared, so no picture fits the "
            "verdict; compare them again when no run writes to them"
        )
    steps = tuple(sorted({number for states in ranks.values() for number in states}))
    return Timeline(
        steps,
        tuple(_row(rank, states, steps) for rank, states in ranks.items()),
        looked,
        near.rows(steps) if near else (),
        near.lanes.folded if near else 0,
        near.events if near else None,
    )


def worst(states: Iterable[State]) -> State:
    """What a cell shows of several steps or ranks."""
    return min(states, key=_IN_CELL.index, default=State.NONE)


@dataclass
class _Near:
    """The rank that is looked at closely. guilty: (step, place) of origins that are known."""

    guilty: Mapping[tuple[int, int], Cause]
    focus: tuple[int | None, int, int | None] | None
    shown: int
    lanes: Lanes = field(default_factory=lambda: Lanes((), {}, 0))
    events: StepEvents | None = None
    known: Known = field(default_factory=Known)
    states: dict[int, States] = field(default_factory=dict)  # by lane

    def take(self, step: Compared, inside: bool) -> None:
        """One step after the other, those before the range too: they say what is known."""
        at = None if self.focus is None else self.focus[1]
        causes = {place: cause for (of, place), cause in self.guilty.items() if of == step.number}
        if at == step.number and step.pair is not None:
            for origin in origins(
                step.number,
                step.pair.a,
                step.pair.calls,
                step.marks,
                self.known,
                self.known.drawn(step.moved),
                step.hidden,
            ):
                causes.update(dict.fromkeys(origin.places, origin.cause))
        if at == step.number:
            self.events = events_of(step, causes, self.shown)
        early = at is not None and step.number < at
        if early and step.pair is not None and (step.differing or not self.known.clean):
            self.known.border(step.pair.a, step.marks, hidden=step.hidden)
        if inside:
            for lane, states in self._lane_states(step, causes).items():
                self.states.setdefault(lane, {})[step.number] = min(states, key=_IN_STEP.index)

    def rows(self, steps: Sequence[int]) -> tuple[Row, ...]:
        return tuple(
            _row(lane, self.states.get(place, {}), steps)
            for place, lane in enumerate(self.lanes.shown)
        )

    def _lane_states(self, step: Compared, causes: Mapping[int, Cause]) -> dict[int, set[State]]:
        found: dict[int, set[State]] = {}

        def add(program: Program, place: int, state: State) -> None:
            found.setdefault(self._lane(program, place), set()).add(state)

        if step.pair is None:
            for only in (step.a, step.b):
                for place in range(len(only) if only is not None else 0):
                    assert only is not None
                    add(only.program, place, State.ONLY)
            return found
        for place, mark in enumerate(step.marks):
            if place in causes:
                add(step.pair.a, place, State.ORIGIN)
            elif mark is not None:
                add(step.pair.a, place, State.DIFFERS if mark else State.EQUAL)
            else:
                add(step.pair.a, place, State.ONLY if place in step.only_a else State.NONE)
        for place in step.only_b:
            add(step.pair.b, place, State.ONLY)
        return found

    def _lane(self, program: Program, place: int) -> int:
        key = id(program)
        if key not in self._spots:
            self._spots[key] = [self.lanes.of[spot(one)] for one in program.definitions]
        return self._spots[key][place]

    _spots: dict[int, list[int]] = field(default_factory=dict)


def _focus(found: TraceDiff) -> tuple[int | None, int, int | None] | None:
    """Rank, step and place (in A) to look at closely."""
    if found.culprit is not None:
        place = found.culprit.place
        return place.rank, place.step, place.index
    firsts = [one.first for one in found.ranks if one.first is not None]
    if firsts:
        first = min(firsts, key=lambda one: (one.step, one.index))
        return first.rank, first.step, first.index
    if found.unmatched:
        lone = min(found.unmatched, key=lambda one: one.first_step)
        return lone.rank, lone.first_step, None
    return None


def _guilty(found: TraceDiff) -> dict[int | None, dict[tuple[int, int], Cause]]:
    """By rank, the places of the culprit and of other origins that the comparison lists."""
    guilty: dict[int | None, dict[tuple[int, int], Cause]] = {}
    for one in (*([found.culprit] if found.culprit else ()), *found.others):
        guilty.setdefault(one.place.rank, {})[one.place.step, one.place.index] = one.cause
    return guilty


def _state(step: Compared, guilty: Mapping[tuple[int, int], Cause]) -> State:
    if step.pair is None:
        return State.ONLY
    if step.differing:
        origin = any(number == step.number for number, _ in guilty)
        return State.ORIGIN if origin else State.DIFFERS
    if step.only_a or step.only_b:
        return State.ONLY
    return State.EQUAL if "" in step.marks else State.NONE


def _lanes(
    a: Side,
    b: Side,
    found: TraceDiff,
    focus: tuple[int | None, int, int | None] | None,
    limit: int,
) -> Lanes:
    """The lanes of the programs of both sides, that of the step to look at first."""
    programs: list[Program] = []
    near: Spot | None = None
    for side in (a, b):
        for step in side.recording.steps if side.recording is not None else ():
            if focus is not None and step.number == focus[1]:
                programs.insert(0 if side is a else 1, step.program)
                if side is a and focus[2] is not None:
                    near = spot(step.program.definitions[focus[2]])
            elif within(step.number, found.steps):
                programs.append(step.program)
    return lanes({id(one): one for one in programs}.values(), near, limit)


def _row(name: int | Lane | None, states: States, steps: Sequence[int]) -> Row:
    return Row(name, tuple(states.get(number, State.NONE) for number in steps))
