"""Compares what one rank recorded in two runs, step by step.

Nothing is decoded that is equal: lanes are compared as bytes, and what depends on names only is
worked out once for each pair of programs. It refuses to compare a digest of a shard with that of
another part of the same tensor: such entries are left for the sums over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from verify.tracing.alignment import Alignment, align
from verify.tracing.calls import Calls, calls_of
from verify.tracing.causes import Known, Mark, Origin, hints, origins
from verify.tracing.choices import Gaps
from verify.tracing.definitions import (
    LANES_BYTES,
    START,
    Definition,
    Key,
    Program,
    Recording,
    Step,
)
from verify.tracing.findings import SHOWN, Culprit, Place, label
from verify.tracing.generators import Generators
from verify.tracing.outcomes import Outcome

LATE = (
    "this is the state at the end of the recording: code behind the last step may have changed it"
)
Range = tuple[int | None, int | None]
Conflicts = Mapping[tuple[int, int], str]
_K = TypeVar("_K")


@dataclass(frozen=True)
class Paired:
    """Two programs side by side. forms: of each pair, "" when the digests can be compared, how they
    differ in form, or None when they are of other parts. real: how many pairs hold elements."""

    a: Program
    b: Program
    alignment: Alignment
    forms: tuple[Mark, ...]
    real: int
    plain: bool

    @cached_property
    def calls(self) -> Calls:
        return calls_of(self.a)


def paired(a: Program, b: Program) -> Paired:
    """Pairs two programs."""
    alignment = align(a, b)
    both = [(a.definitions[i], b.definitions[j]) for i, j in alignment.pairs]
    forms = tuple(_form(one, other) for one, other in both)
    real = sum(
        form is not None and math.prod(one.shape) > 0
        for form, (one, _) in zip(forms, both, strict=True)
    )
    return Paired(a, b, alignment, forms, real, alignment.same and not any(map(_odd, forms)))


def compare_rank(
    rank: int | None,
    a: Recording,
    b: Recording,
    steps: Range,
    conflicts: Conflicts,
    whole: tuple[Recording, Recording] | None = None,
) -> Outcome:
    """Compares the steps that both have. conflicts: (step, place in A) of entries that cannot be
    equal, and how they differ; see `shards`. whole: both as they were recorded, where these are
    what they have in common: whether a generator was drawn from, a step may tell that one lacks."""
    outcome, known = Outcome(rank), Known()
    one, two = whole or (a, b)
    generators, gaps = (Generators(one), Generators(two)), Gaps(a.header.steps, b.header.steps)
    cache: dict[tuple[int, int], Paired] = {}
    others = {step.number: step for step in b.steps}
    left: set[str] = set()
    for step in a.steps:
        other = others.get(step.number)
        if other is None or (steps[1] is not None and step.number >= steps[1]):
            continue
        key = (id(step.program), id(other.program))
        pair = cache.get(key) or cache.setdefault(key, paired(step.program, other.program))
        hidden = gaps.before(step.number)
        moved = [side.moved(one) for side, one in zip(generators, (step, other), strict=True)]
        marks = None
        if not pair.plain or step.lanes != other.lanes or not known.clean or conflicts:
            marks = _marks(pair, step, other, conflicts)
            still = _leave_still(pair, marks, generators)
            left.update(step.program.definitions[at].name for at in still)
            unlike = leave_unlike(step, other, marks)
            if unlike and within(step.number, steps):
                outcome.compared -= counting(pair, unlike)
                for at in unlike:
                    key_of = step.program.keys[at]
                    outcome.moments[key_of] = outcome.moments.get(key_of, 0) + 1
            if still and within(step.number, steps):
                outcome.compared -= len(still)
                for at in still:
                    key_of = step.program.keys[at]
                    outcome.still[key_of] = outcome.still.get(key_of, 0) + 1
        if within(step.number, steps):
            _count(outcome, pair, step, other, gaps.saw_alone(step.number))
            outcome.steps += step.number != START and step.number not in hidden
            if marks and any(marks):
                either = {place: moved[0][place] or moved[1].get(place, True) for place in moved[0]}
                # a step that was cut does not tell whether it drew; a model draws from torch's
                may = (step.failed or other.failed) and bool(left - {"numpy", "python"})
                drawn = may or known.drawn(either)
                found = origins(step.number, pair.a, pair.calls, marks, known, drawn, bool(hidden))
                _tell(outcome, pair, step, other, marks, found, hidden, gaps)
        if marks is not None:
            known.border(step.program, marks, hidden=bool(hidden))
    return outcome


def _marks(pair: Paired, step: Step, other: Step, conflicts: Conflicts) -> list[Mark]:
    marks: list[Mark] = [None] * len(step)
    one, two = step.lanes, other.lanes
    for (i, j), form in zip(pair.alignment.pairs, pair.forms, strict=True):
        if form == "":
            at, to = i * LANES_BYTES, j * LANES_BYTES
            same = one[at : at + LANES_BYTES] == two[to : to + LANES_BYTES]
            marks[i] = "" if same else "bits"
        else:
            marks[i] = form
    if conflicts:
        for i in range(len(step)):
            if (step.number, i) in conflicts and marks[i] is not None:
                marks[i] = conflicts[step.number, i]
    return marks


def _leave_still(
    pair: Paired, marks: list[Mark], generators: tuple[Generators, Generators]
) -> list[int]:
    """Unmarks generators that differ though neither run drew from them; returns their places."""
    found = [
        index
        for index, one in enumerate(pair.a.definitions)
        if one.kind == "rng"
        and marks[index]
        and all(side.still((one.name, one.kind, one.path)) for side in generators)
    ]
    for index in found:
        marks[index] = None
    return found


def leave_unlike(step: Step, other: Step, marks: list[Mark]) -> list[int]:
    """Unmarks what differs in state that both have, but of other moments; returns the places."""
    found = [at for at, mark in enumerate(marks) if mark] if step.late != other.late else []
    for at in found:
        marks[at] = None
    return found


def counting(pair: Paired, places: list[int]) -> int:
    """How many of these places of A count as compared."""
    forms = dict(zip((i for i, _ in pair.alignment.pairs), pair.forms, strict=True))
    return sum(
        forms.get(at) is not None and math.prod(pair.a.definitions[at].shape) > 0 for at in places
    )


def of_two_steps(key: Key) -> bool:
    """Whether an event takes a forward and a backward, which may lie in two steps."""
    gradient = key[2] == "grad" or key[2].endswith(".grad")
    return key[1] in ("grad_output", "grad_input") or (key[1] == "probe" and gradient)


def _count(outcome: Outcome, pair: Paired, step: Step, other: Step, excused: str) -> None:
    """Everything about a step that names alone decide. excused: the side, "a" or "b", that alone
    has the step before in full, and with it forwards that the other one did not see; or ""."""
    outcome.compared += pair.real
    outcome.moved += len(pair.alignment.moved)
    if pair.plain:
        return
    pairs = pair.alignment.pairs
    sides = (
        ("a", pair.a, pair.alignment.only_a, other.failed, max((i for i, _ in pairs), default=-1)),
        ("b", pair.b, pair.alignment.only_b, step.failed, max((j for _, j in pairs), default=-1)),
    )
    for side, program, places, cut, last in sides:
        for place in places:
            key = program.keys[place]
            if cut and place > last:  # the other run never came there
                outcome.cut[key] = outcome.cut.get(key, 0) + 1
            elif side in excused and of_two_steps(key):
                outcome.crossing[key] = outcome.crossing.get(key, 0) + 1
            else:
                _note(outcome.unmatched, (side, *key), step.number)
    for (i, j), form in zip(pair.alignment.pairs, pair.forms, strict=True):
        key = pair.a.keys[i]
        if form is None:
            outcome.elsewhere[key] = outcome.elsewhere.get(key, 0) + 1
        elif form:
            shown = (_shown(pair.a.definitions[i]), _shown(pair.b.definitions[j]))
            _note(outcome.forms, (*key, form, *shown), step.number)


def _tell(
    outcome: Outcome,
    pair: Paired,
    step: Step,
    other: Step,
    marks: list[Mark],
    found: list[Origin],
    hidden: range,
    gaps: Gaps,
) -> None:
    """The origins of a step that differs, and what inherits."""
    partners = dict(pair.alignment.pairs)
    differing = [index for index, mark in enumerate(marks) if mark]
    guilty = {place: origin for origin in found for place in origin.places}
    if outcome.first is None:
        first = differing[0]
        outcome.first = _place(outcome.rank, step, other, first, partners[first], marks[first])
        outcome.cause = guilty[first].cause if first in guilty else None
    outcome.differing += len(differing)
    outcome.culprits_count += len(found)
    for origin in found[: max(0, SHOWN + 1 - len(outcome.culprits))]:
        at = origin.places[0]
        place = _place(outcome.rank, step, other, at, partners[at], marks[at])
        definitions = {one: pair.a.definitions[one] for one in origin.places}
        call = pair.calls.around[at]
        late = (LATE,) if step.late else ()
        before = next((one for one in range(at - 1, -1, -1) if marks[one] == ""), None)
        outcome.culprits.append(
            Culprit(
                origin.cause,
                place,
                tuple(dict.fromkeys(one.name for one in definitions.values())),
                None if call is None else _module(pair.a.definitions[call.start], call.name),
                None if before is None else label(*pair.a.keys[before]),
                (
                    *hints(
                        origin.cause,
                        pair.a,
                        marks,
                        {index: one.module for index, one in definitions.items()},
                        gaps.follows(step.number),
                    ),
                    *late,
                ),
                unrecorded=(hidden[0], hidden[-1]) if hidden else None,
            )
        )
    rest = [index for index in differing if index not in guilty]
    outcome.inherits_count += len(rest)
    for index in rest[: max(0, SHOWN - len(outcome.inherits))]:
        place = _place(outcome.rank, step, other, index, partners[index], marks[index])
        outcome.inherits.append(place)


def _place(rank: int | None, step: Step, other: Step, i: int, j: int, mark: Mark) -> Place:
    event = step.event(i)
    one = event.definition
    return Place(
        rank,
        step.number,
        i,
        one.name,
        one.kind,
        one.path,
        event.occurrence,
        one.module,
        str(mark),
        str(event.digest),
        str(other.event(j).digest),
    )


def _module(one: Definition, name: str) -> str:
    """A module in words; `one` is the first event of its call."""
    shown = name or "(model)"
    return f"{shown} ({one.module})" if one.module and one.name == name else shown


def _note(found: dict[_K, list[int]], key: _K, step: int) -> None:
    found.setdefault(key, [step, 0])[1] += 1


def _form(a: Definition, b: Definition) -> Mark:
    """How two definitions of one key differ; None: parts that only a sum could compare."""
    if a.dtype != b.dtype:
        return "dtype"
    if full_shape(a) != full_shape(b):
        return "shape"
    return "" if ranges(a) == ranges(b) else None


def _odd(form: Mark) -> bool:
    return form != ""


def full_shape(one: Definition) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    return one.shape if one.whole is None else one.whole.shape


def ranges(one: Definition) -> tuple[tuple[int, int], ...]:
    """Where a tensor lies in the whole, which may be itself."""
    return tuple((0, size) for size in one.shape) if one.whole is None else one.whole.ranges


def _shown(one: Definition) -> str:
    return f"{one.dtype}[{','.join(map(str, full_shape(one)))}]"


def within(number: int, steps: Range) -> bool:
    """Whether a step lies in a range: from, up to but not including."""
    low, high = steps
    return (low is None or number >= low) and (high is None or number < high)
