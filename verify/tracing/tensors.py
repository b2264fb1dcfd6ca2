"""The tensors inside any value, and where a sharded one lies in its whole.

Paths are what a user would write behind the value: `0`, `hidden_states`, `1.past.0`. A bare tensor
has the path "". Values that hold no tensors, and objects of classes that neither torch's pytree nor
dataclasses know, have none: what cannot be looked into is not guessed at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verify.errors import UnsupportedError
from verify.tracing.definitions import Whole

DEEPEST = 20  # levels of containers
_NAMED = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device)
_FLAT = (str, bytes, int, float, complex, type(None))
Found = tuple[str, Tensor]


def tensors_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Found]:
    """The tensors of a call's arguments: `0`, `1.mask`, `kwargs.hidden_states`."""
    found = list(tensors_in(args))
    if kwargs:
        found.extend(tensors_in(kwargs, "kwargs"))
    return found


def tensors_in(value: Any, path: str = "", around: tuple[int, ...] = ()) -> Iterator[Found]:
    """Every tensor (or numeric array of numpy, as a tensor of the same memory) with its path.

    around: the ids of the containers that hold `value`; one that holds itself ends there.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, _FLAT) or len(around) > DEEPEST or id(value) in around:
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = ((_key(at, key), inner) for at, (key, inner) in enumerate(value.items()))
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc" and value.dtype.isnative:
            yield path, torch.from_numpy(value if value.flags.writeable else value.copy())
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(one.name, _field(value, one.name)) for one in dataclasses.fields(value)]
    elif type(value) in pytree.SUPPORTED_NODES:
        items = enumerate(pytree.tree_leaves(value))
    around = (*around, id(value))
    for key, inner in items:
        yield from tensors_in(inner, f"{path}.{key}" if path else str(key), around)


def _key(position: int, key: Any) -> str:
    """What a key is called in each run alike: not all objects' texts are without an address."""
    plain = isinstance(key, _NAMED) or (
        isinstance(key, tuple) and all(isinstance(one, _NAMED) for one in key)
    )
    return str(key) if plain else f"{type(key).__name__}-{position}"


def _field(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # of what computes it: to read it is not ours to make fail
        return None


def located(t: Tensor) -> tuple[Tensor, Whole | None]:
    """The tensor that this rank has, and where it lies in a larger one if it is a shard.

    A DTensor's replicas are whole; partial sums are taken as what they are on this rank.
    UnsupportedError for placements that are no ranges.
    """
    if type(t).__name__ == "AsyncCollectiveTensor":
        return t.wait(), None  # type: ignore[attr-defined]
    if type(t).__name__ != "DTensor":
        return t, None
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(t, DTensor)
    local, _ = located(t._local_tensor)
    if any(placement.is_partial() for placement in t.placements):
        return local, None
    if not all(type(placement) in (Replicate, Shard) for placement in t.placements):
        raise UnsupportedError(f"no digest of a DTensor placed as {t.placements}: not a range")
    full = tuple(t.shape)
    shape, starts = compute_local_shape_and_global_offset(full, t.device_mesh, t.placements)
    if tuple(shape) == full:
        return local, None
    if tuple(local.shape) != tuple(shape):
        raise UnsupportedError(
            f"a DTensor has {tuple(local.shape)} on this rank, and {tuple(shape)} by its placement"
        )
    # an empty shard may be said to start behind the end
    starts = tuple(min(start, size) for start, size in zip(starts, full, strict=True))
    ranges = tuple((start, start + size) for start, size in zip(starts, shape, strict=True))
    return local, Whole(full, ranges)
