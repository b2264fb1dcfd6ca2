"""What tests/data/onpolicy holds: dumps that the producers' own code wrote, of values made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parents[1] / "data" / "onpolicy"
LAYERS, TOP_K, EXPERTS = 3, 2, 8


def tokens_of(index: int) -> tuple[list[int], list[int]]:
    """Prompt and response of sample `index`."""
    draw = np.random.default_rng(index)
    return draw.integers(0, 151_000, 3 + index).tolist(), draw.integers(0, 151_000, 4).tolist()


def logprobs_of(index: int, side: int) -> list[float]:
    """What sampler (0) or trainer (1) said of the four tokens of sample `index`, float32."""
    draw = np.random.default_rng([index, side])
    return [float(value) for value in -draw.random(4).astype(np.float32)]


def experts_of(index: int) -> NDArray[np.int32]:
    """int32 [tokens - 1, LAYERS, TOP_K]."""
    rows = 3 + index + 4 - 1
    draw = np.random.default_rng([index, 9])
    chosen = [draw.permutation(EXPERTS)[:TOP_K] for _ in range(rows * LAYERS)]
    return np.array(chosen, dtype=np.int32).reshape(rows, LAYERS, TOP_K)
