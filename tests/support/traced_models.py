"""Small models to record, and what a recording of them holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import verify
from verify.tracing.definitions import Event, Step
from verify.tracing.files import read_folder


class Attention(nn.Module):
    """Reads its input three times, and is called with a keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = (self.q(x) @ self.k(x).transpose(-1, -2) * scale).softmax(-1)
        return weights @ self.v(x), {"weights": weights}


class Block(nn.Module):
    """With normalisation behind the sum, so that the residual's gradient joins the module's own;
    a change in place, dropout and a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Dropout(0.2)
        )
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out, _ = self.attention(x, scale=torch.full((), 0.5))
        x = self.norm(x + out)
        return x + self.down(self.feed(x))


def stack(depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(2, 5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_of(folder: Path) -> tuple[Step, ...]:
    """Of the only rank, whose recording must be complete."""
    (found,) = read_folder(folder).values()
    assert found.complete, found.problem
    return found.steps


def events(step: Step, kind: str, name: str | None = None) -> list[Event]:
    return [
        event
        for event in step.events
        if event.definition.kind == kind and name in (None, event.definition.name)
    ]


def recorded(folder: Path, model: nn.Module, call: Callable[[], object], **options: object) -> Step:
    """The single step of a call without an optimizer."""
    with verify.record(folder, model, **options):  # type: ignore[arg-type]
        call()
    _, step = steps_of(folder)
    return step
