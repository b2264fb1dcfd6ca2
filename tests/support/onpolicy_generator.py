"""Pairs of dumps with a known cause of mismatch, drawn anew for every seed.

Frozen before any detector was tuned; only outright faults of the generator are mended.

A pair has 8 to 64 samples of 20 to 200 tokens from a toy language model (`onpolicy_world`). Tokens
are really drawn from what the faulty sampler's logits give; values are float32. Trainer and sampler
share the base scenario (no sampling parameters; or both divide by the temperature; or both give raw
values of whatever was sampled). Most pairs have numeric noise between the sides besides, of a size
drawn log-uniformly from 1e-5 to 2e-2 of the hidden state, and every fifth has none at all.
Tool turns, steps, ranks, groups, versions, routing and alternatives are recorded or not, by chance.
What a file says of the sampling parameters is true, missing, or a lie (neutral values, while others
were in force); the same goes for versions of weights.

What a label means
------------------
A label is one of the twelve names of `CAUSES`; the pair was made by that cause's own mechanism.
Only what can be told in principle is labelled. Strengths are drawn log-uniformly and the pair is
drawn again until:

- the cause touches (moves by more than 1e-6) at least 8 counted tokens (sentinel 3, and other
  tokens in at least one sample);
- on the touched tokens the root mean square of the cause's effect is at least that of the pair's
  own noise on them. Twice that for what is told from noise only by its place (outlier-place) or its
  time (stale-weights), and for another model;
- what it can be told by was recorded: stale weights come with true versions or with a step at which
  they began; dropout with a second scoring of the trainer; routing flips with the experts of both
  sides, and flipped tokens carry at least half of all |d|; an outlier's place is recorded; logits
  rounded before an exact softmax come with that side's alternatives (differences of alternatives at
  one place are then differences of rounded logits).

Of two causes at once the one that carries more |d|, summed over counted tokens when it acts alone
(each |d| capped at 50), is the label. Naming the other one first is right too if it carries at
least a third as much, or if one of the two is other-tokens, whose tokens nobody can score.

None of the twelve, with the first names that are right (None: no cause is named):

- "equal": both sides have the same bits. None.
- "numeric-drift": noise of the hidden state and nothing else. None or numeric-drift.
- "another model for some samples", "another logarithm", "scattered damage": None or cannot-tell.
- "another model": other weights everywhere, and neither version nor step says so. None, cannot-tell
  or stale-weights, whose meaning includes other weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onpolicy_dumps import Recorded, write
from onpolicy_faults import (
    CAUSES,
    Fault,
    Hows,
    Scene,
    Values,
    between,
    noise,
    with_sampling,
)
from onpolicy_labels import DRIFT, EQUAL, Scores, edited, judge
from onpolicy_odd import ODD
from onpolicy_world import (
    Batch,
    Floats,
    How,
    Ints,
    Sampling,
    Scored,
    draw,
    make_world,
    with_responses,
)

from verify.onpolicy.samples import Dump

NONE_PLACES = (0, 3, 7)  # of every ten pairs of a set
NEVER_BOTH = ({"shift", "other-tokens"}, {"stale-weights", "outlier-place"})


@dataclass(frozen=True, eq=False)
class Mismatch:
    """One pair: what a doctor is given, and what it should say.

    label: the row of the confusion matrix. right: first names that are right, None for no name.
    clean: nothing is wrong but noise. truth: how it was made, for people. carried: |d| by cause.
    """

    seed: int
    label: str
    right: frozenset[str | None]
    clean: bool
    trainer: Dump
    rollout: Dump | None
    trainer_again: Dump | None
    run_config: Mapping[str, object] | None
    generation_config: Mapping[str, object] | None
    truth: Mapping[str, Any]
    carried: Mapping[str, float] = field(default_factory=dict)


def fresh_seed() -> int:
    """A seed that nobody chose."""
    return int.from_bytes(os.urandom(6), "big")


def kind_of(index: int) -> str:
    """The kind of a set's index-th pair: three of ten are none of the twelve, the rest cycle."""
    causes = tuple(CAUSES)
    rounds, place = divmod(index, 10)
    nones = sum(one < place for one in NONE_PLACES)
    if place in NONE_PLACES:
        cycle, third = divmod(rounds * len(NONE_PLACES) + nones, 3)
        return (EQUAL, DRIFT, tuple(ODD)[cycle % len(ODD)])[third]
    return causes[(rounds * (10 - len(NONE_PLACES)) + place - nones) % len(causes)]


