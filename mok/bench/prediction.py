"""How long a run will take, said before it starts.

From known rates where there are any, else from rough guesses; it is for choosing options and a time
limit. Refuses to be a limit: `--limit` is.
"""

from __future__ import annotations

from collections.abc import Sequence

from mok.bench.contenders import OURS
from mok.bench.protocols import WARM_ROUNDS, WARM_SHARE
from mok.bench.rates import known_rates
from mok.bench.shapes import Shape

GUESSED_TFLOPS = {"cuda": 300.0, "cpu": 0.05}
OURS_TFLOPS = {"cuda": 8.0, "cpu": 0.05}
"""The portable backend on CUDA multiplies in fp32, in tiles of 64 rows."""
_CEILING_SECONDS = {"cuda": 0.006, "cpu": 0.01}
_START_SECONDS = {"cuda": 6.0, "cpu": 0.5}
"""Inputs, first calls and memory of one contender on one shape (compiling comes on top)."""


def seconds_of(shape: Shape, contender: str, device: str) -> float:
    """One forward and backward."""
    total = 0.0
    for direction in ("forward", "backward"):
        known = (
            known_rates("rotation", shape.name, contender, direction) if device == "cuda" else ()
        )
        guess = (OURS_TFLOPS if contender == OURS else GUESSED_TFLOPS)[device]
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
) -> float:
    """Seconds of the whole run, without compiling."""
    total = 5.0 if device == "cuda" else 1.0
    for shape in shapes:
        times = {name: seconds_of(shape, name, device) for name in contenders}
        fastest = min(times.values(), default=0.0)
        total += _START_SECONDS[device] + sum(3 * time for time in times.values())
        if rounds:
            total += (rounds + WARM_ROUNDS) * _CEILING_SECONDS[device]
            for time in times.values():
                slow = time > slow_factor * fastest
                total += time * (1 + min(slow_rounds, rounds) if slow else WARM_ROUNDS + rounds)
        timed = [name for name in alone if times[name] <= slow_factor * fastest]
        total += len(timed) * 2 * (1 + WARM_SHARE) * seconds
        total += sum(2 * (1 + WARM_SHARE) * seconds for _ in pairs)
        total += sum(8 * times[name] for name in (*timed, *(n for pair in pairs for n in pair)))
    return total
