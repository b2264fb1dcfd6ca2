"""Which state a resumed run lacks: what its first step does not begin with as the whole run's did.

A value that differs is looked up among the values that the whole run had when its other steps
began, on this rank and on others, so a value that was never restored is told from one of another
moment. It refuses to call a generator lost that neither run draws from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from verify.replaying.borders import Border, States, Value, places_of, value_at
from verify.replaying.findings import SHOWN, Finding, Kind
from verify.tracing.definitions import START, Key, Recording
from verify.tracing.findings import label
from verify.tracing.frames import file_name
from verify.tracing.generators import Generators

Narrow = Mapping[tuple[str, str, str], str]
"""By name, kind and path: a narrower dtype that holds all of a value."""
_LOOKED_UP = 64  # values that are looked for in other steps


@dataclass(frozen=True)
class Difference:
    """A value of the state that the resumed run has otherwise. how: "bits", "dtype", "shape",
    "missing" or "added". had: steps of the whole run that began with the resumed run's value, START
    for its start. drawn: whether a generator was restored and differs since. value: the resumed
    run's."""

    key: Key
    how: str
    had: tuple[int, ...]
    drawn: bool = False
    value: Value | None = None


def differences(one: Recording, other: Recording, border: Border) -> list[Difference]:
    """Where the state that the resumed run's first step begins with is not that of the whole run.

    Where it makes no step, the state that its recording begins with.
    """
    mine, theirs = States(one), States(other)
    still = _generators(one), _generators(other)
    first = border.step + 1
    if first not in mine.steps:
        return []
    expected = mine.opening(first)
    begun = theirs.opening(0) if 0 in theirs.steps else theirs.start
    optimizer = any(key[1] == "optimizer" for key in begun)
    found: list[Difference] = []
    for key in dict.fromkeys([*expected, *begun]):
        if key[1] == "optimizer" and not optimizer:
            continue  # it was made inside of the recording, so nothing is known of it
        a, b = expected.get(key), begun.get(key)
        if a == b or (key[1] == "rng" and all(side.still(key[:3]) for side in still)):
            continue
        had = mine.having(key, b) if b is not None and len(found) < _LOOKED_UP else []
        loaded = theirs.start.get(key)
        drawn = key[1] == "rng" and loaded != b and loaded is not None
        restored = drawn and loaded is not None and _of_border(one, border, key) == loaded
        found.append(Difference(key, _how(a, b), tuple(had), restored, b))
    return found


def _generators(one: Recording) -> Generators:
    """The generators of a run, without the start: one that a checkpoint was loaded into inside of
    the recording was not drawn from."""
    steps = tuple(step for step in one.steps if step.number > START)
    return Generators(replace(one, steps=steps) if len(steps) > 1 else one)


def _of_border(one: Recording, border: Border, key: Key) -> Value | None:
    """A generator's state at a border, as the whole run's step left it."""
    for step in one.steps:
        if step.number == border.step:
            index = places_of(step.program).get(key)
            return None if index is None else value_at(step, index)
    return None


def narrow_values(folder: Path, rank: int) -> Narrow:
    """What a rank's keeper found of the state at the start; empty where it did not look."""
    path = folder / f"{Path(file_name(rank)).stem}.narrow.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {(name, kind, path): dtype for name, kind, path, dtype in found}


def _how(a: Value | None, b: Value | None) -> str:
    if b is None:
        return "missing"
    if a is None:
        return "added"
    return "dtype" if a[0] != b[0] else "shape" if a[1:3] != b[1:3] else "bits"


def findings_of_state(
    rank: int,
    whole: Mapping[int, Recording],
    state: list[Difference],
    border: Border,
    narrow: Narrow,
) -> Iterator[Finding]:
    groups: dict[Kind, list[Difference]] = {}
    for difference in state:
        kind = Kind.DRAWS if difference.drawn else _kind(difference.key)
        groups.setdefault(kind, []).append(difference)
    for kind in Kind:
        group = groups.get(kind)
        if group and kind is not Kind.DRAWS:
            names = tuple(label(*one.key) for one in group[:SHOWN])
            what = _told(group, border, narrow)
            other = _other_rank(group, rank, whole, border)
            if other is not None:
                what = f"as rank {other} has it: each rank needs its own"
            yield Finding(kind, rank, border.step + 1, names, len(group), what)


def _other_rank(
    group: list[Difference], rank: int, whole: Mapping[int, Recording], border: Border
) -> int | None:
    """Another rank that has all of these values where this one should have its own."""
    for other in sorted(set(whole) - {rank}):
        states = States(whole[other])
        if border.step + 1 in states.steps:
            opening = states.opening(border.step + 1)
            if all(one.value is not None and opening.get(one.key) == one.value for one in group):
                return other
    return None


def _kind(key: Key) -> Kind:
    if key[1] == "optimizer":
        return Kind.SETTINGS if key[0].startswith("(group ") else Kind.OPTIMIZER
    kinds = {"parameter": Kind.PARAMETERS, "buffer": Kind.BUFFERS, "rng": Kind.GENERATORS}
    return kinds[key[1]]


def _told(group: list[Difference], border: Border, narrow: Narrow) -> str:
    """In which way values of the state are not what they should be."""
    if all(one.how == "missing" for one in group):
        return "missing in the resumed run: not restored"
    if all(one.how == "added" for one in group):
        return "there in the resumed run only"
    if all(one.how == "dtype" for one in group):
        return "restored in another dtype"
    if all(one.how == "shape" for one in group):
        return "restored in another shape"
    had = set.intersection(*(set(one.had) for one in group))
    if had & {START, 0}:
        return "as before the first step: not restored"
    if had:
        nearest = min(had, key=lambda number: abs(number - border.step - 1))
        return f"as step {nearest} began, not step {border.step + 1}: of another moment"
    dtypes = {narrow.get(one.key[:3], "") for one in group}
    if "" not in dtypes:
        names = " or ".join(sorted(dtypes))
        return f"restored with values that {names} can hold, all of them: cast on the way"
    if all(one.key[1] == "rng" for one in group):
        return (
            "in no state that the whole run recorded: seeded anew, or drawn from after it was "
            "restored"
        )
    return "restored with other bits"
