"""How long a run will take, said before it starts.

From known rates where there are any, else from rough guesses; it is for choosing options and a time
limit. Refuses to be a limit: `--limit` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mok.bench.contenders import DIRECTIONS
from mok.bench.protocols import WARM_ROUNDS, WARM_SHARE
from mok.bench.rates import known_rates
from mok.bench.shapes import Shape

GUESSED_TFLOPS = {"cuda": 300.0, "cpu": 0.05}
_CEILING_SECONDS = {"cuda": 0.006, "cpu": 0.01}
_START_SECONDS = {"cuda": 6.0, "cpu": 0.5}
"""Inputs, first calls and memory of one contender on one shape (compiling comes on top)."""


def seconds_of(
    shape: Shape,
    contender: str,
    device: str,
    directions: Sequence[str] = DIRECTIONS,
    tflops: Mapping[str, float] = MappingProxyType({}),
) -> float:
    """One call of each direction. tflops: guesses by direction, where no rate is known."""
    total = 0.0
    for direction in directions:
        known = (
            known_rates("rotation", shape.name, contender, direction) if device == "cuda" else ()
        )
        guess = tflops.get(direction, GUESSED_TFLOPS[device])
        total += shape.flops(direction) / ((known or (guess,))[0] * 1e12)
    return total


def predict(
    shapes: Sequence[Shape],
    contenders: Sequence[str],
    alone: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    *,
    rounds: int,
    seconds: float,
    slow_rounds: int,
    slow_factor: float,
    device: str,
    directions: Mapping[str, Sequence[str]] = MappingProxyType({}),
    tflops: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> float:
    """Seconds of the whole run, without compiling.

    directions: those called, by contender, both where it has none; tflops: guesses by contender and
    direction.
    """
    called = {name: directions.get(name, DIRECTIONS) for name in contenders}
    total = 5.0 if device == "cuda" else 1.0
    for shape in shapes:
        times = {
            name: seconds_of(shape, name, device, called[name], tflops.get(name, {}))
            for name in contenders
        }
        # as the run itself: per operation, since not all are called in both directions
        cost = {name: times[name] / shape.work(called[name]) for name in contenders}
        slowest = slow_factor * min(cost.values(), default=0.0)
        total += _START_SECONDS[device] + sum(3 * time for time in times.values())
        if rounds:
            total += (rounds + WARM_ROUNDS) * _CEILING_SECONDS[device]
            for name, time in times.items():
                slow = cost[name] > slowest
                total += time * (1 + min(slow_rounds, rounds) if slow else WARM_ROUNDS + rounds)
        timed = [name for name in alone if cost[name] <= slowest]
        loops = sum(len(called[name]) for name in timed)
        loops += sum(len(set(called[a]) & set(called[b])) for a, b in pairs)
        total += loops * (1 + WARM_SHARE) * seconds
        total += sum(8 * times[name] for name in (*timed, *(n for pair in pairs for n in pair)))
    return total
