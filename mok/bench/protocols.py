"""The two protocols: a rotation of everything in turn, and one (or two) alone in a tight loop.

Why two: in a rotation slower contenders let a power-capped card cool, so a fast one runs near its
burst rate; alone it pays for every joule. A win has to hold in both. Medians and the 10th and 90th
percentile over single calls; with several ranks each call counts as the slowest rank's. Refuses a
mean, a best of N, and to time a call that includes a wait of ours.

A tight loop keeps only a few calls in flight, so that host times bound what the device did.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from torch import Tensor

from mok.bench.contenders import DIRECTIONS, Prepared
from mok.bench.instruments import Instruments
from mok.bench.ranks import Together
from mok.bench.sampling import Reading, sampling

WARM_ROUNDS = 2
WARM_SHARE = 0.3
"""Share of a tight loop's seconds that is spent warming up before it."""
ORDER_SEED = 2026
"""Of the permutations of a rotation: the same in every run and on every rank."""
COUNTER_UNCERTAINTY = 0.03
"""Joules off the energy counter that are less certain than this, relatively, are an estimate."""
_IN_FLIGHT_SECONDS = 0.02
_MOST_CALLS = 20_000


@dataclass(frozen=True)
class Timing:
    """Seconds of single calls, in the order they were made, and what the gauge showed meanwhile.

    joules: per call and GPU, the largest over ranks; reading: of the rank whose joules these are.
    kind: "counter" when a loop of this call alone was on the energy counter for long enough
    (COUNTER_UNCERTAINTY), "estimate" when it was too short for that, or when it is the mean power
    of a mixture times the median.
    """

    seconds: tuple[float, ...]
    reading: Reading
    joules: float | None
    kind: str | None

    @property
    def median(self) -> float:
        return quantile(self.seconds, 0.5)


