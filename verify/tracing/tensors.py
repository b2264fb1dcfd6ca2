"""The tensors inside any value, and where a sharded one lies in its whole.

Paths are what a user would write behind the value: `0`, `hidden_states`, `1.past.0`. A bare tensor
has the path "". Values that hold no tensors, and objects of classes that neither torch's pytree nor
dataclasses know, have none: what cannot be looked into is not guessed at. Nothing raises because of
a value: what should have a digest and has none is a NoDigest at its path, which is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verify.errors import UnsupportedError
from verify.hashing import PLAIN, plain_tensor
from verify.tracing.arrays import NoDigest, parts_of
from verify.tracing.definitions import Whole

DEEPEST = 20  # levels of containers
_NAMED = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device)
_FLAT = (str, bytes, int, float, complex, type(None))
_LEAVES = (Tensor, NoDigest)
PLAIN_TYPES = frozenset(PLAIN)
Found = tuple[str, Tensor | NoDigest]


def tensors_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Found]:
    """The tensors of a call's arguments: `0`, `1.mask`, `kwargs.hidden_states`."""
    if len(args) == 1 and type(args[0]) in PLAIN_TYPES:
        found: list[Found] = [("0", args[0])]
    else:
        found = list(tensors_in(args))
    if kwargs:
        found.extend(tensors_in(kwargs, "kwargs"))
    return found


def tensors_in(value: Any, path: str = "") -> Iterable[Found]:
    """Every tensor (or array of numpy, see `arrays`) with its path. To be iterated over once."""
    kind = type(value)
    if kind in PLAIN_TYPES:  # nearly always
        return ((path, value),)
    if (kind is tuple or kind is list) and PLAIN_TYPES.issuperset(map(type, value)):
        before = f"{path}." if path else ""
        return [(f"{before}{at}", one) for at, one in enumerate(value)]
    return _searched(value, path, ())


def _searched(value: Any, path: str, around: tuple[int, ...]) -> Iterator[Found]:
    """around: the ids of the containers that hold `value`; one that holds itself ends there."""
    try:
        if isinstance(value, _LEAVES):
            items = None
        elif isinstance(value, _FLAT) or len(around) > DEEPEST or id(value) in around:
            return
        else:
            items = list(_inside(value))
    except Exception as error:  # of the value's own code, which the program may never ask
        kind, why = type(value).__name__, type(error).__name__
        yield path, NoDigest(f"no digest of what is in a {kind}: to look into it raises {why}")
        return
    if items is None:
        yield path, value
        return
    around = (*around, id(value))
    for key, inner in items:
        here = path if key is None else f"{path}.{key}" if path else str(key)
        yield from _searched(inner, here, around)


def only_tensors(found: Iterable[Found]) -> list[tuple[str, Tensor]]:
    """Those that are tensors, whether they have digests or not."""
    return [(path, t) for path, t in found if isinstance(t, Tensor)]


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, with keys; None as a key is the container itself."""
    if isinstance(value, Mapping):
        return ((_key(at, key), inner) for at, (key, inner) in enumerate(value.items()))
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, np.ndarray):
        return parts_of(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(one.name, _field(value, one.name)) for one in dataclasses.fields(value)]
    if type(value) in pytree.SUPPORTED_NODES:
        return enumerate(pytree.tree_leaves(value))
    return ()


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


def has_digest(t: Tensor | NoDigest) -> bool:
    """Whether a digest can be taken of a value."""
    try:
        plain_tensor(located(t)[0])
    except UnsupportedError:
        return False
    return True


def located(t: Tensor | NoDigest) -> tuple[Tensor, Whole | None]:
    """The tensor that this rank has, and where it lies in a larger one if it is a shard.

    A DTensor's replicas are whole; partial sums are taken as what they are on this rank.
    UnsupportedError for placements that are no ranges, for subclasses whose values cannot be had,
    and for NoDigest.
    """
    if type(t) in PLAIN_TYPES:
        return t, None  # type: ignore[return-value]
    if isinstance(t, NoDigest):
        raise UnsupportedError(t.reason)
    if type(t).__name__ == "AsyncCollectiveTensor":
        return t.wait(), None  # type: ignore[attr-defined]
    try:
        if type(t).__name__ == "DTensor":
            return _of_dtensor(t)
        plain_tensor(t)
    except UnsupportedError:
        raise
    except Exception as error:  # of the subclass's own code, such as a dispatch that lacks this
        kind, why = type(t).__name__, type(error).__name__
        raise UnsupportedError(
            f"no digest of a {kind}: to read it raises {why}; give the tensors that it holds"
        ) from error
    return t, None


def _of_dtensor(t: Tensor) -> tuple[Tensor, Whole | None]:
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
