"""The global random generators: snapshot, restore, leave free, and see who drew from them.

Covers torch (CPU and every initialised CUDA device), numpy and Python's `random`. Generators that
a user makes are the user's own and are not touched.
"""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class GeneratorState:
    """The state of every global generator, by name."""

    torch_cpu: torch.Tensor
    numpy: dict[str, Any]
    python: Any
    cuda: tuple[torch.Tensor, ...] = ()


def snapshot() -> GeneratorState:
    """The present state of all global generators."""
    cuda: tuple[torch.Tensor, ...] = ()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = tuple(torch.cuda.get_rng_state_all())
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return GeneratorState(torch.get_rng_state(), numpy_state, random.getstate(), cuda)


def restore(state: GeneratorState) -> None:
    """Puts all global generators back to `state`."""
    torch.set_rng_state(state.torch_cpu)
    np.random.set_state(state.numpy)
    random.setstate(state.python)
    if torch.cuda.is_initialized():
        if state.cuda:
            torch.cuda.set_rng_state_all(list(state.cuda))
        else:  # CUDA began after the snapshot, with the seed that was set before it
            torch.cuda.manual_seed_all(torch.initial_seed())


def seed_all(seed: int) -> None:
    """Seeds every global generator, as before a case's setup."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def scatter() -> int:
    """Puts every generator into a state drawn from the operating system; returns the seed.

    This is the "left free" arm: what a case would see after unknown earlier use.
    """
    seed = int.from_bytes(os.urandom(4), "little")
    seed_all(seed)
    return seed


def fingerprints(state: GeneratorState) -> dict[str, str]:
    """A short hash of each generator's state."""
    numpy_state = state.numpy["state"]
    parts: dict[str, bytes] = {
        "torch": state.torch_cpu.numpy().tobytes(),
        "numpy": numpy_state["key"].tobytes()
        + repr((numpy_state["pos"], state.numpy["has_gauss"], state.numpy["gauss"])).encode(),
        "python": repr(state.python).encode(),
    }
    parts |= {f"cuda:{i}": s.numpy().tobytes() for i, s in enumerate(state.cuda)}
    return {name: hashlib.sha256(part).hexdigest()[:16] for name, part in parts.items()}
