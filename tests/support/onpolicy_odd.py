"""Faults of the toy model's two sides that are none of the twelve, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from onpolicy_faults import Fault, Hows, Maker, Scene, Written, between, directions
from onpolicy_world import Batch, Change


def some_samples(rng: np.random.Generator, scene: Scene) -> Fault:
    """None of the twelve: another model served some requests, and nothing recorded says which."""
    hit = rng.random(scene.count) < rng.uniform(0.1, 0.5)
    hit[rng.integers(scene.count)] = True
    return _other_model(rng, scene, hit, "another model for some samples")


def all_samples(rng: np.random.Generator, scene: Scene) -> Fault:
    """None of the twelve for all one can tell: other weights everywhere, no version, no step."""
    return _other_model(rng, scene, np.ones(scene.count, dtype=bool), "another model")


def other_logarithm(rng: np.random.Generator, scene: Scene) -> Fault:
    """None of the twelve: the trainer writes logarithms to base 2 or 10."""
    base = float(rng.choice([2, 10]))

    def edit(written: Written, batch: Batch, before: Written) -> Written:
        logs = [one / np.log(base) for one in written.trainer]
        scaled = [one.astype(np.float32).astype(np.float64) for one in logs]
        return Written(written.rollout, scaled)

    return Fault("another logarithm", {"base": base}, edit=edit)


def scattered(rng: np.random.Generator, scene: Scene) -> Fault:
    """None of the twelve: values damaged here and there, by no rule."""
    rate, size, seed = rng.uniform(0.01, 0.1), between(rng, 0.1, 3), int(rng.integers(1 << 32))

    def edit(written: Written, batch: Batch, before: Written) -> Written:
        own = np.random.default_rng(seed)
        out = []
        for one in written.trainer:
            error = np.where(own.random(len(one)) < rate, size * own.normal(size=len(one)), 0.0)
            out.append(np.where(error != 0, np.float32(-np.abs(one + error)), one))
        return Written(written.rollout, out)

    return Fault("scattered damage", {"rate": rate, "size": size}, edit=edit)


def _other_model(
    rng: np.random.Generator, scene: Scene, hit: NDArray[np.bool_], name: str
) -> Fault:
    change = Change(directions(rng, scene.world), between(rng, 3e-3, 0.3), hit)

    def hows(given: Hows) -> Hows:
        return Hows(
            replace(given.draw, change=change), replace(given.rollout, change=change), given.trainer
        )

    return Fault(name, {"amount": change.amount, "samples": int(hit.sum())}, hows, factor=2.0)


ODD: Mapping[str, Maker] = MappingProxyType(
    {
        "another model for some samples": some_samples,
        "another model": all_samples,
        "another logarithm": other_logarithm,
        "scattered damage": scattered,
    }
)
