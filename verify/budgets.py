"""The `reference` claim: an error budget against float64, and rounding at the right places.

Two parts, both needed, since each is blind to what the other sees. (1) |result - exact| stays
inside a budget made of the arithmetic itself: rounding of terms, accumulation, output cast; per
element, reported for the worst row, never pooled. (2) Against a float64 computation that rounds
where the contract rounds, an element may differ only where the unrounded value lies so near a
rounding border that the low-precision accumulation may fall on the other side. An early or missing
rounding passes (1) and fails (2). There is no default tolerance, and no reference in less than
float64: it would be widened silently and judge with errors of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify.errors import CaseError

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
WORST_ROWS = 3


@dataclass(frozen=True)
class Reference:
    """What an output should be, with the size of every permitted deviation.

    All tensors are float64 and have the output's shape.
    exact: the value without any rounding.
    budget: >= 0, the largest |result - exact| that the arithmetic explains.
    unrounded: the value just before the output cast when everything before is rounded where the
        contract says; for a function without inner roundings this is `exact`.
    margin: >= 0, how far the real arithmetic may be from `unrounded`.
    plain: optional, the result of a plain low-precision run, for comparison of errors.
    """

    exact: Tensor
    budget: Tensor
    unrounded: Tensor
    margin: Tensor
    plain: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """A result beside its reference, element by element; all tensors have the output's shape.

    actual, exact, budget, expected: float64; `expected` is the unrounded reference, rounded once to
    the output's dtype. ratio: error / budget, infinite where nothing is permitted. nonfinite, over,
    forbidden: masks of the elements that are wrong.
    """

    actual: Tensor
    exact: Tensor
    budget: Tensor
    expected: Tensor
    ratio: Tensor
    nonfinite: Tensor
    over: Tensor
    forbidden: Tensor

    @property
    def wrong(self) -> Tensor:
        return self.nonfinite | self.over | self.forbidden


def reduction(
    exact: Tensor,
    sum_of_magnitudes: Tensor,
    length: int,
    dtype: torch.dtype,
    *,
    accumulation: torch.dtype = torch.float32,
    plain: Tensor | None = None,
) -> Reference:
    """The reference of a sum of `length` exact terms, accumulated in any order and cast to `dtype`.

    Accumulation bound gamma_n = n u / (1 - n u) times the sum of |terms| (Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd ed., section 4.2), plus half an ulp of the output.
    Raises CaseError unless both tensors are float64.
    """
    _float64("reduction", exact=exact, sum_of_magnitudes=sum_of_magnitudes)
    unit = UNIT[accumulation]
    margin = length * unit / (1 - length * unit) * sum_of_magnitudes
    half_ulp = 0.5 * spacing(exact.abs() + margin, dtype)
    return Reference(exact, margin + half_ulp, exact, margin, plain)


def check(name: str, actual: Tensor, reference: Reference) -> dict[str, Any]:
    """Measures `actual` against both parts. Raises CaseError when the reference does not fit it.

    Returns numbers only: worst ratio of error to budget with its index, the worst rows (entries of
    dimension 0), counts of elements outside the budget, of elements that differ from the rounding
    reference and of those that may not, non-finite elements, relative L2 errors.
    """
    return measure(judge(name, actual, reference), reference.plain)


def judge(name: str, actual: Tensor, reference: Reference) -> Judged:
    """Which elements are wrong, and by how much. Raises CaseError when the reference does not fit:
    other shapes, tensors that are not float64, a budget that is none or permits everything."""
    if actual.is_complex():
        raise CaseError(f"reference of {name!r}: return real and imaginary parts by themselves")
    parts = {part: getattr(reference, part) for part in ("exact", "budget", "unrounded", "margin")}
    for part, value in parts.items():
        if tuple(value.shape) != tuple(actual.shape):
            raise CaseError(
                f"reference of {name!r}: {part} has shape {list(value.shape)}, the output has"
                f" {list(actual.shape)}"
            )
    _float64(f"reference of {name!r}", **parts)
    for part in ("budget", "margin"):
        if not bool((parts[part] >= 0).all()):
            raise CaseError(f"reference of {name!r}: {part} must be a number >= 0 everywhere")
        if bool(torch.isinf(parts[part]).any()):
            raise CaseError(f"reference of {name!r}: an infinite {part} permits everything")
    exact, budget, unrounded, margin = parts.values()
    wide = actual.detach().double()
    bad = ~torch.isfinite(wide) & torch.isfinite(exact)
    error = (wide - exact).abs()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    ratio = torch.where(same, torch.zeros_like(error), error / budget)
    # a reference of NaN or infinity permits nothing but itself
    ratio = torch.where(bad | ratio.isnan(), torch.full_like(ratio, math.inf), ratio)
    low = round_to(unrounded - margin, actual.dtype)
    high = round_to(unrounded + margin, actual.dtype)
    middle = round_to(unrounded, actual.dtype)
    inside = (wide >= low) & (wide <= high) | (wide.isnan() & middle.isnan())
    return Judged(wide, exact, budget, middle, ratio, bad, ratio > 1, ~inside & ~bad)


def measure(judged: Judged, plain: Tensor | None = None) -> dict[str, Any]:
    """The numbers of a judged result, as `check` returns them."""
    ratio, wide, exact, bad = judged.ratio, judged.actual, judged.exact, judged.nonfinite
    if ratio.numel() == 0:
        by_row = ratio.new_zeros(0)
    else:
        by_row = ratio.reshape(ratio.shape[0] if ratio.dim() else 1, -1).amax(dim=1)
    top = torch.topk(by_row, min(WORST_ROWS, len(by_row)))
    measured: dict[str, Any] = {
        "numel": ratio.numel(),
        "nonfinite": int(bad.sum()),
        "over_budget": int(judged.over.sum()),
        "worst_ratio": _finite(float(ratio.max()) if ratio.numel() else 0.0),
        "worst_rows": [
            {"row": int(i), "ratio": _finite(float(v))}
            for v, i in zip(top.values, top.indices, strict=True)
        ],
        "permissive": int(((judged.budget >= exact.abs()) & (exact != 0)).sum()),
        "rounded_elsewhere": int(((wide != judged.expected) & ~bad).sum()),
        "forbidden": int(judged.forbidden.sum()),
        "relative_l2": _relative(wide, exact),
    }
    if plain is not None:
        measured["plain_relative_l2"] = _relative(plain.double(), exact)
    for key, mask, against in (
        ("first_nonfinite", bad, exact),
        ("first_over_budget", judged.over, exact),
        ("first_forbidden", judged.forbidden, judged.expected),
    ):
        where = mask.nonzero()
        if len(where):
            index = tuple(int(i) for i in where[0])
            measured[key] = {
                "index": list(index),
                "actual": _text(wide[index]),
                "reference": _text(against[index]),
            }
    return measured


def _float64(whose: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float64:
            raise CaseError(
                f"{whose}: {name} is {str(tensor.dtype).removeprefix('torch.')}, it must be"
                " float64; widen the inputs before computing, inputs['x'].double(), not the result"
            )


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 `value` rounded once, half to even, to `dtype`, as float64.

    torch's own cast from float64 to a 16-bit type may round twice.
    """
    if dtype == torch.float64 or not dtype.is_floating_point:
        return value
    if dtype == torch.float32:
        return value.float().double()
    quantum = spacing(value.abs(), dtype)
    rounded = torch.round(value / quantum) * quantum
    limit = torch.finfo(dtype).max
    too_large = rounded.abs() > limit
    return torch.where(too_large, torch.sign(rounded) * math.inf, rounded)


def spacing(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` at a magnitude (float64), subnormals included."""
    if not dtype.is_floating_point:
        return torch.zeros_like(magnitude)
    info = torch.finfo(dtype)
    least = int(math.log2(info.smallest_normal))
    _, exponent = torch.frexp(magnitude)
    exponent = torch.where(magnitude == 0, least, exponent - 1).clamp(min=least)
    digits = round(-math.log2(info.eps))
    return torch.ldexp(torch.ones_like(magnitude), exponent - digits)


def _relative(value: Tensor, exact: Tensor) -> float | str:
    norm = float(exact.norm())
    return _finite(float((value - exact).norm()) / norm) if norm else 0.0


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _text(value: Tensor) -> float | str:
    return _finite(float(value))
