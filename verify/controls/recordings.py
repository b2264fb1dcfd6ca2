"""Recording changes nothing: training steps alternate between recorded and not, and stay equal.

The fault is a recorder that draws one random number for itself, as a sampler of tensors would.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from verify.controls.planting import COLUMNS, cases_of, plant
from verify.tracing.recording import record

STEPS = 2


def trains(*, draws: bool) -> Callable[[Tensor], dict[str, Tensor]]:
    """Steps of AdamW over dropout, every other call inside of a recording."""
    calls = itertools.count()

    def execute(x: Tensor) -> dict[str, Tensor]:
        """Weights after the steps, and the random numbers that come next."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(COLUMNS, 8), nn.Dropout(), nn.LayerNorm(8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        recorded = next(calls) % 2 == 1
        with (
            tempfile.TemporaryDirectory() as folder,
            record(folder, model) if recorded else nullcontext(),
        ):
            for _ in range(STEPS):
                if recorded and draws:
                    torch.rand(1)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        return {**weights, "next": weights["0.weight"] + torch.rand(8, COLUMNS)}

    return execute


CONTROLS = (
    plant(
        "recording/changes-nothing",
        trains(draws=True),
        trains(draws=False),
        claim="repeat",
        reason="bits-differ",
    ),
)
CASES = cases_of(CONTROLS)
