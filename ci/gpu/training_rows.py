"""What ci/gpu/training.py shows of its settings, and what is wrong with it, in words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training_model import LAYERS  # beside this file

STEPS = 200
"""After so many, losses must have fallen."""


@dataclass(frozen=True)
class Setting:
    """ranks: that train together. shared: with a shared expert. recompute: activations anew."""

    ranks: int
    shared: bool
    recompute: bool


@dataclass(frozen=True)
class Trained:
    """What one training gave. losses, weights: SHA-256 of all losses' bits, of all weights.

    kernels: backwards that the Hopper kernels ran on this rank. first, last: losses.
    """

    losses: str
    weights: str
    kernels: int
    first: float
    last: float
    seconds: float


def settings(ranks: int) -> list[Setting]:
    """All of so many ranks."""
    return [Setting(ranks, *both) for both in itertools.product((True, False), repeat=2)]


def row_of(setting: Setting, steps: int, runs: Sequence[Trained], on_gpu: bool) -> dict[str, Any]:
    """What a setting's trainings show. equal: all have the same losses and weights."""
    first = runs[0]
    return {
        **asdict(setting),
        "steps": steps,
        "times": len(runs),
        "equal": len({(one.losses, one.weights) for one in runs}) == 1,
        "losses": first.losses,
        "weights": first.weights,
        "first": first.first,
        "last": first.last,
        "kernels": min(one.kernels for one in runs),
        "wanted": LAYERS * steps * on_gpu,
        "seconds": sum(one.seconds for one in runs),
    }


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words."""
    told = []
    for row in rows:
        name = name_of(row)
        if not row["equal"]:
            told.append(f"{name}: not the same bits in {row['times']} trainings")
        if row["kernels"] != row["wanted"]:
            told.append(f"{name}: kernels ran {row['kernels']} of {row['wanted']} backwards")
        if row["steps"] >= STEPS and not row["last"] < 0.8 * row["first"]:
            told.append(f"{name}: losses went from {row['first']:.3f} to {row['last']:.3f}")
    told += _unlike(rows, ("ranks", "shared"), "recomputed and kept activations")
    told += _unlike([row for row in rows if not row["shared"]], ("shared",), "numbers of ranks")
    return told


def _unlike(rows: Sequence[dict[str, Any]], same: Sequence[str], what: str) -> list[str]:
    """Settings that are alike in `same` and should have the same bits, but have not."""
    found: dict[tuple[Any, ...], set[tuple[str, str]]] = {}
    for row in rows:
        key = tuple(row[name] for name in same)
        found.setdefault(key, set()).add((row["losses"], row["weights"]))
    return [
        f"{', '.join(f'{name} {value}' for name, value in zip(same, key, strict=True))}: {what} "
        f"give {len(bits)} different results"
        for key, bits in found.items()
        if len(bits) > 1
    ]


def name_of(row: dict[str, Any]) -> str:
    """A setting in words."""
    shared = "with" if row["shared"] else "without"
    recompute = "computed again" if row["recompute"] else "kept"
    return f"{row['ranks']} rank(s), {shared} a shared expert, activations {recompute}"
