"""Prompts and what was sampled behind them, and how each token is known wherever it stands.

A place is sequence * 2^32 + position, the same for a token alone, in a batch, behind padding or
packed; -1 is no token. The last token of a sequence is never given to the model: its logits would
tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = -1
_SHIFT = 32


@dataclass(frozen=True)
class Sampled:
    """Token ids of a prompt and of the response. stopped: whether an end token ended it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    stopped: bool = False

    @property
    def given(self) -> tuple[int, ...]:
        """What the model is given: all but the last token."""
        return (*self.prompt, *self.response)[:-1]


def places(sequence: int, start: int, stop: int) -> Tensor:
    """int64 [stop - start], of a sequence's positions."""
    return torch.arange(start, stop, dtype=torch.int64) + (sequence << _SHIFT)


def placed(place: int) -> tuple[int, int]:
    """Sequence and position."""
    return place >> _SHIFT, place & ((1 << _SHIFT) - 1)


def lengths(samples: Sequence[Sampled]) -> list[int]:
    """How many tokens of each sequence the model is given."""
    return [len(one.given) for one in samples]
