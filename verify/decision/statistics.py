"""What a number of executions can and cannot say about a rare fault."""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def undetected_rate(executions: int, confidence: float = CONFIDENCE) -> float:
    """The fault rate per execution that `executions` equal ones do not exclude.

    A fault of rate p stays unseen with probability (1 - p)^N; solved for p at 1 - confidence:
    p = 1 - (1 - confidence)^(1/N). Three executions exclude only rates above 63 %.
    """
    if executions < 1:
        raise ValueError(f"executions is {executions}; at least 1 is needed")
    return float(1.0 - (1.0 - confidence) ** (1.0 / executions))


def rate_interval(
    differing: int, executions: int, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """The rate of differing executions, and its exact (Clopper-Pearson) interval."""
    if not 0 <= differing <= executions or executions < 1:
        raise ValueError(f"{differing} of {executions} executions is not a rate")
    tail = (1.0 - confidence) / 2
    low = 0.0 if differing == 0 else _solve(differing - 1, executions, 1.0 - tail)
    high = 1.0 if differing == executions else _solve(differing, executions, tail)
    return differing / executions, low, high


def _solve(successes: int, trials: int, probability: float) -> float:
    """The p at which P(X <= successes) equals `probability`, X binomial; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(successes, trials, middle) > probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_most(successes: int, trials: int, p: float) -> float:
    if p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 1.0 if successes >= trials else 0.0
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(p)
        + (trials - k) * math.log1p(-p)
        for k in range(successes + 1)
    ]
    return min(1.0, sum(math.exp(value) for value in logs))
