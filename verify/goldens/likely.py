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

_AS_NEAR = 2.0  # times the other's error (root mean square); orders of a sum differ by less
_AS_NEAR_AT_WORST = 8.0


def told(golden: Tensor, actual: Tensor, exact: Tensor | None, *, stable: bool) -> list[str]:
    """Lines about one output that differs.

    golden, actual: of one dtype and shape, or nothing is said. exact: float64, the case's
    reference for the same elements, None without one. stable: whether another execution of this
    run gave the same bits.
    """
    said = [_stability(stable)]
    if (golden.dtype, golden.shape) != (actual.dtype, actual.shape):
        return said
    broken = [_nonfinite(one) for one in (golden, actual)]
    if broken[0]:
        said.append(f"the golden itself holds {broken[0]} NaN or infinity, this run {broken[1]}")
    if broken[0] > broken[1]:
        return [
            *said,
            "likely: the golden was made by a broken run; make it again once this is right",
        ]
    if not actual.dtype.is_floating_point or not actual.numel():
        return said
    if exact is None:
        return [*said, "a reference=... would say which of the two is nearer to float64"]
    if exact.shape != actual.shape:
        return said
    wide = exact.double()
    errors = [(one.double() - wide).abs() for one in (golden, actual)]
    ulp = spacing(wide.abs(), actual.dtype)
    worst = [float((error / ulp).max()) for error in errors]
    said.append(
        f"worst error against float64: golden {worst[0]:.3g} ulp, this run {worst[1]:.3g} ulp"
    )
    return [*said, *([_likely(errors[0], errors[1])] if stable else [])]


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


def _nonfinite(tensor: Tensor) -> int:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    wide = tensor if tensor.is_complex() else tensor.double()
    return int((~torch.isfinite(wide)).sum())
