"""One step of one rank, event by event: A's and B's in one order of execution, with what each says.

A step of a real model has a thousand events and more, of which those around an origin tell the
story. The others are folded into counts where they stand; it refuses to drop one uncounted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from verify.tracing.causes import Cause
from verify.tracing.definitions import Event, Step
from verify.tracing.findings import label
from verify.tracing.timeline_lanes import spot
from verify.tracing.timeline_marks import Compared

SHOWN = 400  # events that are shown one by one


class State(StrEnum):
    """What is drawn of an event, or of all events of a step, a rank or a lane. ORIGIN: it differs,
    and what it was made of does not. ONLY: one run has it. NONE: not compared, or not there."""

    EQUAL = "equal"
    DIFFERS = "differs"
    ORIGIN = "origin"
    ONLY = "only"
    NONE = "none"


@dataclass(frozen=True)
class ShownEvent:
    """An event. at: its place in the common order. a, b: its places in the runs, None where it is
    not. phase: one of PHASES. cause: of an origin. digests: as text, "" where it is not."""

    at: int
    a: int | None
    b: int | None
    label: str
    module: str
    phase: str
    state: State
    difference: str
    cause: Cause | None
    digest_a: str
    digest_b: str


@dataclass(frozen=True)
class Folded:
    """Neighbouring events that are only counted, by state."""

    first: int
    last: int
    counts: tuple[tuple[State, int], ...]


@dataclass(frozen=True)
class StepEvents:
    """A step. items: in the order of execution. counts: of all its events, by state."""

    number: int
    items: tuple[ShownEvent | Folded, ...]
    counts: Mapping[State, int]

    @property
    def shown(self) -> Iterator[ShownEvent]:
        return (one for one in self.items if isinstance(one, ShownEvent))


def events_of(step: Compared, causes: Mapping[int, Cause], limit: int = SHOWN) -> StepEvents:
    """The events of a step. causes: of A's places that are origins. limit: how many to show."""
    order = _order(step)
    states = [_state(step, i, j, causes) for i, j in order]
    counts = Counter(states)
    first = leading(counts)
    anchors = [at for at, state in enumerate(states) if state is first]
    kept = _nearest(len(order), anchors, limit)
    items: list[ShownEvent | Folded] = []
    hidden: list[int] = []
    for at, (i, j) in enumerate(order):
        if at in kept:
            if hidden:
                items.append(_fold(hidden, states))
                hidden = []
            items.append(_shown(step, at, i, j, states[at], causes))
        else:
            hidden.append(at)
    if hidden:
        items.append(_fold(hidden, states))
    return StepEvents(step.number, tuple(items), counts)


def fewer(events: StepEvents, limit: int) -> StepEvents:
    """The same step with at most `limit` events shown: those nearest to where to look first."""
    shown = list(events.shown)
    first = leading(events.counts)
    leads = [place for place, one in enumerate(shown) if one.state is first]
    kept = {shown[place].at for place in _nearest(len(shown), leads, limit)}
    items: list[ShownEvent | Folded] = []
    for one in events.items:
        if isinstance(one, ShownEvent) and one.at in kept:
            items.append(one)
            continue
        gone = Folded(one.at, one.at, ((one.state, 1),)) if isinstance(one, ShownEvent) else one
        before = items[-1] if items else None
        if isinstance(before, Folded):
            counts = Counter(dict(before.counts)) + Counter(dict(gone.counts))
            told = tuple((state, counts[state]) for state in State if counts[state])
            items[-1] = Folded(before.first, gone.last, told)
        else:
            items.append(gone)
    return StepEvents(events.number, tuple(items), events.counts)


def leading(counts: Mapping[State, int]) -> State | None:
    """The state to look at first, None when all is equal or was not compared."""
    order = (State.ORIGIN, State.DIFFERS, State.ONLY)
    return next((state for state in order if counts.get(state)), None)


def _order(step: Compared) -> list[tuple[int | None, int | None]]:
    """Places in A and B, in A's order; what only B has stands behind what it ran before."""
    if step.pair is None:
        only = step.a or step.b
        places = range(len(only) if only is not None else 0)
        return [(one, None) if step.a is not None else (None, one) for one in places]
    partners = dict(step.pair.alignment.pairs)
    of_b = {j: i for i, j in step.pair.alignment.pairs}
    behind: dict[int, list[int]] = {}
    last = -1
    for j in range(len(step.pair.b.definitions)):
        if j in of_b:
            last = of_b[j]
        else:
            behind.setdefault(last, []).append(j)
    order: list[tuple[int | None, int | None]] = [(None, j) for j in behind.get(-1, ())]
    for i in range(len(step.pair.a.definitions)):
        order.append((i, partners.get(i)))
        order += [(None, j) for j in behind.get(i, ())]
    return order


def _state(step: Compared, i: int | None, j: int | None, causes: Mapping[int, Cause]) -> State:
    if step.pair is None or i in step.only_a or j in step.only_b:
        return State.ONLY
    if i is None or j is None:
        return State.NONE
    if i in causes:
        return State.ORIGIN
    mark = step.marks[i]
    if mark is None:
        return State.NONE
    return State.DIFFERS if mark else State.EQUAL


def _nearest(count: int, anchors: Sequence[int], limit: int) -> set[int]:
    """The places nearest to an anchor, or the first ones if there is none."""
    if count <= limit:
        return set(range(count))
    far = count + 1
    distance = [0 if not anchors else far] * count
    for at in anchors:
        distance[at] = 0
    for at in range(1, count):
        distance[at] = min(distance[at], distance[at - 1] + 1)
    for at in range(count - 2, -1, -1):
        distance[at] = min(distance[at], distance[at + 1] + 1)
    return set(sorted(range(count), key=lambda at: (distance[at], at))[:limit])


def _fold(places: Sequence[int], states: Sequence[State]) -> Folded:
    counts = Counter(states[at] for at in places)
    return Folded(
        places[0], places[-1], tuple((state, counts[state]) for state in State if counts[state])
    )


def _shown(
    step: Compared,
    at: int,
    i: int | None,
    j: int | None,
    state: State,
    causes: Mapping[int, Cause],
) -> ShownEvent:
    one = _event(step.a, i)
    other = _event(step.b, j)
    known = one or other
    assert known is not None  # an event of the order is in one run at least
    mark = step.marks[i] if i is not None and step.pair is not None else None
    return ShownEvent(
        at,
        i,
        j,
        label(*known.key),
        known.definition.module,
        spot(known.definition)[0],
        state,
        mark or "",
        causes.get(i) if i is not None else None,
        str(one.digest) if one else "",
        str(other.digest) if other else "",
    )


def _event(step: Step | None, place: int | None) -> Event | None:
    return None if step is None or place is None else step.event(place)
