"""Faults that a coarser detector would miss, or whose clean twin it would alarm at.

A comparison of floats takes -0 for 0 and a NaN for unequal to itself; all-ones upstream gradients
hide a shuffled gradient; restored seeds do not reach the hash of a string.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verify.controls.planting import (
    COLUMNS,
    ROWS,
    cases_of,
    drawn,
    drawn_order,
    fold,
    plant,
)
from verify.inputs import normal

QUIET_NAN = 0x7FC00000


def nans(payload: int) -> Tensor:
    """Many quiet NaNs with one payload."""
    bits = torch.full((ROWS,), QUIET_NAN + payload, dtype=torch.int32)
    return bits.view(torch.float32)


def _with_tail(x: Tensor, tail: Tensor) -> Tensor:
    return torch.cat((fold(x), tail))


def negative_zero_somewhere(x: Tensor) -> Tensor:
    """One of many zeros is negative, each time another one."""
    zeros = torch.zeros(ROWS)
    zeros[drawn(ROWS)] = -0.0
    return _with_tail(x, zeros)


def negative_zero_in_place(x: Tensor) -> Tensor:
    """One of many zeros is negative, always the same."""
    zeros = torch.zeros(ROWS)
    zeros[5] = -0.0
    return _with_tail(x, zeros)


def nan_of_any_kind(x: Tensor) -> Tensor:
    """NaNs with another payload each time."""
    return _with_tail(x, nans(drawn(2**20)))


def nan_of_one_kind(x: Tensor) -> Tensor:
    """NaNs with a payload, always the same: unequal to themselves, but with equal bits."""
    return _with_tail(x, nans(77))


class _Shuffled(torch.autograd.Function):
    """The identity, whose gradient is given back in another order of the columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: list[int]) -> Tensor:
        ctx.order = order
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.order], None


def gradient_shuffled(x: Tensor) -> Tensor:
    """The gradient is permuted at random: all-ones upstream gradients would hide it."""
    return _Shuffled.apply(x, drawn_order(COLUMNS))


def gradient_in_place(x: Tensor) -> Tensor:
    """The gradient is permuted in one and the same way."""
    return _Shuffled.apply(x, list(range(COLUMNS - 1, -1, -1)))


class Counting(torch.nn.Module):
    """Adds the number of its calls, kept in a buffer or, `hidden`, beside them."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.calls: Tensor
        if hidden:
            self.calls = torch.zeros(())
        else:
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return fold(x) + self.calls


def through_module(x: Tensor, module: Counting) -> Tensor:
    """Calls a module that counts its calls: what is no buffer is not restored."""
    return module(x)


def counts_hidden() -> dict[str, Counting]:
    return {"module": Counting(hidden=True)}


def counts_in_buffer() -> dict[str, Counting]:
    return {"module": Counting(hidden=False)}


def draws_any_number(x: Tensor) -> Tensor:
    """Leaves the global generator in another state each time, though its own result is the same."""
    torch.rand(1 + drawn(1000))
    return fold(x)


def draws_one_number(x: Tensor) -> Tensor:
    """Leaves the global generator in the same state each time."""
    torch.rand(1)
    return fold(x)


def maximum_of_batch(x: Tensor) -> Tensor:
    """A full batch is scaled by its largest element: rows depend on their neighbours."""
    return fold(x) / (x.abs().max() if len(x) == ROWS else 1)


def maximum_of_row(x: Tensor) -> Tensor:
    """Each row is scaled by its own largest element."""
    return fold(x) / x.abs().amax(dim=1)


def order_of_a_set(x: Tensor) -> Tensor:
    """Sums in the order of a set of strings, which depends on PYTHONHASHSEED."""
    return fold(x, [int(name) for name in {str(column) for column in range(COLUMNS)}])


def order_of_a_sorted_set(x: Tensor) -> Tensor:
    """Sums in the order of a sorted set of strings."""
    return fold(x, [int(name) for name in sorted({str(column) for column in range(COLUMNS)})])


CONTROLS = (
    plant(
        "detector/hash-seed",
        order_of_a_set,
        order_of_a_sorted_set,
        claim="process",
        reason="bits-differ",
        also=("repeat",),
        alone=True,
    ),
    plant(
        "detector/gradient",
        gradient_shuffled,
        gradient_in_place,
        claim="repeat",
        reason="bits-differ",
        alone=True,
        inputs={"x": normal(ROWS, COLUMNS, requires_grad=True)},
    ),
    plant(
        "detector/signed-zero",
        negative_zero_somewhere,
        negative_zero_in_place,
        claim="repeat",
        reason="bits-differ",
        alone=True,
    ),
    plant(
        "detector/nan-payload",
        nan_of_any_kind,
        nan_of_one_kind,
        claim="repeat",
        reason="bits-differ",
        alone=True,
    ),
    plant(
        "detector/module-state",
        through_module,
        through_module,
        claim="repeat",
        reason="bits-differ",
        alone=True,
        fault={"setup": counts_hidden},
        twin={"setup": counts_in_buffer},
    ),
    plant(
        "detector/generator-state",
        draws_any_number,
        draws_one_number,
        claim="repeat",
        reason="bits-differ",
        alone=True,
    ),
    plant(
        "detector/batch-neighbours",
        maximum_of_batch,
        maximum_of_row,
        claim="batch",
        reason="bits-differ",
        also=("repeat", "history"),
        alone=True,
        batch={"x": 0, "out": 0},
    ),
)
CASES = cases_of(CONTROLS)
