"""Reports of results that depend on the batch: its size, the place in it, or the neighbours.

The last two kinds must be told apart: another algorithm is one thing, a leak another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import verify

LINEAR: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(24, 48), "w": verify.normal(48, 16)},
    "batch": {"x": 0, "out": 0},
    "claims": ("repeat", "batch"),
}


def split_product(x: Tensor, w: Tensor, parts: int) -> Tensor:
    """A product whose inner dimension is cut into parts, which are added in order."""
    total = torch.zeros(x.shape[0], w.shape[1])
    for a, b in zip(x.chunk(parts, 1), w.chunk(parts, 0), strict=True):
        part = torch.zeros(x.shape[0], w.shape[1])
        for column, row in zip(a.unbind(1), b.unbind(0), strict=True):
            part = part + column[:, None] * row
        total = total + part
    return total


@verify.case(**LINEAR)
def bug_12(x: Tensor, w: Tensor) -> Tensor:
    """A library that splits the inner dimension when there are few rows."""
    return split_product(x, w, 4 if len(x) < 6 else 1)


@verify.case(**LINEAR)
def bug_12_twin(x: Tensor, w: Tensor) -> Tensor:
    """The split does not depend on the number of rows."""
    return split_product(x, w, 4)


@verify.case(**LINEAR)
def bug_12_place(x: Tensor, w: Tensor) -> Tensor:
    """Rows of the last, incomplete tile of eight take another kernel."""
    full = len(x) // 8 * 8
    odd = torch.arange(len(x)) % 8 == 5  # one lane of each tile
    out = split_product(x, w, 1)
    out[full:] = split_product(x[full:], w, 4)
    out[odd] = split_product(x[odd], w, 4)
    return out


@verify.case(**LINEAR)
def bug_12_leak(x: Tensor, w: Tensor) -> Tensor:
    """A scale for quantising, taken from the whole batch."""
    scale = x.abs().amax() / 127
    return split_product((x / scale).round() * scale, w, 1)


@verify.case(**LINEAR)
def bug_12_leak_twin(x: Tensor, w: Tensor) -> Tensor:
    """A scale for each row."""
    scale = x.abs().amax(1, keepdim=True) / 127
    return split_product((x / scale).round() * scale, w, 1)


@verify.case(**LINEAR)
def bug_12_pairs(x: Tensor, w: Tensor) -> Tensor:
    """Every second row also reads the row before it: only odd rows can show it."""
    y = split_product(x, w, 1)
    before = torch.arange(len(x)) // 2 * 2
    return y + y[before] * 2.0**-12


SAMPLES: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(6, 5, 8)},
    "batch": {"x": 0, "out": 0},
    "claims": ("repeat", "batch"),
}


def attend(x: Tensor, *, borders: bool) -> Tensor:
    """Causal attention over samples packed into one sequence, one query after the other."""
    samples, length, size = x.shape
    packed = x.reshape(-1, size)
    out = []
    for position, query in enumerate(packed):
        start = position // length * length if borders else 0
        keys = packed[start : position + 1]
        weight = torch.softmax((keys * query).sum(1) / size**0.5, 0)
        out.append((weight[:, None] * keys).sum(0))
    return torch.stack(out).view(samples, length, size)


@verify.case(**SAMPLES)
def packed(x: Tensor) -> Tensor:
    """Packed sequences attend across the borders of samples."""
    return attend(x, borders=False)


@verify.case(**SAMPLES)
def packed_twin(x: Tensor) -> Tensor:
    """Each sample attends to itself only."""
    return attend(x, borders=True)
