"""Where a step begins with the state that it finds: at each pass of training, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from replayed_toys import ordered
from torch import nn
from torch.utils.checkpoint import checkpoint

import verify
from verify.replaying.borders import States
from verify.replaying.orders import Orders
from verify.tracing.files import read_folder


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_a_backward_runs_again_begins_no_pass(
    tmp_path: Path, reentrant: bool
) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    model = Again()
    with ordered(tmp_path / "run", Orders("", states=True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with verify.record("run", model, optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    (recording,) = read_folder(tmp_path / "run").values()
    assert [len(States(recording).openings(number)) for number in range(3)] == [1, 1, 1]
