"""A training that is recorded in chosen steps, with something between two of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from traced_models import stack

import verify

STEPS = 8
Between = Callable[[nn.Module, int], None]


def nothing(model: nn.Module, number: int) -> None:
    """Between two steps."""


def run(folder: Path, between: Between = nothing, length: int = STEPS, **choice: Any) -> Path:
    """A training with dropout, which draws, and evaluations, which end no step."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    np.random.seed(1)
    random.seed(1)
    with verify.record(folder, model, optimizer, **choice):
        for number in range(length):
            between(model, number)
            loss = model(torch.randn(2, 5, 8)).square().mean()
            verify.probe("loss", loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def touch(step: int) -> Between:
    def between(model: nn.Module, number: int) -> None:
        if number == step:
            with torch.no_grad():
                model[1].down.bias[3] += 1e-3

    return between
