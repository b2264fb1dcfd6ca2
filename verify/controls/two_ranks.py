"""Faults that show on two ranks: replicas that differ, degrees that disagree, no declaration.

Only digests cross from rank to rank, so the digest itself is tried here: two elements swapped, the
sign of a zero, one bit and a NaN's payload, each of which a sum, an XOR or a comparison of floats
would let pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verify.controls.behaviours import flips_a_bit, flips_a_bit_back
from verify.controls.gaps import drawn_scale, fixed_scale, times_scale
from verify.controls.one_process import in_order
from verify.controls.planting import ROWS, backwards, cases_of, flip_lowest_bit, fold, plant
from verify.controls.subtleties import nans
from verify.placements import local, replicated, sharded
from verify.sessions import group_size


def sum_of_own_tokens(x: Tensor) -> Tensor:
    """Adds up this rank's tokens and forgets those of the other."""
    return x.sum(dim=0)


def sum_of_all_tokens(x: Tensor) -> Tensor:
    """Adds up this rank's tokens, then over ranks."""
    total = x.sum(dim=0)
    dist.all_reduce(total)
    return total


def by_degree(x: Tensor, group: Any = None) -> Tensor:
    """Takes another order of addition when it is alone."""
    return backwards(x) if group_size(group) == 1 else fold(x)


def at_any_degree(x: Tensor, group: Any = None) -> Tensor:
    """Takes one order of addition."""
    return fold(x)


def by_rank(x: Tensor) -> Tensor:
    """Takes another order of addition on rank 1."""
    return backwards(x) if dist.get_rank() == 1 else fold(x)


def random_on_one_rank(x: Tensor) -> Tensor:
    """A bit of rank 1's own tensor is turned over at random."""
    return flips_a_bit(x) if dist.get_rank() == 1 else fold(x)


def random_on_no_rank(x: Tensor) -> Tensor:
    """A bit of rank 1's own tensor is turned over twice."""
    return flips_a_bit_back(x) if dist.get_rank() == 1 else fold(x)


def swapped(values: Tensor) -> Tensor:
    """Two neighbours change places: same sum, same XOR, same set."""
    order = list(range(len(values)))
    order[10], order[11] = 11, 10
    return values[order]


def changed_on_rank_one(
    change: Callable[[Tensor], Tensor], tail: Callable[[], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """The sums, followed by `tail`, changed by `change` on rank 1."""

    def execute(x: Tensor) -> Tensor:
        values = fold(x) if tail is None else torch.cat((fold(x), tail()))
        return change(values) if dist.get_rank() == 1 else values

    execute.__doc__ = change.__doc__
    return execute


def one_bit(values: Tensor) -> Tensor:
    """One bit of one element is turned over."""
    return flip_lowest_bit(values, 33)


def negative_last_zero(values: Tensor) -> Tensor:
    """One zero becomes negative."""
    values[-1] = -0.0
    return values


def other_payload(values: Tensor) -> Tensor:
    """One NaN gets another payload."""
    return flip_lowest_bit(values, len(values) - 1)


def there_and_back(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change that undoes itself."""

    def both(values: Tensor) -> Tensor:
        """The same change, twice."""
        return change(change(values))

    return both


def zeros() -> Tensor:
    return torch.zeros(ROWS)


def quiet_nans() -> Tensor:
    return nans(0)


def positive_zero(values: Tensor) -> Tensor:
    """One zero becomes negative and positive again."""
    negative_last_zero(values)[-1] = 0.0
    return values


RANKS: Mapping[str, Any] = {"claim": "rank", "ranks": 2, "claims": ("rank",)}
EVERYWHERE = {"out": replicated}
DIGEST: Mapping[str, Any] = {
    **RANKS,
    "reason": "ranks-differ",
    "alone": True,
    "placement": EVERYWHERE,
}

CONTROLS = (
    plant(
        "condition/rank",
        sum_of_own_tokens,
        sum_of_all_tokens,
        claim="rank",
        reason="ranks-differ",
        alone=True,
        also=("repeat", "history"),
        ranks=2,
        placement={"x": sharded(0), "out": replicated},
    ),
    plant(
        "condition/ep",
        by_degree,
        at_any_degree,
        claim="ep",
        reason="bits-differ",
        alone=True,
        also=("repeat", "rank"),
        ranks=2,
        ep=(1, 2),
        placement={"x": sharded(0), "out": sharded(0)},
    ),
    plant("reason/ranks-differ", by_rank, in_order, **DIGEST),
    plant(
        "detector/rank-own",
        random_on_one_rank,
        random_on_no_rank,
        **RANKS,
        reason="bits-differ",
        alone=True,
        placement={"out": local},
    ),
    plant(
        "reason/no-placement",
        in_order,
        in_order,
        **RANKS,
        reason="no-placement",
        alone=True,
        twin={"placement": EVERYWHERE},
    ),
    plant(
        "reason/unsupported",
        in_order,
        in_order,
        claim="rank",
        reason="unsupported",
        alone=True,
        placement=EVERYWHERE,
        fault={"ranks": 1},
        twin={"ranks": 2},
    ),
    plant(
        "detector/input-mismatch-ranks",
        times_scale,
        times_scale,
        **RANKS,
        reason="input-mismatch",
        alone=True,
        placement=EVERYWHERE,
        fault={"setup": drawn_scale},
        twin={"setup": fixed_scale},
    ),
    plant(
        "detector/digest-permutation",
        changed_on_rank_one(swapped),
        changed_on_rank_one(there_and_back(swapped)),
        **DIGEST,
    ),
    plant(
        "detector/digest-one-bit",
        changed_on_rank_one(one_bit),
        changed_on_rank_one(there_and_back(one_bit)),
        **DIGEST,
    ),
    plant(
        "detector/digest-signed-zero",
        changed_on_rank_one(negative_last_zero, zeros),
        changed_on_rank_one(positive_zero, zeros),
        **DIGEST,
    ),
    plant(
        "detector/digest-nan-payload",
        changed_on_rank_one(other_payload, quiet_nans),
        changed_on_rank_one(there_and_back(other_payload), quiet_nans),
        **DIGEST,
    ),
)
CASES = cases_of(CONTROLS)
