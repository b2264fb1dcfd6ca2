"""What records and configurations say of sampling: never proof, since they may not know or lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verify.onpolicy.causes.facts import Facts

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "trainer_temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
TRUNCATING = ("top_p", "top_k", "min_p")
PENALISING = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def told(facts: Facts, name: str) -> list[float]:
    """Distinct values that records, file and both configurations give, ascending."""
    pairs = facts.pairs
    sources: list[Mapping[str, Any]] = [pairs.config]
    sources += [one for one in (facts.evidence.run_config, facts.evidence.generation_config) if one]
    found = {_number(one.get(name)) for one in sources}
    found |= {_number(one) for one in facts.meta(name)}
    return sorted(one for one in found if one is not None)


def neutral(name: str, value: float) -> bool:
    """Whether a value of this parameter does nothing."""
    return value == NEUTRAL[name] or (name == "top_k" and value <= 0.0)


def in_force(facts: Facts, parameters: Iterable[str]) -> list[str]:
    """What is said to be in force of these: `top_p=0.95`."""
    return [
        f"{name}={value:g}"
        for name in parameters
        for value in told(facts, name)
        if not neutral(name, value)
    ]


def disagreeing(facts: Facts, parameters: Iterable[str]) -> list[str]:
    """One sentence for each parameter that two sources give different values."""
    return ["; ".join(sources(facts, name)) for name in parameters if len(told(facts, name)) > 1]


def sources(facts: Facts, name: str) -> list[str]:
    """Who says what of one parameter: `the run's configuration says top_k=-1`."""
    said = []
    for who, config in (
        ("the record", facts.pairs.config),
        ("the run's configuration", facts.evidence.run_config),
        ("the model's generation_config.json", facts.evidence.generation_config),
    ):
        value = _number(config.get(name)) if config else None
        if value is not None:
            said.append(f"{who} says {name}={value:g}")
    of_samples = sorted({x for x in map(_number, facts.meta(name)) if x is not None})
    if of_samples:
        shown = ", ".join(f"{one:g}" for one in of_samples[:3])
        said.append(f"samples say {name}={shown}")
    return said


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
