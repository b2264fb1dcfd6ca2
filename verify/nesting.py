"""Arguments that hold tensors inside: lists, dicts, tuples, numpy arrays.

Each inner tensor, array and module becomes an input of its own, called `NAME.0`, `NAME.1`, ...; the
container is built anew around fresh copies for every execution. Without this an inner tensor would
be shared by all executions, its mutation unseen and its gradient never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Inner:
    """Stands for a leaf that is an input of its own; `array`: the function gets numpy's view."""

    name: str
    array: bool = False


@dataclass(frozen=True)
class Nest:
    """A container taken apart."""

    leaves: tuple[Any, ...]
    spec: Any


def unnest(made: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Nest]]:
    """Splits arguments into flat ones and nests; tensors and modules of nests become flat ones."""
    flat: dict[str, Any] = {}
    nests: dict[str, Nest] = {}
    for name, value in made.items():
        leaves, spec = pytree.tree_flatten(value)
        if isinstance(value, Tensor | torch.nn.Module) or not any(map(_tracked, leaves)):
            flat[name] = value
            continue
        alone = len(leaves) == 1 and leaves[0] is value
        stored: list[Any] = []
        for index, leaf in enumerate(leaves):
            if not _tracked(leaf):
                stored.append(leaf)
                continue
            inner = name if alone else f"{name}.{index}"
            array = isinstance(leaf, np.ndarray)
            flat[inner] = torch.from_numpy(leaf.copy()) if array else leaf
            stored.append(Inner(inner, array))
        nests[name] = Nest(tuple(stored), spec)
    return flat, nests


def arguments_of(values: Mapping[str, Any], nests: Mapping[str, Nest]) -> dict[str, Any]:
    """The arguments of a call: flat values as they are, nests built anew around them."""
    inside = {leaf.name for nest in nests.values() for leaf in nest.leaves if _is_inner(leaf)}
    built = {name: value for name, value in values.items() if name not in inside}
    for name, nest in nests.items():
        leaves = [_fill(leaf, values) for leaf in nest.leaves]
        built[name] = pytree.tree_unflatten(leaves, nest.spec)
    return built


def _fill(leaf: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(leaf, Inner):
        return leaf
    return values[leaf.name].numpy() if leaf.array else values[leaf.name]


def _is_inner(leaf: Any) -> bool:
    return isinstance(leaf, Inner)


def _tracked(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "biufc"
    return isinstance(leaf, Tensor | torch.nn.Module)
