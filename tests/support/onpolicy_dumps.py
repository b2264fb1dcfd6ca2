"""Writes what two sides computed as dumps, and says of the rest what is true, nothing, or a lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onpolicy_faults import Hows, Scene, Values, Written
from onpolicy_world import EOS, Batch, Ints, Sampling, Scored

from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Routing, Sample, Series

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, eq=False)
class Recorded:
    """All there is to write. begin: the first step with older weights, `lag` versions behind."""

    scene: Scene
    batch: Batch
    trained: Batch
    groups: Ints
    hows: Hows
    written: Written
    again: Values | None
    scored: tuple[list[Scored], list[Scored]]  # rollout, trainer
    needs: frozenset[str]
    begin: int | None
    lag: int


@dataclass(frozen=True, eq=False)
class Files:
    """rollout is None where one file holds both sides. told: "true", "missing" or "lie"."""

    trainer: Dump
    rollout: Dump | None
    again: Dump | None
    run_config: Mapping[str, object] | None
    generation_config: Mapping[str, object] | None
    told: str


@dataclass(frozen=True, eq=False)
class _Shown:
    """Which of the things that a stack may record this one does."""

    told: str
    stored: str
    per_sample: bool
    names: frozenset[str]
    tool_value: float
    routing_from: str


def write(rng: np.random.Generator, recorded: Recorded) -> Files:
    """The files of a pair."""
    told = str(rng.choice(["true", "missing", "lie"], p=[0.45, 0.3, 0.25]))
    likely = {
        "rank": 0.5,
        "rollout_rank": 0.5,
        "batch_position": 0.3,
        "step": 0.5,
        "group": 0.4,
        "versions": 0.4,
        "finish_reason": 0.6,
        "routing": 0.6,
        "margins": 0.5,
        "widths": 0.3,
        "processed": 0.5,
        "trainer_temperature": 0.5,
    }
    names = {name for name, chance in likely.items() if rng.random() < chance} | recorded.needs
    shown = _Shown(
        told,
        str(rng.choice(["float32", ""])),
        bool(rng.random() < 0.5),
        frozenset(names),
        float(rng.choice([0.0, np.nan])),
        str(rng.choice(["all", "response"])),
    )
    claims, run_config, generation_config = _sampling(rng, recorded, shown)
    config = {} if shown.per_sample else claims
    one_file = recorded.trained is recorded.batch and rng.random() < 0.3
    sides = [(TRAINER, ROLLOUT)] if one_file else [(TRAINER,), (ROLLOUT,)]
    dumps = []
    for which in sides:
        samples = [
            _sample(recorded, shown, claims, index, which, recorded.written)
            for index in range(recorded.scene.count)
        ]
        if which == (ROLLOUT,) and rng.random() < 0.3:
            samples = [samples[at] for at in rng.permutation(len(samples))]
        file = "both.jsonl" if one_file else f"{which[0]}.jsonl"
        dumps.append(Dump("plain", (file,), tuple(samples), config=config))
    again = None
    if recorded.again is not None:
        values = Written(recorded.written.rollout, recorded.again)
        again = Dump(
            "plain",
            ("again.jsonl",),
            tuple(
                _sample(recorded, shown, claims, index, (TRAINER,), values)
                for index in range(recorded.scene.count)
            ),
            config=config,
        )
    return Files(
        dumps[0], None if one_file else dumps[1], again, run_config, generation_config, told
    )


def _named(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition,
        "presence_penalty": sampling.presence,
        "frequency_penalty": sampling.frequency,
    }


def _sampling(
    rng: np.random.Generator, recorded: Recorded, shown: _Shown
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
    """What the record says of sampling; the run's own config; the model folder's, if seen."""
    if shown.told == "missing":
        return {}, None, None
    effective = _named(recorded.hows.draw.sampling)
    if shown.told == "lie":
        claims = dict(NEUTRAL)
        found = {name: value for name, value in effective.items() if value != NEUTRAL[name]}
        generation = found if found and rng.random() < 0.4 else None
        return claims, (dict(NEUTRAL) if rng.random() < 0.5 else None), generation
    claims = {
        name: value
        for name, value in effective.items()
        if value != NEUTRAL[name] or rng.random() < 0.5
    }
    if "processed" in shown.names:
        claims["processed"] = recorded.hows.rollout.sampling == recorded.hows.draw.sampling
    if "trainer_temperature" in shown.names:
        claims["trainer_temperature"] = recorded.hows.trainer.sampling.temperature
    return claims, (dict(effective) if rng.random() < 0.2 else None), None


def _sample(
    recorded: Recorded,
    shown: _Shown,
    claims: Mapping[str, Any],
    index: int,
    which: tuple[str, ...],
    values: Written,
) -> Sample:
    batch = recorded.batch if ROLLOUT in which else recorded.trained
    ids, drawn = batch.responses[index], batch.drawn[index]
    series, routing, top = {}, {}, {}
    for side in which:
        own = values.trainer[index] if side == TRAINER else values.rollout[index].copy()
        absent = np.zeros(len(own), dtype=bool)
        if side == ROLLOUT:
            own[~drawn] = shown.tool_value
            absent = np.isnan(own) & ~drawn
        series[side] = Series(np.asarray(own, dtype=np.float64), absent, shown.stored)
        scored = recorded.scored[side == TRAINER][index]
        if scored.top:
            top[side] = scored.top[1:]
        if "routing" in shown.names and scored.experts is not None:
            routing[side] = _routing(scored, shown, len(batch.prompts[index]))
    scene = recorded.scene
    meta: dict[str, Any] = dict(claims) if shown.per_sample else {}
    for name, value in (
        ("rank", scene.rank[index] if TRAINER in which else None),
        ("batch_position", scene.batch_position[index] if TRAINER in which else None),
        ("rollout_rank", scene.rollout_rank[index] if ROLLOUT in which else None),
        ("step", scene.step[index]),
    ):
        if name in shown.names and value is not None:
            meta[name] = int(value)
    if "group" in shown.names:
        meta["group"] = f"g{recorded.groups[index]}"
    if "versions" in shown.names:
        meta |= _versions(recorded, shown, int(scene.step[index]), which)
    if "finish_reason" in shown.names and ROLLOUT in which:
        meta["finish_reason"] = "stop" if ids[-1] == EOS else "length"
        meta["eos_token_ids"] = [EOS]
    if "widths" in shown.names:
        own_width = scene.world.vocabulary
        pads = recorded.hows.trainer.pads if TRAINER in which else recorded.hows.rollout.pads
        honest = pads is not None and shown.told == "true"
        meta["vocab_size"] = own_width
        meta["logits_width"] = own_width + (len(pads) if honest and pads is not None else 0)
    return Sample(
        f"{scene.step[index]}-{index}",
        Place(f"{'both' if len(which) == 2 else which[0]}.jsonl", f"line {index + 1}"),
        batch.prompts[index],
        ids,
        None if bool(drawn.all()) else drawn.copy(),
        series,
        routing,
        top,
        None,
        meta,
    )


def _versions(
    recorded: Recorded, shown: _Shown, step: int, which: tuple[str, ...]
) -> dict[str, str]:
    stale = recorded.begin is not None and step >= recorded.begin
    honest = "versions" in recorded.needs or shown.told == "true"
    sampled = step - recorded.lag if stale and honest else step
    found = {}
    if TRAINER in which:
        found["trainer_version"] = str(step)
    if ROLLOUT in which:
        found["rollout_version"] = str(sampled)
    return found


def _routing(scored: Scored, shown: _Shown, prompt: int) -> Routing:
    assert scored.experts is not None
    assert scored.margins is not None
    start = 0 if shown.routing_from == "all" else prompt - 1
    experts: NDArray[np.integer[Any]] = scored.experts[start:].astype(np.int16)
    margins = scored.margins[start:].astype(np.float32) if "margins" in shown.names else None
    return Routing(experts, start, None, margins)
