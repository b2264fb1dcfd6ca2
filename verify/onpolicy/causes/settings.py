"""What records and configurations say of sampling: never proof, since they may not know or lie.

The sampler's word counts for the parameters of sampling. Those in a file that holds the trainer's
values alone are what the trainer did: its `temperature` is read as `trainer_temperature`, and what
else it says of sampling counts where the sampler's own file says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from verify.onpolicy.causes.facts import Facts
from verify.onpolicy.samples import ROLLOUT, SAMPLING, TRAINER

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
    """Distinct values that records, files and both configurations give, ascending.

    Of a temperature those of its own side only.
    """
    found = {value for _, values in _said(facts, name) for value in values}
    if not found and name in SAMPLING and (name != "temperature" or _tells_both(facts)):
        found = set(_of_trainers_file(facts, name))
    if name == "trainer_temperature":
        found |= set(_trainers_temperature(facts))
    return sorted(found)


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
    found = []
    for name in parameters:
        said = [*_said(facts, name), *_file_of_the_trainer(facts, name)]
        if len({value for _, values in said for value in values}) > 1:
            found.append("; ".join(f"{who} {name}={shown(values)}" for who, values in said))
    return found


def temperatures(facts: Facts) -> tuple[list[float], list[float]]:
    """What is said of the sampler's temperature, and of the trainer's."""
    return told(facts, "temperature"), told(facts, "trainer_temperature")


def said_to_be_raw(facts: Facts) -> bool:
    """Whether the sampler's values are said not to include its parameters."""
    return facts.pairs.config.get("processed") is False or any(
        value is False for value in facts.meta("processed")
    )


def shown(values: Sequence[float]) -> str:
    """`0.7, 1`: at most three."""
    return ", ".join(f"{one:g}" for one in values[:3])


def _said(facts: Facts, name: str) -> Iterator[tuple[str, list[float]]]:
    """Who says what of one parameter: `the run's configuration says`, and the values."""
    pairs = facts.pairs
    apart = bool(pairs.own) and name in SAMPLING
    sampler = "the sampler's file says" if apart else "the record says"
    for who, config in (
        (sampler, pairs.own[ROLLOUT] if apart else pairs.config),
        ("the run's configuration says", facts.evidence.run_config),
        ("the model's generation_config.json says", facts.evidence.generation_config),
    ):
        value = _number(config.get(name)) if config else None
        if value is not None:
            yield who, [value]
    of_samples = _distinct(
        [one.rollout.meta.get(name) for one in pairs.samples] if apart else facts.meta(name)
    )
    if of_samples:
        yield "the sampler's samples say" if apart else "samples say", of_samples


def _file_of_the_trainer(facts: Facts, name: str) -> Iterator[tuple[str, list[float]]]:
    found = _of_trainers_file(facts, name)
    if found:
        yield "the trainer's file says", found


def _of_trainers_file(facts: Facts, name: str) -> list[float]:
    """What the trainer's own file says, of all of it and of its samples."""
    own = facts.pairs.own
    if not own:
        return []
    return _distinct(
        [own[TRAINER].get(name), *(one.trainer.meta.get(name) for one in facts.pairs.samples)]
    )


def _trainers_temperature(facts: Facts) -> list[float]:
    """`temperature` in the trainer's own file, where that does not say trainer_temperature too."""
    if _tells_both(facts):
        return []
    return _of_trainers_file(facts, "temperature")


def _tells_both(facts: Facts) -> bool:
    """Whether `temperature` in the trainer's own file is the sampler's: the other name is there."""
    return bool(_of_trainers_file(facts, "trainer_temperature"))


def _distinct(values: Iterable[Any]) -> list[float]:
    return sorted({one for one in map(_number, values) if one is not None})


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
