"""Adds up what the ranks of one run hold, so that runs on other numbers of ranks can be compared.

The digests of disjoint parts of a tensor, each taken at its own place, add up to that of the whole.
A run becomes the recording of one rank that holds every tensor whole. Parts that several ranks hold
count once and must agree: where they do not, the entry is a conflict, which no digest can equal.

It refuses to add parts that overlap or leave something out, and to take tensors of several ranks
for replicas when the other run says that the whole has another shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from verify.tracing.definitions import LANES_BYTES, Definition, Key, Program, Recording, Step
from verify.tracing.rank_diffs import Range, full_shape, ranges, within

_LANES = struct.Struct("<4Q")
_MASK = (1 << 64) - 1
UNCOVERED = "the parts that the ranks recorded do not add up to the whole"
FORMS = "the ranks of one run hold it in several dtypes or shapes"
UNPLACED = "ranks hold another shape than the other run's whole, and nothing says which part"
_HELD = ("parameter", "buffer", "grad", "optimizer")
Wanted = Callable[[Definition, Key], bool]
Shapes = Mapping[tuple[str, str, str], set[tuple[int, ...]]]


def placed(one: Definition, _key: Key) -> bool:
    """Whether an event can be added up over ranks: it has a place in a whole, or all hold it."""
    return one.whole is not None or one.kind in _HELD


@dataclass
class Merged:
    """A run as one rank. conflicts: (step, place) where ranks disagree. left: of each reason, how
    often each key was left out."""

    recording: Recording
    conflicts: dict[tuple[int, int], str] = field(default_factory=dict)
    left: dict[str, dict[Key, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sum:
    """One tensor: a holder of each part, and pairs of holders of one part. (rank, place) each."""

    parts: tuple[tuple[int, int], ...]
    replicas: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


@dataclass(frozen=True)
class _Plan:
    program: Program
    sums: tuple[_Sum, ...]
    left: tuple[tuple[str, Key], ...]


def merged(
    recordings: Mapping[int, Recording], wanted: Wanted, expected: Shapes, steps: Range
) -> Merged:
    """A run's wanted entries as whole tensors, of all steps.

    expected: shapes in the other run, by name, kind and path. steps: where to count what is left.
    """
    some = next(iter(recordings.values()))
    found = Merged(replace(some, steps=()))
    plans: dict[tuple[int, ...], _Plan] = {}
    made: list[Step] = []
    for number, parts in _by_step(recordings):
        key = tuple(id(step.program) for step in parts.values())
        plan = plans.get(key) or plans.setdefault(key, _plan(parts, wanted, expected))
        lanes = []
        for place, one in enumerate(plan.sums):
            lanes.append(_add(_lanes_of(parts, part) for part in one.parts))
            if any(_bytes(parts, a) != _bytes(parts, b) for a, b in one.replicas):
                found.conflicts[number, place] = "replicas"
        for reason, left in plan.left if within(number, steps) else ():
            counts = found.left.setdefault(reason, {})
            counts[left] = counts.get(left, 0) + 1
        failed = any(step.failed for step in parts.values())
        late = any(step.late for step in parts.values())
        made.append(Step(number, plan.program, b"".join(lanes), failed, late))
    found.recording = replace(some, steps=tuple(made))
    return found


def shapes(recordings: Iterable[Recording]) -> dict[tuple[str, str, str], set[tuple[int, ...]]]:
    """The whole shapes that a run has, by name, kind and path."""
    found: dict[tuple[str, str, str], set[tuple[int, ...]]] = {}
    for recording in recordings:
        for program in {id(step.program): step.program for step in recording.steps}.values():
            for one in program.definitions:
                found.setdefault((one.name, one.kind, one.path), set()).add(full_shape(one))
    return found


def _by_step(recordings: Mapping[int, Recording]) -> Iterator[tuple[int, dict[int, Step]]]:
    steps: dict[int, dict[int, Step]] = {}
    for rank in sorted(recordings):
        for step in recordings[rank].steps:
            steps.setdefault(step.number, {})[rank] = step
    yield from sorted(steps.items())


def _plan(steps: Mapping[int, Step], wanted: Wanted, expected: Shapes) -> _Plan:
    holders: dict[Key, list[tuple[int, int, Definition]]] = {}
    for rank, step in steps.items():
        program = step.program
        for place, (key, one) in enumerate(zip(program.keys, program.definitions, strict=True)):
            if wanted(one, key):
                holders.setdefault(key, []).append((rank, place, one))
    definitions: list[Definition] = []
    sums: list[_Sum] = []
    left: list[tuple[str, Key]] = []
    for key, held in holders.items():
        problem = _problem(held, expected.get(key[:3], set()))
        if problem:
            left.append((problem, key))
            continue
        first: dict[object, tuple[int, int]] = {}
        replicas = []
        for rank, place, one in held:
            at = (rank, place)
            other = first.setdefault(ranges(one), at)
            if other != at:
                replicas.append((other, at))
        one = held[0][2]
        definitions.append(replace(one, id=len(sums), shape=full_shape(one), whole=None))
        sums.append(_Sum(tuple(first.values()), tuple(replicas)))
    return _Plan(Program(tuple(definitions)), tuple(sums), tuple(left))


def _problem(held: list[tuple[int, int, Definition]], expected: set[tuple[int, ...]]) -> str | None:
    """Why the parts of a tensor cannot be added, or None."""
    forms = {(one.dtype, full_shape(one)) for _, _, one in held}
    if len(forms) > 1:
        return FORMS
    _, shape = next(iter(forms))
    unplaced = all(one.whole is None for _, _, one in held)
    if unplaced and len(held) > 1 and expected and shape not in expected:
        return UNPLACED
    parts = {ranges(one) for _, _, one in held}
    covered = sum(math.prod(stop - start for start, stop in part) for part in parts)
    return None if covered == math.prod(shape) and _disjoint(parts) else UNCOVERED


def _disjoint(parts: set[tuple[tuple[int, int], ...]]) -> bool:
    """Whether no two boxes share an element; boxes without elements share none."""
    filled = sorted(part for part in parts if all(start < stop for start, stop in part))
    for index, part in enumerate(filled):
        for other in filled[index + 1 :]:
            if other and other[0][0] >= part[0][1]:
                break  # sorted by where they start in the first dimension
            if all(a < d and c < b for (a, b), (c, d) in zip(part, other, strict=True)):
                return False
    return True


def _bytes(steps: Mapping[int, Step], at: tuple[int, int]) -> bytes:
    rank, place = at
    return steps[rank].lanes[place * LANES_BYTES : (place + 1) * LANES_BYTES]


def _lanes_of(steps: Mapping[int, Step], at: tuple[int, int]) -> tuple[int, ...]:
    return _LANES.unpack(_bytes(steps, at))


def _add(parts: Iterable[tuple[int, ...]]) -> bytes:
    total = [0, 0, 0, 0]
    for part in parts:
        total = [(mine + theirs) & _MASK for mine, theirs in zip(total, part, strict=True)]
    return _LANES.pack(*total)
