"""Reports of choices that are not unique: experts with equal scores, and columns that go wrong.

How to say it as a case: return the chosen ids sorted within a token (a set has no order) and the
scores that they were chosen by. Equal scores with other ids are a tie; other scores are a wrong
choice. A total order, by score and then by lowest id, leaves nothing open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import verify

EXPERTS, K = 8, 3
SCORES = {"scores": verify.integers(64, EXPERTS, low=0, high=4, dtype=torch.float32)}
DISTINCT = {"scores": verify.normal(64, EXPERTS), "y": verify.normal(64, EXPERTS, 4)}


def top(scores: Tensor, candidates: Tensor) -> Tensor:
    """The k best of the candidates; of equal scores the candidate that is looked at first."""
    order = torch.sort(scores[:, candidates], dim=1, descending=True, stable=True).indices
    return candidates[order[:, :K]]


def scan(backwards: bool) -> Tensor:
    return torch.arange(EXPERTS).flip(0) if backwards else torch.arange(EXPERTS)


def shown(scores: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """The set that was chosen, and the scores that it was chosen by, best first."""
    chosen = torch.gather(scores, 1, ids)
    return {"ids": ids.sort(1).values, "chosen": chosen.sort(1, descending=True).values}


SCANNED: Mapping[str, Any] = {
    "inputs": SCORES,
    "claims": ("repeat", "vary"),
    "vary": {"backwards": [True]},
}


@verify.case(**SCANNED)
def bug_06_border(scores: Tensor, backwards: bool = False) -> dict[str, Tensor]:
    """The winner of a tie at the border of k is the expert that the kernel looks at first."""
    return shown(scores, top(scores, scan(backwards)))


@verify.case(**SCANNED)
def bug_06_border_twin(scores: Tensor, backwards: bool = False) -> dict[str, Tensor]:
    """The same scan, but among equal scores the lowest id wins."""
    candidates = scan(backwards)
    return shown(scores, top(scores, candidates[candidates.argsort()]))


def any_order(ids: Tensor) -> Tensor:
    """The chosen experts of each token in an order that nobody can restore."""
    keys = torch.frombuffer(bytearray(os.urandom(8 * ids.numel())), dtype=torch.int64)
    return torch.gather(ids, 1, keys.view(ids.shape).argsort(1))


def combined(y: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The chosen experts' outputs, added in the order of `ids`."""
    total = torch.zeros(64, 4, dtype=dtype)
    for one in ids.unbind(1):
        total = total + y[torch.arange(64), one].to(dtype)
    return total.float()


@verify.case(inputs=DISTINCT, claims=("repeat",))
def bug_06_order(scores: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same set in another order: the sum of its outputs moves."""
    ids = any_order(top(scores, scan(False)))
    return {**shown(scores, ids), "out": combined(y, ids, torch.float32)}


@verify.case(inputs=DISTINCT, claims=("repeat",))
def bug_06_order_twin(scores: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same set in another order, added in float64: exact enough to round the same."""
    ids = any_order(top(scores, scan(False)))
    return {**shown(scores, ids), "out": combined(y, ids, torch.float64)}


def best(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Tensor]:
    """The scores of the k best: the same for every way to break ties."""
    return {"chosen": inputs["scores"].sort(1, descending=True).values[:, :K]}


JUDGED: Mapping[str, Any] = {"inputs": SCORES, "claims": ("repeat", "exact"), "exact": best}


@verify.case(**JUDGED)
def bug_06_wrong(scores: Tensor) -> dict[str, Tensor]:
    """In row 7 an expert with a lower score is chosen."""
    ids = top(scores, scan(True))
    ids[7, 0] = scores[7].argmin()
    return shown(scores, ids)


@verify.case(**JUDGED)
def bug_06_wrong_twin(scores: Tensor) -> dict[str, Tensor]:
    """Ties are broken otherwise than in the reference: other ids, the same scores."""
    return shown(scores, top(scores, scan(True)))


LANES = 32


def scaled(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Tensor]:
    return {"out": inputs["x"] * 2}


SCALED: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(16, 256)},
    "claims": ("repeat", "exact"),
    "exact": scaled,
}


@verify.case(**SCALED)
def period(x: Tensor) -> Tensor:
    """The last column of every block of 32 takes the scale of the next block."""
    scale = torch.full((256,), 2.0)
    scale[LANES - 1 :: LANES] = 2.25
    return x * scale


@verify.case(**SCALED)
def period_twin(x: Tensor) -> Tensor:
    """Every column takes the scale of its own block."""
    return x * torch.full((256,), 2.0)
