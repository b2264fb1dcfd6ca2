"""Reports of results that differ from run to run, as small cases: each fault and its twin.

Chance comes from the operating system, since the harness restores every seed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import verify


def order_of(count: int) -> Tensor:
    """An order that nobody can restore, as threads of atomics arrive."""
    keys = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return torch.argsort(keys)


ROUTED = {"y": verify.normal(1000, 8), "x": verify.normal(250, 8)}


@verify.case(inputs=ROUTED, claims=("repeat",))
def bug_01(y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Combine of a mixture of experts by atomic scatter-add; the other outputs are stable."""
    order = order_of(1000)
    out = torch.zeros(250, 8).index_add_(0, order // 4, y[order])
    return {"out": out, "dk": x * 2, "dv": x + 1}


@verify.case(inputs=ROUTED, claims=("repeat",))
def bug_01_twin(y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The same sum with slots ascending."""
    return {"out": y.view(250, 4, 8).sum(1), "dk": x * 2, "dv": x + 1}


class Tuned:
    """A kernel that accumulates, and its tuner: the first call tries every candidate."""

    def __init__(self, *, resets: bool) -> None:
        self.resets, self.tuned = resets, False

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], w.shape[1])
        for _ in range(1 if self.tuned else 3):  # two candidates, then the call itself
            if self.resets:
                out.zero_()
            out += x @ w
        self.tuned = True
        return out


def product(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, verify.Reference]:
    """The product in float64, with the budget of an fp32 sum."""
    x, w = inputs["x"].double(), inputs["w"].double()
    return {"out": verify.reduction(x @ w, x.abs() @ w.abs(), len(w), torch.float32)}


FACTORS = {"x": verify.normal(16, 8), "w": verify.normal(8, 12)}
TUNED: Mapping[str, Any] = {
    "inputs": FACTORS,
    "claims": ("repeat", "history", "reference"),
    "reference": product,
}


@verify.case(setup=lambda: {"op": Tuned(resets=False)}, **TUNED)
def bug_02(x: Tensor, w: Tensor, op: Tuned) -> Tensor:
    """The tuner runs every candidate on the real output buffer."""
    return op(x, w)


@verify.case(setup=lambda: {"op": Tuned(resets=True)}, **TUNED)
def bug_02_twin(x: Tensor, w: Tensor, op: Tuned) -> Tensor:
    """The tuner resets the buffer before every candidate."""
    return op(x, w)


OWNED = 40  # rows that belong to a group; the other 24 belong to none
ROWS = {"x": verify.normal(64, 32), "w": verify.normal(32, 16)}


def grouped(x: Tensor, w: Tensor) -> Tensor:
    """A grouped product that writes rows below the last offset only."""
    y = torch.empty(x.shape[0], w.shape[1])
    y[:OWNED] = x[:OWNED] @ w
    return y


# first, since the condition leaves freed NaN buffers behind: its own base must not hold them
@verify.case(inputs=ROWS, claims=("memory",))
def bug_04_read(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """Rows past the last group are weighted with zero and added: 0 * infinity is NaN."""
    weight = torch.ones(64, 1)
    weight[OWNED:] = 0
    return {"total": (grouped(x, w).square() * weight).sum(0), "norm": x.square().sum(1)}


@verify.case(inputs=ROWS, claims=("memory",))
def bug_04(x: Tensor, w: Tensor) -> Tensor:
    """All rows are handed out, those past the last group never written."""
    return grouped(x, w)


@verify.case(inputs=ROWS, claims=("memory",))
def bug_04_twin(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """The tail is as dirty, but nothing reads it."""
    y = grouped(x, w)[:OWNED]
    return {"valid": y, "total": y.square().sum(0), "norm": x.square().sum(1)}


DATA = {"x": verify.normal(64, 4)}


@verify.case(inputs=DATA, claims=("repeat",))
def bug_09_dropout(x: Tensor) -> dict[str, Tensor]:
    """A layer that drops without saying so."""
    return {"out": torch.nn.functional.dropout(x, 0.5), "norm": x.square().sum(1)}


@verify.case(inputs=DATA, setup=lambda: {"own": torch.Generator()}, claims=("repeat",))
def bug_09_dropout_twin(x: Tensor, own: torch.Generator) -> dict[str, Tensor]:
    """The mask comes from a generator of its own."""
    mask = torch.rand(x.shape, generator=own) < 0.5
    return {"out": torch.where(mask, 2 * x, 0), "norm": x.square().sum(1)}


@verify.case(inputs=DATA, claims=("repeat",), random=True)
def bug_11(x: Tensor) -> Tensor:
    """A shuffle for which the epoch was never set: the same order every time."""
    torch.manual_seed(42)
    return x[torch.randperm(64)]


@verify.case(inputs=DATA, claims=("repeat",), random=True)
def bug_11_twin(x: Tensor) -> Tensor:
    """A shuffle by the global generator."""
    return x[torch.randperm(64)]
