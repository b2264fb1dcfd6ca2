"""Is a reference the float64 computation that it says it is? Asked before it may judge.

A global flag (TF32 and its kin), a helper that computes in its inputs' precision, or a stored
float32 result make a reference that is less exact than the kernel, and look like float64 once they
are widened. Three things tell of it, and each has an innocent cause as well: it moves with the
dtype of its inputs (so does an epsilon read from that dtype), its values have the bits of float32
(so has a table that is looked up), narrow arithmetic was seen to round (inside the budget of a
bfloat16 result it does no harm). Two of them together have none, and one is never enough. What no
check can see (a reference that is exactly computed, but of something else) stays the case's
business.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verify.budgets import Reference
from verify.explanation.narrow import plain, rounded, widened

__all__ = ["coarse", "moved", "precisions", "weakness", "widened"]

NEGLIGIBLE = 2.0**-10  # of its own budget: a reference may be wrong by that
_NOISE = 2.0**-44  # of the largest value: what two computations in float64 may differ by
_FLOAT32_BITS = 24
_LEAST = 8  # elements of one exponent, to tell anything
_SHARE = 0.25  # of them fill all 24 bits; half of them do when they were rounded


def weakness(
    given: Reference, again: Reference | None, inputs: Mapping[str, Tensor], dtype: torch.dtype
) -> str | None:
    """Why a reference is no float64 computation, or None: not without two pieces of evidence.

    given: the reference of `inputs`, everything that the case is given. again: the reference of
    the same values, `widened`; None when there is none, and then nothing can be said. dtype: of
    the output.
    """
    if again is None:
        return None
    seen = rounded(again.exact)
    shift = moved(given, again, dtype)
    bits = coarse(given, inputs) if shift is None or not seen else None
    if sum((seen, shift is not None, bits is not None)) < 2:
        return None
    return "; ".join(filter(None, (shift or bits, precisions())))


def precisions() -> str:
    """The global settings that lower the precision of float32 products, or ""."""
    found = []
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found.append(f"torch.get_float32_matmul_precision() is {precision!r}")
    return "; ".join(found)


def moved(given: Reference, again: Reference, dtype: torch.dtype) -> str | None:
    """Whether the reference is another one when its inputs are widened to float64 first.

    given, again: the reference of the inputs, and of the same values in float64. dtype: of the
    output; float64 outputs cannot be told apart this way.
    """
    if dtype == torch.float64 or given.exact.shape != again.exact.shape:
        return None
    slack = given.budget
    if torch.equal(given.exact, given.unrounded):  # it decides where to round, too
        slack = torch.where(given.margin > 0, torch.minimum(slack, given.margin), slack)
    other = plain(again.exact).detach()
    both = torch.isfinite(given.exact) & torch.isfinite(other)
    if not bool(both.any()):
        return None
    size = given.exact.abs()[both]
    distance, slack = (other - given.exact).abs()[both], slack[both]
    noise = _NOISE * float(size.max())
    far = (distance > NEGLIGIBLE * slack) & (distance > noise)
    if not bool(far.any()):
        return None
    relative = float(distance.norm() / size.norm())
    return (
        f"it moves by {relative:.2g} (relative L2; {int(far.sum())} of {given.exact.numel()}"
        " elements by more than 0.1 % of their own budget) when its inputs are widened to float64"
        " first, so it does not compute in float64"
    )


def coarse(reference: Reference, inputs: Mapping[str, Tensor]) -> str | None:
    """Whether all values look rounded to float32: no more than 24 significant bits, whatever their
    exponent, and many with exactly as many.

    Values that are exact by nature are not taken for rounded: integers and other multiples of one
    step have fewer bits the smaller they are, and copies of inputs have the significands of inputs.
    """
    known = torch.isfinite(reference.exact) & (reference.exact != 0) & (reference.budget > 0)
    values = reference.exact[known]
    if len(values) < 2 * _LEAST:
        return None
    units, exponents = _significands(values)
    bits = torch.log2(units.double()).floor().long() + 1
    if int(bits.max()) != _FLOAT32_BITS:
        return None
    filled = [bits[exponents == e] == _FLOAT32_BITS for e in exponents.unique()]
    enough = [float(one.double().mean()) >= _SHARE for one in filled if len(one) >= _LEAST]
    if sum(enough) < 2:
        return None
    floats = [t.detach().double().flatten() for t in inputs.values() if t.is_floating_point()]
    floats = [one.to(values.device) for one in floats]
    given = torch.cat(floats) if floats else values.new_zeros(0)
    given = given[torch.isfinite(given) & (given != 0)]
    if bool(torch.isin(units, _significands(given)[0]).all()):
        return None
    return (
        f"all {len(values)} values have at most 24 significant bits, and"
        f" {100 * float((bits == _FLOAT32_BITS).double().mean()):.3g} % have exactly 24: they were"
        " computed or stored in float32"
    )


def _significands(values: Tensor) -> tuple[Tensor, Tensor]:
    """Odd integers and binary exponents (of the leading bit) of nonzero finite float64 values."""
    fraction, exponents = torch.frexp(values.abs())
    whole = torch.ldexp(fraction, torch.tensor(53)).long()
    return whole // (whole & -whole), exponents
