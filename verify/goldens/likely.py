"""What a difference from a golden likely is: stale, a regression, or a golden of a broken run.

Other bits alone do not say which of two results is right. Where the case has a float64 reference
the errors of both do, and a run that differs from itself is no matter of goldens. It decides
nothing: the verdict stands whatever is said here, and somebody has to look.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verify.budgets import spacing
from verify.captures import facts_of

_AS_NEAR = 2.0  # times the other's error (root mean square); orders of a sum differ by less
_AS_NEAR_AT_WORST = 8.0
_REGRESSION = (
    "likely: a regression: this run has other values where the reference is NaN or infinity"
)
_WRONG_GOLDEN = (
    "likely: a better result, or a wrong golden: it has other values where the reference is NaN or"
    " infinity"
)


def told(golden: Tensor, actual: Tensor, exact: Tensor | None, *, stable: bool) -> list[str]:
    """Lines about one output that differs.

    golden, actual: of one dtype and shape, or nothing is said. exact: float64, the case's
    reference for the same elements, None without one. stable: whether another execution of this
    run gave the same bits.
    """
    said = [_stability(stable)]
    if (golden.dtype, golden.shape) != (actual.dtype, actual.shape):
        return said
    wide = exact.double() if exact is not None and exact.shape == actual.shape else None
    known = torch.ones(actual.shape, dtype=torch.bool) if wide is None else torch.isfinite(wide)
    broken = [facts_of(one[known.to(one.device)]).nonfinite for one in (golden, actual)]
    if broken[0]:
        where = "" if bool(known.all()) else " where the reference is finite"
        said.append(
            f"the golden itself holds {broken[0]} NaN or infinity{where}, this run {broken[1]}"
        )
    if broken[0] > broken[1]:
        return [
            *said,
            "likely: the golden was made by a broken run; make it again once this is right",
        ]
    if not actual.dtype.is_floating_point or not actual.numel():
        return said
    if exact is None:
        return [*said, "a reference=... would say which of the two is nearer to float64"]
    if wide is None:
        return said
    sides = [one.double() for one in (golden, actual)]
    lost = [int((~known & ~_same(one, wide)).sum()) for one in sides]
    if any(lost):
        said.append(
            f"of {int((~known).sum())} elements whose reference is NaN or infinity the golden has"
            f" {lost[0]} otherwise, this run {lost[1]}"
        )
    if stable and lost[0] != lost[1]:
        return [*said, _REGRESSION if lost[1] > lost[0] else _WRONG_GOLDEN]
    if not bool(known.any()):
        return said
    wide = wide[known]
    errors = [(one[known] - wide).abs() for one in sides]
    ulp = spacing(wide.abs(), actual.dtype)
    worst = [float((error / ulp).max()) for error in errors]
    said.append(
        f"worst error against float64: golden {worst[0]:.3g} ulp, this run {worst[1]:.3g} ulp"
    )
    return [*said, *([_likely(errors[0], errors[1])] if stable else [])]


def _same(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _stability(stable: bool) -> str:
    if stable:
        return "this run is stable: a second execution gave the same bits"
    return "this run is not stable: its executions differ, see the claim repeat before the golden"


def _likely(golden: Tensor, actual: Tensor) -> str:
    """From the errors of both, element by element."""
    sizes = [float(error.square().mean().sqrt()) for error in (golden, actual)]
    peaks = [float(error.max()) for error in (golden, actual)]
    if not math.isfinite(sizes[1]):
        return "likely: a regression: this run is not finite where the reference is"
    far = max(_ratio(sizes[1], sizes[0]) / _AS_NEAR, _ratio(peaks[1], peaks[0]) / _AS_NEAR_AT_WORST)
    near = max(
        _ratio(sizes[0], sizes[1]) / _AS_NEAR, _ratio(peaks[0], peaks[1]) / _AS_NEAR_AT_WORST
    )
    if far > 1:
        return (
            f"likely: a regression: this run is {_ratio(sizes[1], sizes[0]):.3g}x as far from"
            " float64 as the golden"
        )
    if near > 1:
        return (
            f"likely: a better result, or a wrong golden: the golden is"
            f" {_ratio(sizes[0], sizes[1]):.3g}x as far from float64 as this run"
        )
    return (
        "likely: a stale golden, not a regression: both are as near to float64, so terms are added"
        " in another order or rounded at another place; decide by hand"
    )


def _ratio(one: float, other: float) -> float:
    if other > 0:
        return one / other
    return math.inf if one > 0 else 1.0