def generate(seed: int, kind: str | None = None) -> Mismatch:
    """The pair of a seed. kind: a cause, EQUAL, DRIFT or a name of ODD; drawn when None."""
    rng = np.random.default_rng(seed)
    if kind is None:
        kind = kind_of(int(rng.integers(1 << 20)))
    for attempt in range(400):
        made = _attempt(np.random.default_rng([seed, attempt]), kind, seed)
        if made is not None:
            return made
    raise AssertionError(f"seed {seed}: no {kind} in 400 attempts")


def _attempt(rng: np.random.Generator, kind: str, seed: int) -> Mismatch | None:
    scene, prompts, limits, tools, groups = _scene(rng, kind)
    if kind == "outlier-place" and not _has_places(scene):
        return None
    faults = _faults(rng, kind, scene)
    hows = _base(rng, kind, scene, {fault.name for fault in faults})
    level = 0.0 if kind == EQUAL else between(rng, 1e-5, 2e-2)
    if kind != DRIFT and rng.random() < 0.2:
        level = 0.0
    error = noise(rng, scene, level) if level else None
    faulty = hows
    for fault in faults:
        faulty = fault.hows(faulty)
    batch = trained = draw(scene.world, faulty.draw, prompts, limits, tools, rng)
    faulty = faulty._replace(
        trainer=replace(faulty.trainer, noise=_sum(faulty.trainer.noise, error))
    )
    tops = _tops(rng, faults)
    scores = others = Scores(scene.world, batch)
    for fault in faults:
        if fault.retoken is not None:
            trained = with_responses(scene.world, batch, *fault.retoken(batch))
            others = Scores(scene.world, trained)
    scored = (
        scores.of(faulty.rollout, tops["rollout"]),
        others.of(faulty.trainer, tops["trainer"]),
    )
    written = edited(faults, *scored, batch)
    judged = judge(kind, faults, hows, scores, error, written, scored)
    if judged is None:
        return None
    carried, label, right = judged
    needs = frozenset(need for fault in faults for need in fault.needs)
    again = None
    if "again" in needs or rng.random() < 0.15:
        again = _again(rng, scene, faults, faulty.trainer, others, level, scored[0], batch)
    stale = next((fault for fault in faults if fault.name == "stale-weights"), None)
    recorded = Recorded(
        scene=scene,
        batch=batch,
        trained=trained,
        groups=groups,
        hows=faulty,
        written=written,
        again=again,
        scored=scored,
        needs=needs,
        begin=None if stale is None else int(str(stale.detail["begin"])),
        lag=0 if stale is None else int(str(stale.detail["lag"])),
    )
    files = write(rng, recorded)
    truth = {
        "noise": level,
        "causes": {fault.name: dict(fault.detail) for fault in faults},
        "samples": scene.count,
        "tokens": sum(len(one) for one in batch.responses),
        "told": files.told,
    }
    return Mismatch(
        seed,
        label,
        right,
        label in (EQUAL, DRIFT),
        files.trainer,
        files.rollout,
        files.again,
        files.run_config,
        files.generation_config,
        truth,
        carried,
    )


