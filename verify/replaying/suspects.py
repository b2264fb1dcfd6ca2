"""What is suspiciously equal in a run that reproduces: randomness that is missing.

A run that reads its data in the same order in every epoch, or draws the same numbers on all ranks,
agrees with itself perfectly. Each of these can be meant (data that are not shuffled, ranks that
hold parts of one layer), so none of them changes a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from verify.rendering.escaping import clipped
from verify.replaying.borders import Value, value_at
from verify.replaying.resuming import entering
from verify.tracing.definitions import START, Key, Recording
from verify.tracing.findings import label
from verify.tracing.generators import Generators

_FEWEST_ROUNDS = 2  # of a period, to speak of one
_SHOWN = 4
_LONGEST = 80


class Suspicion(StrEnum):
    """What is too equal. A closed list: it is part of the JSON document."""

    SAME_ORDER = "same-order"  # of the data, in each epoch
    SAME_NOISE = "same-noise"  # on several ranks
    SAME_DATA = "same-data"  # on several ranks


@dataclass(frozen=True)
class Suspect:
    """Something too equal, in words that are printable."""

    kind: Suspicion
    what: str


def suspects(run: Mapping[int, Recording]) -> list[Suspect]:
    """What is too equal in a run, by rank."""
    return [*_orders(run), *_ranks(run)]


def _orders(run: Mapping[int, Recording]) -> Iterator[Suspect]:
    for rank, recording in sorted(run.items()):
        for key, values in _series(recording).items():
            period = period_of(values)
            if period is not None:
                rounds = len(values) // period
                yield Suspect(
                    Suspicion.SAME_ORDER,
                    f"rank {rank}: {_name(key)} of steps 0-{period - 1} comes again in the same "
                    f"order every {period} steps, {rounds} times in all: unless the data are not "
                    "shuffled on purpose, each epoch has the shuffle of the first (set_epoch)",
                )
                return


def _ranks(run: Mapping[int, Recording]) -> Iterator[Suspect]:
    noise: dict[str, list[tuple[int, int]]] = {}
    data: dict[str, list[tuple[int, int]]] = {}
    series = {rank: _series(one) for rank, one in run.items()}
    drawn = {rank: _drawn(one) for rank, one in run.items()}
    for one, other in combinations(sorted(run), 2):
        for name, states in drawn[one].items():
            if drawn[other].get(name) == states:
                noise.setdefault(f"generator {name}", []).append((one, other))
        for key, values in series[one].items():
            told = key[1] == "probe" or len(set(values)) > 1  # a mask may be of ones everywhere
            if told and series[other].get(key) == values:
                data.setdefault(_name(key), []).append((one, other))
    for name, pairs in noise.items():
        yield Suspect(
            Suspicion.SAME_NOISE,
            f"{clipped(name, _LONGEST)} is the same on {_listed(pairs)} in every step: unless "
            "these hold parts of one layer, the rank has to enter the seed",
        )
    for name, pairs in data.items():
        yield Suspect(
            Suspicion.SAME_DATA,
            f"{name} is the same on {_listed(pairs)} in every step: unless these hold parts of one "
            "layer, each rank has to read data of its own (DistributedSampler), and its own seed",
        )


def _series(recording: Recording) -> dict[Key, list[Value]]:
    """What each step read: the model's inputs and probes before them, where all steps have them."""
    steps = [step for step in recording.steps if step.number > START and not step.failed]
    found: dict[Key, list[Value]] = {}
    known: dict[int, dict[Key, int]] = {}
    for step in steps:
        if id(step.program) not in known:
            known[id(step.program)] = {
                step.program.keys[index]: index for index in entering(step.program)
            }
        for key, index in known[id(step.program)].items():
            found.setdefault(key, []).append(value_at(step, index))
    return {key: values for key, values in found.items() if len(values) == len(steps)}


def _drawn(recording: Recording) -> dict[str, tuple[Value, ...]]:
    """The states of the generators that something draws from, over all borders."""
    generators = Generators(recording)
    found: dict[str, list[Value]] = {}
    for step in recording.steps:
        for index, one in enumerate(step.program.definitions):
            place = (one.name, one.kind, one.path)
            if one.kind == "rng" and not one.path and not generators.still(place):
                found.setdefault(one.name, []).append(value_at(step, index))
    return {name: tuple(states) for name, states in found.items() if len(set(states)) > 1}


def period_of(values: list[Value]) -> int | None:
    """The shortest period, of at least two, in which values come again; None without one.

    At least twice, whole or not at the end: n values have a period p when values[i] is
    values[i + p] for all i, and 2 p <= n. Values that are all alike have none.
    """
    count = len(values)
    if len(set(values)) < 2:
        return None
    for period in range(2, count // _FEWEST_ROUNDS + 1):
        if values[period] == values[0] and values[period:] == values[:-period]:
            return period
    return None


def _name(key: Key) -> str:
    return clipped(label(*key), _LONGEST)


def _listed(pairs: list[tuple[int, int]]) -> str:
    ranks = sorted({rank for pair in pairs for rank in pair})
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:_SHOWN])) + more
