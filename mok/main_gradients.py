"""fp32 gradients of weights that a backward adds to, as trainers with gradient accumulation keep.

It exists so that both backends take them in one form. A gradient is summed in fp32 from zero over
all rows, and that sum is added once, at the end. Refuses tensors that could not be added to in
place.

Legend: E local experts, H hidden size, I width, S shared width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mok.errors import InputError

NAMES = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
"""The weights in the order of the functional API's gradients."""


@dataclass(frozen=True)
class MainGradients:
    """fp32, contiguous: gate, up [E, I, H], down [E, H, I], shared [S, H], [S, H], [H, S].

    None: that weight's gradient is returned in a tensor of its own.
    """

    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None

    def in_order(self) -> tuple[Tensor | None, ...]:
        """The six of them as NAMES has them."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def check_main_gradients(main: MainGradients, weights: Sequence[Tensor | None]) -> None:
    """Raises InputError unless each fits its weight, in memory of its own.

    weights: as NAMES has them.
    """
    for name, tensor, weight in zip(NAMES, main.in_order(), weights, strict=True):
        if tensor is None:
            continue
        if weight is None:
            raise InputError(f"main_grads.{name} without that weight; allowed: None. Leave it out.")
        shape, device = tuple(weight.shape), weight.device
        given = (tensor.dtype, tuple(tensor.shape), tensor.device, tensor.is_contiguous())
        if given != (torch.float32, shape, device, True):
            order = "contiguous" if given[3] else "not contiguous"
            raise InputError(
                f"main_grads.{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"{order}; allowed: torch.float32 {list(shape)} on {device}, contiguous. Make it "
                "with torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)."
            )
    _check_apart(main)


def _check_apart(main: MainGradients) -> None:
    """Kernels add to all of them at once, so where two share memory, sums would get lost."""
    there = [
        (tensor.data_ptr(), tensor.data_ptr() + 4 * tensor.numel(), name)
        for name, tensor in zip(NAMES, main.in_order(), strict=True)
        if tensor is not None and tensor.numel()
    ]
    there.sort(key=lambda one: one[0])
    for (_, end, name), (begin, other_end, other) in pairwise(there):
        if begin < end:
            raise InputError(
                f"main_grads.{name} and main_grads.{other} share {min(end, other_end) - begin} "
                "bytes; allowed: memory of its own for each. Pass tensors that do not overlap."
            )


def count_changes(main: MainGradients) -> None:
    """Tells autograd that kernels have written to all of them, as add_ tells by itself.

    A graph that had saved one then refuses to use what is there now. Tensors of inference mode have
    no version, and a torch without increment_version counts nothing.
    """
    increment = getattr(torch.autograd.graph, "increment_version", None)
    for tensor in main.in_order():
        if increment is not None and tensor is not None and not tensor.is_inference():
            increment(tensor)


def add_to_main(
    main: MainGradients, gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Adds fp32 gradients to those of `main` that are there; returns the others."""
    rest: list[Tensor | None] = []
    for total, gradient in zip(main.in_order(), gradients, strict=True):
        if total is None or gradient is None:
            rest.append(gradient)
        else:
            total.add_(gradient)
            rest.append(None)
    return tuple(rest)