class ContenderFailed(Exception):
    """One contender or ceiling raised; `who` is its name and `cause` what it raised."""

    def __init__(self, who: str, cause: BaseException) -> None:
        super().__init__(f"{who}: {type(cause).__name__}: {cause}")
        self.who = who
        self.cause = cause


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; values may not be empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def rotation(
    instruments: Instruments,
    together: Together,
    ceilings: Mapping[str, Callable[[], object]],
    runners: Mapping[str, Prepared],
    rounds: int,
    warm: int = WARM_ROUNDS,
    directions: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[dict[str, Timing], dict[tuple[str, str], Timing]]:
    """Timings of ceilings by name and of contenders by (name, direction).

    A round is every ceiling, then every contender's forward and backward, in an order drawn anew
    for every round (from ORDER_SEED), so that no contender always runs after the same one, whose
    heat and cache it would inherit; the device is only waited for between rounds. The first `warm`
    rounds are not counted. Results are in the order of `ceilings` and `runners`. directions: those
    timed, by contender, both where it has none; without "backward" it is not called, without
    "forward" it is called for its graph. Raises ContenderFailed when one raises; the others can
    then be measured without it.
    """
    names = list(runners)
    wanted = {name: directions.get(name, DIRECTIONS) for name in names}
    order = random.Random(ORDER_SEED)
    marks: dict[tuple[str, str], list[tuple[object, object]]] = {}
    begin = 0.0
    with sampling(instruments.gauge) as sampler:
        for turn in range(-warm, rounds):
            if turn == 0:
                marks.clear()
                begin = time.perf_counter()
            for name, call in ceilings.items():
                try:
                    start = instruments.record()
                    call()
                except Exception as error:
                    raise ContenderFailed(name, error) from error
                marks.setdefault((name, "ceiling"), []).append((start, instruments.record()))
            for name in order.sample(names, len(names)):
                try:
                    start = instruments.record()
                    out = runners[name].forward()
                    middle = instruments.record()
                    if "backward" in wanted[name]:
                        runners[name].backward(out, False)
                    end = instruments.record()
                    del out
                except Exception as error:
                    raise ContenderFailed(name, error) from error
                marks.setdefault((name, "forward"), []).append((start, middle))
                marks.setdefault((name, "backward"), []).append((middle, end))
            instruments.synchronize()
        seen = sampler.reading(begin, time.perf_counter())
    keys = [(name, "ceiling") for name in ceilings]
    keys += [(name, direction) for name in names for direction in wanted[name]]
    timings = {
        key: _mixed(_seconds(instruments, together, marks[key]), seen, together)
        for key in keys
        if key in marks
    }
    return (
        {name: timing for (name, what), timing in timings.items() if what == "ceiling"},
        {key: timing for key, timing in timings.items() if key[1] != "ceiling"},
    )


def loop(
    instruments: Instruments,
    together: Together,
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
) -> dict[str, Timing]:
    """The calls back to back, strictly alternating if there are two, for about `seconds`.

    Warms up for WARM_SHARE of that before. The number of calls is fixed beforehand from a timed
    call, so that all ranks make the same. Raises what a call raises.
    """
    names = list(calls)
    once = _calibrate(instruments, together, calls)
    warm = min(max(3, math.ceil(WARM_SHARE * seconds / once)), _MOST_CALLS)
    count = min(max(5, math.ceil(seconds / once)), _MOST_CALLS)
    depth = max(2, math.ceil(_IN_FLIGHT_SECONDS / once))
    marks: list[object] = []
    begin = 0.0
    with sampling(instruments.gauge) as sampler:
        for turn in range(-warm, count):
            if turn == 0:
                marks = [instruments.record()]
                instruments.wait(marks[0])
                begin = time.perf_counter()
            for name in names:
                calls[name]()
                marks.append(instruments.record())
            if len(marks) > depth * len(names):
                instruments.wait(marks[-depth * len(names)])
            if turn < 0 and len(marks) > 2 * depth * len(names):
                del marks[: -depth * len(names)]
        instruments.synchronize()
        end = time.perf_counter()
        seen = sampler.reading(begin, end)
    pairs = list(pairwise(marks))
    timings: dict[str, Timing] = {}
    for place, name in enumerate(names):
        times = _seconds(instruments, together, pairs[place :: len(names)])
        if len(names) > 1:
            timings[name] = _mixed(times, seen, together)
            continue
        joules = None if seen.watts is None else seen.watts * (end - begin) / count
        timings[name] = _timing(times, seen, joules, "counter", together)
    return timings


def direction_calls(prepared: Prepared, direction: str) -> Callable[[], object]:
    """A call of one direction that can be repeated: backward runs on one forward's kept graph."""
    if direction == "forward":
        return prepared.forward
    out: Tensor = prepared.forward()
    return lambda: prepared.backward(out, True)


def _calibrate(
    instruments: Instruments, together: Together, calls: Mapping[str, Callable[[], object]]
) -> float:
    """Seconds of one turn of all calls, on the slowest rank, after two turns that do not count."""
    for turn in range(3):
        start = instruments.record()
        for name, call in calls.items():
            try:
                call()
            except Exception as error:
                raise ContenderFailed(name, error) from error
        end = instruments.record()
        instruments.synchronize()
        if turn == 2:
            return max(together.largest([instruments.seconds(start, end)])[0], 1e-7)
    raise AssertionError("unreachable")


def _seconds(
    instruments: Instruments, together: Together, pairs: Sequence[tuple[object, object]]
) -> tuple[float, ...]:
    return tuple(together.largest([instruments.seconds(start, end) for start, end in pairs]))


def _mixed(seconds: tuple[float, ...], seen: Reading, together: Together) -> Timing:
    joules = None if seen.watts is None else seen.watts * quantile(seconds, 0.5)
    return _timing(seconds, seen, joules, "estimate", together)


def _timing(
    seconds: tuple[float, ...],
    seen: Reading,
    joules: float | None,
    kind: str,
    together: Together,
) -> Timing:
    most = together.largest_known(joules)
    if most is None:
        # Power that no joules came from is nobody's; the clock is this rank's.
        unknown = Reading(clock_mhz=seen.clock_mhz) if together.ranks > 1 else seen
        return Timing(seconds, unknown, None, None)
    if together.ranks > 1:
        seen = _reading_of(together, joules == most, seen)
    if seen.uncertainty is None or seen.uncertainty > COUNTER_UNCERTAINTY:
        kind = "estimate"
    return Timing(seconds, seen, most, kind)


def _reading_of(together: Together, here: bool, seen: Reading) -> Reading:
    """The reading of the first rank for which `here` is true, on every rank."""
    first = -together.largest([-together.rank if here else -together.ranks])[0]
    fields = (seen.watts, seen.uncertainty, seen.update_ms, seen.clock_mhz)
    mine = together.rank == first
    shared = together.largest([v if mine and v is not None else -1.0 for v in fields])
    return Reading(*(None if value < 0.0 else value for value in shared))
