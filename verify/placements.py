"""Where the pieces of a tensor lie: replicated on every rank, sharded along a dimension, or local.

A placement lets digests of shards be added up to that of the whole tensor, and says which tensors
may be compared across ranks at all. There is no default: a tensor of unknown placement stays
UNVERIFIED(no-placement) on the claims that need one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from verify.errors import CaseError

SizesOf = Callable[[int, int], Sequence[int]]
T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """`kind` is "replicated", "sharded" (along `dim`) or "local" (a rank's own, comparable only
    with itself)."""

    kind: str
    dim: int = 0
    sizes: SizesOf | None = None

    def __str__(self) -> str:
        return f"sharded({self.dim})" if self.kind == "sharded" else self.kind


replicated = Placement("replicated")
local = Placement("local")


def sharded(dim: int, sizes: SizesOf | None = None) -> Placement:
    """Split along `dim` in rank order.

    `sizes(total, parts)` gives the number of entries of each rank, zero allowed; they must add up
    to `total`. By default the parts are as equal as possible, larger ones first.
    """
    return Placement("sharded", dim, sizes)


def even_sizes(total: int, parts: int) -> list[int]:
    """As equal as possible, larger parts first: 10 over 4 is [3, 3, 2, 2]."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def split(placement: Placement, total: int, parts: int) -> list[int]:
    """The sizes of all parts. Raises CaseError when the case's own `sizes` does not add up."""
    sizes = [int(size) for size in (placement.sizes or even_sizes)(total, parts)]
    if len(sizes) != parts or sum(sizes) != total or min(sizes, default=0) < 0:
        raise CaseError(
            f"sizes({total}, {parts}) of {placement} gave {sizes}; "
            f"it must give {parts} numbers >= 0 that add up to {total}"
        )
    return sizes


def lookup(patterns: Mapping[str, T], name: str) -> T | None:
    """The value of the first pattern (shell style) that matches `name`; an exact name wins."""
    if name in patterns:
        return patterns[name]
    return next((value for key, value in patterns.items() if fnmatchcase(name, key)), None)


def placement_of(patterns: Mapping[str, Placement], name: str) -> Placement | None:
    """The placement of an input, output or gradient.

    A gradient lies where its sharded input lies; that of a replicated input may be a partial sum
    or an already reduced one, so it must be declared under its own name, `grad.NAME`.
    """
    found = lookup(patterns, name)
    if found is None and name.startswith("grad."):
        found = lookup(patterns, name.removeprefix("grad."))
        return found if found is not None and found.kind == "sharded" else None
    return found


def batch_dim_of(patterns: Mapping[str, int], name: str) -> int | None:
    """The batch dimension of an input, output or gradient (a gradient has its input's)."""
    found = lookup(patterns, name)
    if found is None and name.startswith("grad."):
        found = lookup(patterns, name.removeprefix("grad."))
    return found
