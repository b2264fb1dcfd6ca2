"""Faults that differ from what is known to be right: exact integers, and both parts of `reference`.

They give the same bits every time, so that no repetition can find them. An error beyond the budget
and a rounding at the wrong place are planted apart: the latter stays well inside the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verify.budgets import Reference, reduction, round_to, spacing
from verify.controls.one_process import BITS, OTHERS, in_order
from verify.controls.planting import COLUMNS, ROWS, cases_of, fold, plant
from verify.inputs import integers

SMALL = {"x": integers(ROWS, COLUMNS, low=-8, high=9, dtype=torch.float32)}


def without_last_column(x: Tensor) -> Tensor:
    """Loses the last column of the last row."""
    total = fold(x)
    total[-1] -= x[-1, -1]
    return total


def exact_sum(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Tensor]:
    """What the sum of small integers must be, in whatever order."""
    return {"out": inputs["x"].long().sum(dim=1).float()}


def plain_sum(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Reference]:
    """A sum in float32, cast to bfloat16."""
    x = inputs["x"].double()
    return {"out": reduction(x.sum(1), x.abs().sum(1), COLUMNS, torch.bfloat16)}


def rounded_terms(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Reference]:
    """A contract with an inner rounding: squares rounded to bfloat16, then summed in float32."""
    terms = inputs["x"].double() ** 2 * torch.sign(inputs["x"].double())
    rounded = round_to(terms, torch.bfloat16)
    whole = reduction(terms.sum(1), terms.abs().sum(1), COLUMNS, torch.bfloat16)
    inner = (0.5 * spacing(terms, torch.bfloat16)).sum(1)
    return {"out": Reference(whole.exact, whole.budget + inner, rounded.sum(1), whole.margin)}


def _squares(x: Tensor) -> Tensor:
    return x.double() ** 2 * torch.sign(x.double())


def rounds_terms(x: Tensor) -> Tensor:
    """Rounds every term once, where the contract says."""
    return fold(round_to(_squares(x), torch.bfloat16).float()).bfloat16()


def truncates_terms(x: Tensor) -> Tensor:
    """Truncates every term where the contract rounds: inside any error budget."""
    bits = _squares(x).float().view(torch.int32)
    return fold((bits & ~0xFFFF).view(torch.float32)).bfloat16()


def rounds_early(x: Tensor) -> Tensor:
    """Rounds half of the sum to bfloat16 once more: inside any error budget."""
    terms = round_to(_squares(x), torch.bfloat16).float()
    half = COLUMNS // 2
    return (fold(terms[:, :half]).bfloat16().float() + fold(terms[:, half:])).bfloat16()


def to_bfloat16(x: Tensor) -> Tensor:
    """Sums and casts."""
    return fold(x).bfloat16()


def loses_a_term(x: Tensor) -> Tensor:
    """Leaves out one column."""
    return fold(x[:, 1:]).bfloat16()


def doubles_a_term(x: Tensor) -> Tensor:
    """Counts one column of one row twice."""
    total = fold(x)
    total[ROWS // 2] += x[ROWS // 2, 0]
    return total.bfloat16()


def overflows(x: Tensor) -> Tensor:
    """One element becomes infinite on its way."""
    total = to_bfloat16(x)
    total[3] = (total[3] * 1e38) * 1e38
    return total


def float32_sum(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Reference]:
    """A reference that adds in the precision of its inputs and is widened afterwards."""
    exact = inputs["x"].sum(1).double()
    magnitudes = inputs["x"].double().abs().sum(1)
    return {"out": reduction(exact, magnitudes, COLUMNS, torch.float32)}


def float64_sum(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, Reference]:
    """The same reference in float64."""
    x = inputs["x"].double()
    return {"out": reduction(x.sum(1), x.abs().sum(1), COLUMNS, torch.float32)}


CONTROLS = (
    plant(
        "condition/exact",
        without_last_column,
        in_order,
        claim="exact",
        also=OTHERS,
        inputs=SMALL,
        exact=exact_sum,
        **BITS,
    ),
    plant(
        "condition/reference",
        loses_a_term,
        to_bfloat16,
        claim="reference",
        reason="over-budget",
        also=OTHERS,
        reference=plain_sum,
    ),
    plant(
        "reason/over-budget",
        doubles_a_term,
        to_bfloat16,
        claim="reference",
        reason="over-budget",
        reference=plain_sum,
    ),
    plant(
        "reason/wrong-rounding",
        rounds_early,
        rounds_terms,
        claim="reference",
        reason="wrong-rounding",
        alone=True,
        reference=rounded_terms,
    ),
    plant(
        "detector/truncation",
        truncates_terms,
        rounds_terms,
        claim="reference",
        reason="wrong-rounding",
        alone=True,
        reference=rounded_terms,
    ),
    plant(
        "reason/non-finite",
        overflows,
        to_bfloat16,
        claim="reference",
        reason="non-finite",
        alone=True,
        reference=plain_sum,
    ),
    plant(
        "reason/weak-reference",
        in_order,
        in_order,
        claim="reference",
        reason="weak-reference",
        alone=True,
        fault={"reference": float32_sum},
        twin={"reference": float64_sum},
    ),
)
CASES = cases_of(CONTROLS)
