"""The steps of one rank in two runs, with what comparing says about each of their events.

`rank_diffs` decides, and keeps counts and the first of each kind; a picture needs to know it of
every event, and the long runs that one looks at must not be held for that. So a rank is compared
once more, of what both have at hand, and `timeline` refuses to draw what adds up to other counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from verify.tracing.causes import Mark
from verify.tracing.choices import Gaps
from verify.tracing.definitions import LANES_BYTES, Key, Recording, Step
from verify.tracing.generators import Generators
from verify.tracing.rank_diffs import Paired, counting, leave_unlike, of_two_steps, paired

Conflicts = Mapping[tuple[int, int], str]


@dataclass(frozen=True)
class Side:
    """What one run has of a rank. conflicts: (step, place) of entries that cannot be equal, and how
    they differ, as `shards` says. left: keys of which no sum could be formed. whole: all that was
    recorded, where `recording` is what both runs have in common."""

    recording: Recording | None
    conflicts: Conflicts = field(default_factory=dict)
    left: frozenset[Key] = frozenset()
    whole: Recording | None = None


@dataclass(frozen=True)
class Compared:
    """One step. a, b: what each run has of it. pair: None if only one has it. marks: of A's
    entries. only_a, only_b: places of what lacks a partner that it should have. compared: how many
    entries count. moved: of A's generators, whether either run's moved in this step. hidden:
    whether steps that were not recorded in full led to it."""

    number: int
    a: Step | None
    b: Step | None
    pair: Paired | None = None
    marks: tuple[Mark, ...] = ()
    only_a: frozenset[int] = frozenset()
    only_b: frozenset[int] = frozenset()
    compared: int = 0
    moved: Mapping[tuple[str, str, str], bool] = field(default_factory=dict)
    hidden: bool = False

    @cached_property
    def differing(self) -> int:
        return sum(map(bool, self.marks))


def walk(a: Side, b: Side, end: int | None) -> Iterator[Compared]:
    """All steps below `end` in order, of two recordings of one rank. None has no step."""
    sides = [
        {} if side.recording is None else {one.number: one for one in side.recording.steps}
        for side in (a, b)
    ]
    files = [side.whole or side.recording for side in (a, b)]
    generators = tuple(Generators(one) for one in files if one is not None)
    gaps = Gaps(*(side.recording.header.steps for side in (a, b) if side.recording is not None))
    levels = {side.recording.header.level for side in (a, b) if side.recording is not None}
    ignored = partial(_ignored, left=a.left | b.left, ops=len(levels) > 1)
    cache: dict[tuple[int, int, str], tuple[Paired, frozenset[int], frozenset[int]]] = {}
    for number in sorted(sides[0].keys() | sides[1].keys()):
        if end is not None and number >= end:
            return
        step, other = sides[0].get(number), sides[1].get(number)
        if step is None or other is None:
            yield Compared(number, step, other)
            continue
        excused = gaps.saw_alone(number)
        key = (id(step.program), id(other.program), excused)
        if key not in cache:
            pair = paired(step.program, other.program)
            only = pair.alignment.only_a, pair.alignment.only_b
            lone = [
                frozenset(
                    place
                    for place in places
                    if not ignored(program.keys[place])
                    and not (side == excused and of_two_steps(program.keys[place]))
                )
                for side, program, places in zip("ab", (pair.a, pair.b), only, strict=True)
            ]
            cache[key] = (pair, lone[0], lone[1])
        pair, only_a, only_b = cache[key]
        one, two = generators[0].moved(step), generators[1].moved(other)
        moved = {place: one[place] or two.get(place, True) for place in one}
        marks = _marks(pair, step, other, a.conflicts, b.conflicts)
        still = _still(pair, marks, generators)
        for place in still:
            marks[place] = None
        unlike = counting(pair, leave_unlike(step, other, marks))
        count, hidden = pair.real - len(still) - unlike, bool(gaps.before(number))
        found = (pair, tuple(marks), only_a, only_b, count, moved, hidden)
        yield Compared(number, step, other, *found)


def _ignored(key: Key, left: frozenset[Key], ops: bool) -> bool:
    """Whether nobody expects a partner: ops that one run recorded only, and what was left out."""
    return key in left or (ops and "/" in key[0])


def _marks(
    pair: Paired, step: Step, other: Step, conflicts: Conflicts, of_other: Conflicts
) -> list[Mark]:
    """Of A's entries; None for those that have no partner, or whose partner is another part."""
    if pair.plain and not (conflicts or of_other):
        if step.lanes == other.lanes:
            return [""] * len(step)
        return ["bits" if one else "" for one in _unequal(step.lanes, other.lanes)]
    marks: list[Mark] = [None] * len(step)
    for (i, j), form in zip(pair.alignment.pairs, pair.forms, strict=True):
        marks[i] = form
        if form == "" and _lanes(step, i) != _lanes(other, j):
            marks[i] = "bits"
        if form is not None:
            conflict = conflicts.get((step.number, i)) or of_other.get((step.number, j))
            marks[i] = conflict or marks[i]
    return marks


def _unequal(a: bytes, b: bytes) -> Iterator[bool]:
    for at in range(0, len(a), LANES_BYTES):
        yield a[at : at + LANES_BYTES] != b[at : at + LANES_BYTES]


def _lanes(step: Step, place: int) -> bytes:
    return step.lanes[place * LANES_BYTES : (place + 1) * LANES_BYTES]


def _still(pair: Paired, marks: list[Mark], generators: tuple[Generators, ...]) -> list[int]:
    """Places of generators that differ though neither run drew from them."""
    return [
        place
        for place, one in enumerate(pair.a.definitions)
        if marks[place]
        and one.kind == "rng"
        and all(side.still((one.name, one.kind, one.path)) for side in generators)
    ]