def _scene(
    rng: np.random.Generator, kind: str
) -> tuple[Scene, list[Ints], list[int], list[dict[int, int]], Ints]:
    """World, prompts and places of 8 to 64 samples."""
    world = make_world(rng, routed=kind == "routing-flips" or rng.random() < 0.25)
    count = int(between(rng, 8, 65))
    group = int(rng.choice([1, 2, 4, 8]))
    groups = np.arange(count) // group
    lengths = np.exp(rng.uniform(np.log(5), np.log(60), groups[-1] + 1)).astype(int)
    starts = [rng.integers(1, world.vocabulary, length) for length in lengths]
    low = between(rng, 20, 150)
    limits = np.minimum(200, np.exp(rng.uniform(np.log(low), np.log(200), count)).astype(int) + 1)
    tools: list[dict[int, int]] = [{} for _ in range(count)]
    if rng.random() < 0.2:
        for index in range(count):
            if rng.random() < 0.7:
                first, number = int(rng.integers(3, 15)), int(rng.integers(2, 12))
                ids = rng.integers(1, world.vocabulary, number)
                tools[index] = {first + at: int(one) for at, one in enumerate(ids)}
    steps = 1 if rng.random() < 0.5 else int(rng.integers(2, min(8, count // 2) + 1))
    per_rank = int(rng.choice([2, 4, 8]))
    scene = Scene(
        world,
        int(max(lengths)) + int(max(limits)),
        np.arange(count) * steps // count + int(rng.integers(0, 50)),
        np.arange(count) // per_rank % int(rng.choice([2, 4, 8])),
        rng.integers(0, int(rng.integers(2, 7)), count),
        np.arange(count) % int(rng.choice([4, 8])),
    )
    return scene, [starts[g] for g in groups], [int(x) for x in limits], tools, groups


def _faults(rng: np.random.Generator, kind: str, scene: Scene) -> list[Fault]:
    if kind in (EQUAL, DRIFT):
        return []
    if kind in ODD:
        return [ODD[kind](rng, scene)]
    names = [kind]
    if rng.random() < 0.15:
        others = [
            name
            for name in CAUSES
            if name != kind
            and {name, kind} not in NEVER_BOTH
            and (name != "routing-flips" or scene.world.experts is not None)
            and (name != "outlier-place" or _has_places(scene))
        ]
        names.append(str(rng.choice(others)))
    return [CAUSES[name](rng, scene) for name in names]


def _has_places(scene: Scene) -> bool:
    return any(
        len(numbers) >= 3 and counts.max() >= 2
        for numbers, counts in (
            np.unique(one, return_counts=True)
            for one in (scene.rank, scene.rollout_rank, scene.batch_position)
        )
    )


def _base(rng: np.random.Generator, kind: str, scene: Scene, names: set[str]) -> Hows:
    """Both sides alike: nothing, the same temperature, or raw values of what was sampled."""
    plain = How()
    scenario = rng.choice(["neutral", "heated", "raw"], p=[0.5, 0.25, 0.25])
    trainer = plain
    if kind == DRIFT and scene.world.experts is not None and rng.random() < 0.4:
        layers, number, _ = scene.world.experts.router.shape
        shape = (scene.count, scene.span, layers, number)
        trainer = replace(plain, routed=between(rng, 1e-5, 3e-3) * rng.normal(size=shape))
    if scenario == "neutral" or names & {"temperature", "truncated-support", "penalties"}:
        heat = 1.0 if scenario == "neutral" else between(rng, 0.5, 1.5)
    elif scenario == "heated":
        heat = between(rng, 0.5, 1.5)
    else:
        drawn = Sampling(
            temperature=between(rng, 0.5, 1.3),
            top_p=float(rng.choice([1.0, 0.9, 0.95])),
            top_k=int(rng.choice([0, 0, 20, 50])),
            repetition=float(rng.choice([1.0, 1.0, 1.05, 1.1])),
        )
        return Hows(replace(plain, sampling=drawn), plain, trainer)
    return Hows(*(with_sampling(how, temperature=heat) for how in (plain, plain, trainer)))


def _again(
    rng: np.random.Generator,
    scene: Scene,
    faults: list[Fault],
    how: How,
    scores: Scores,
    level: float,
    rollout: list[Scored],
    batch: Batch,
) -> Values:
    """The trainer's second scoring: the same bits, or noise from run to run, or other dropout."""
    if level and rng.random() < 0.4:
        how = replace(how, noise=_sum(how.noise, noise(rng, scene, 0.3 * level)))
    for fault in faults:
        how = fault.again(how)
    return edited(faults, rollout, scores.of(how), batch).trainer


def _tops(rng: np.random.Generator, faults: list[Fault]) -> dict[str, int]:
    """How many alternatives each side recorded, 0 for none."""
    needs = {need for fault in faults for need in fault.needs}
    tops = {}
    for side, share in (("rollout", 0.25), ("trainer", 0.1)):
        shown = rng.random() < share or f"top of {side}" in needs
        tops[side] = int(rng.integers(3, 21)) if shown else 0
    return tops


def _sum(one: Floats | None, two: Floats | None) -> Floats | None:
    return two if one is None else one if two is None else one + two
