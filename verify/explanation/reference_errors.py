"""Explains a result that leaves its reference: where the wrong elements are, how large, and why.

Elements inside the budget are replaced by the reference's own, so that only wrong ones differ and
the rules of `explanation` apply as they are. What rounding hides from them (a constant factor, rows
in another order) is measured here against the budget. It refuses to decide: nothing here changes a
verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verify.budgets import Judged, spacing
from verify.comparison import compare
from verify.explanation import suggest

NAMES = ("reference", "output")
_SHOWN = 6  # ranges of indices, and groups of rows
_MATCHED = 256  # wrong rows that are looked for elsewhere
_ELEMENTS = 1 << 20  # of a reference in which they are looked for
_MANY_ROWS = 1 << 16  # beyond which they are not grouped
_BLOCK = 1 << 20  # elements of a mask whose indices are listed at once
_FEW = 8  # elements, to speak of shares
_COARSE = 0.1  # a tolerance of that share of the values proves no factor


def explain_errors(
    name: str, actual: Tensor, judged: Judged, known: Sequence[str] = ()
) -> dict[str, Any]:
    """`lines` and `suggests` for the wrong elements of a judged result; `actual` is the result.

    known: what is suggested already, of other evidence; it comes first.
    """
    lines = [*places(judged.wrong), *_sizes(judged)]
    if actual.dtype == torch.bool or not bool(judged.wrong.any()):
        return {"lines": lines, "suggests": list(known)}
    ratio = _factor(judged)
    rules: Sequence[Callable[[Judged, torch.dtype], str | None]] = (
        _not_cleared,
        _outside,
        _wrong_axis,
        *(() if ratio is not None else (_row_factors,)),
    )
    own = list(known)
    own += [text for rule in rules if (text := rule(judged, actual.dtype))]
    base = judged.expected.to(actual.dtype)
    merged = torch.where(judged.wrong, actual.detach(), base)
    merged = _matched_rows(judged, base, merged)
    context = {"condition": "reference", "names": NAMES, "ratio": ratio}
    context["explained"] = bool(own)
    general = suggest(compare(base, merged, name), base, merged, context)
    return {"lines": lines, "suggests": [*own, *general]}


def places(wrong: Tensor) -> list[str]:
    """Where a mask is set: the indices of every dimension in which it does not fill the whole."""
    if wrong.dim() == 0 or not bool(wrong.any()):
        return []
    said = []
    for dim, size in enumerate(wrong.shape):
        others = [d for d in range(wrong.dim()) if d != dim]
        hit = wrong.any(dim=others) if others else wrong
        count = int(hit.sum())
        what = _dimension(dim, wrong.dim())
        if count < size or wrong.dim() == 1:
            what = what.removesuffix("s") if count == 1 else what
            said.append(f"{what} {ranges(hit)} ({count} of {size})")
    return [f"wrong in {', '.join(said)}" if said else "wrong in every row and column"]


def _dimension(dim: int, dims: int) -> str:
    if dims == 1:
        return "elements"
    if dims == 2:
        return ("rows", "columns")[dim]
    return f"dim {dim} at"


def ranges(mask: Tensor) -> str:
    """The indices at which a 1-D mask is set: `0..169`, `1, 3, 7..9`; few of them.

    Only those that are shown become numbers, so that a mask of any size can be asked.
    """
    mask = mask.cpu()
    edge = torch.zeros(1, dtype=torch.bool)
    before, after = torch.cat([edge, mask[:-1]]), torch.cat([mask[1:], edge])
    starts, ends = mask & ~before, mask & ~after
    runs = zip(_first(starts), _first(ends), strict=True)
    shown = [f"{start}..{end}" if end > start else str(start) for start, end in runs]
    more = int(starts.sum()) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _first(mask: Tensor) -> list[int]:
    """The first indices at which a 1-D mask is set, as many as are shown."""
    found: list[int] = []
    for start in range(0, len(mask), _BLOCK):
        block = mask[start : start + _BLOCK].nonzero().flatten()[: _SHOWN - len(found)]
        found += (block + start).tolist()
        if len(found) == _SHOWN:
            break
    return found


def _varied(values: Tensor) -> bool:
    """Whether there are four distinct values; in four looks at most, and without sorting."""
    for _ in range(3):
        if len(values):
            values = values[values != values[0]]
    return len(values) > 0


def _sizes(judged: Judged) -> list[str]:
    """The relative error of wrong rows beside what one number for the whole tensor would say."""
    if judged.wrong.dim() < 2 or not bool(torch.isfinite(judged.exact).all()):
        return []
    rows = len(judged.wrong)
    wrong = judged.wrong.reshape(rows, -1).any(dim=1)
    finite = torch.isfinite(judged.actual).reshape(rows, -1).all(dim=1)
    if bool(wrong.all()) or not bool((wrong & finite).any()):
        return []
    actual, exact = judged.actual.reshape(rows, -1), judged.exact.reshape(rows, -1)
    error = (actual - exact).norm(dim=1) / exact.norm(dim=1)
    bad, good = error[wrong & finite], error[~wrong].nan_to_num(0.0)
    said = (
        f"relative error of the wrong rows {float(bad.min()):.3g} to {float(bad.max()):.3g},"
        f" of all others at most {float(good.max()):.2g}"
    )
    if bool(finite.all()) and bool(exact.any()):
        whole = float((actual - exact).norm() / exact.norm())
        alike = 1 - 2 * float((actual * exact).sum() / (actual.square() + exact.square()).sum())
        said += (
            f"; one number for the whole tensor would be {whole:.3g} (relative L2)"
            f" or {alike:.3g} (1 - 2xy / (xx + yy))"
        )
    return [said]


def _factor(judged: Judged) -> float | None:
    """The one factor by which every wrong element is off, as far as the budget can tell."""
    at = judged.wrong
    if int(at.sum()) < 4 or not _varied(judged.exact[at].abs()):
        return None
    found = _fitted(judged.actual[at][None], judged.exact[at][None], judged.budget[at][None])
    return float(found) if bool(torch.isfinite(found)) else None


def _fitted(actual: Tensor, exact: Tensor, budget: Tensor) -> Tensor:
    """By row, the factor r with |actual - r exact| <= what r times the budget permits, or NaN."""
    weight = 1 / (budget.square() + torch.finfo(torch.float64).tiny)
    weight = weight / weight.amax(dim=1, keepdim=True)
    factor = (actual * exact * weight).sum(1) / (exact.square() * weight).sum(1)
    permitted = 2 * factor.abs()[:, None] * budget + spacing(actual.abs(), torch.float32)
    near = ((actual - factor[:, None] * exact).abs() <= permitted).all(dim=1)
    sharp = (permitted.sum(1) < _COARSE * actual.abs().sum(1)) & (factor != 0)
    return torch.where(near & sharp, factor, torch.nan)


def _row_factors(judged: Judged, dtype: torch.dtype) -> str | None:
    """Every wrong row is the reference's times a factor of its own."""
    if judged.wrong.dim() < 2 or judged.wrong.shape[-1] < 2:
        return None
    plane = [t.reshape(-1, t.shape[-1]) for t in (judged.actual, judged.exact, judged.budget)]
    rows = judged.wrong.reshape(plane[0].shape).any(dim=1).nonzero().flatten()
    factors = _fitted(*(t[rows] for t in plane))
    if not 2 <= len(rows) <= _MANY_ROWS or not bool(torch.isfinite(factors).all()):
        return None
    groups: dict[str, list[int]] = {}
    for row, factor in zip(rows.tolist(), factors.tolist(), strict=True):
        groups.setdefault(f"{factor:.3g}", []).append(row)
    said = f"each of the {len(rows)} wrong rows is the reference's times a factor of its own"
    if len(groups) <= 4:
        count = len(plane[0])
        masks = {factor: torch.zeros(count, dtype=torch.bool) for factor in groups}
        for factor, one in groups.items():
            masks[factor][one] = True
        shown = "; ".join(f"rows {ranges(mask)}: {factor}" for factor, mask in masks.items())
        return f"{said} ({shown}): a scale or a normalisation by group of rows"
    said += f", {float(factors.min()):.3g} to {float(factors.max()):.3g}"
    if len(rows) == len(plane[0]) and abs(float(factors.sum()) - 1) < 1e-3:
        return f"{said}, and they add up to 1 over the rows: normalised over the wrong axis"
    return f"{said}: a scale or a normalisation of the rows"


def _wrong_axis(judged: Judged, dtype: torch.dtype) -> str | None:
    """Sums of 1 that lie along the rows in the reference and along the columns in the output."""
    if judged.wrong.dim() != 2 or len(judged.wrong) < 2:
        return None

    def ones(values: Tensor, dim: int) -> bool:
        return bool(((values.sum(dim) - 1).abs() < 1e-2).all())

    if not ones(judged.exact, 1) or ones(judged.actual, 1) or not ones(judged.actual, 0):
        return None
    return (
        "every row of the reference adds up to 1, in the output every column does instead:"
        " normalised over the wrong axis"
    )


def _outside(judged: Judged, dtype: torch.dtype) -> str | None:
    """Numbers outside [0, 1] where the reference has shares, in most places of the wrong rows."""
    exact, actual = judged.exact, judged.actual
    if not dtype.is_floating_point or exact.dim() == 0 or exact.numel() < _FEW:
        return None
    if not bool(((exact >= 0) & (exact <= 1)).all()) or not _varied(exact.flatten()):
        return None
    rows = judged.wrong.any(dim=-1, keepdim=True) & torch.isfinite(actual)
    outside = rows & ((actual < 0) | (actual > 1.01))
    if int(outside.sum()) < max(_FEW, float(rows.sum()) / 2):
        return None
    low, high = float(actual[rows].min()), float(actual[rows].max())
    return (
        f"the reference lies in [0, 1], the output in [{low:.3g}, {high:.3g}]: raw scores where"
        " shares are expected, a softmax or sigmoid left out"
    )


def _not_cleared(judged: Judged, dtype: torch.dtype) -> str | None:
    """Something where the reference is exactly zero."""
    at = judged.wrong
    if int(at.sum()) < 2 or not bool(((judged.exact[at] == 0) & (judged.actual[at] != 0)).all()):
        return None
    return (
        f"the reference is exactly 0 in all {int(at.sum())} places, the output is not: memory that"
        " is neither written nor cleared there, or a term that does not belong there"
    )


def _matched_rows(judged: Judged, base: Tensor, merged: Tensor) -> Tensor:
    """Wrong rows that are, inside the budget, another row of the reference, as that row's bits.

    All of them or none: a rule on the order of rows needs every wrong row to be one.
    """
    columns = judged.wrong.shape[-1] if judged.wrong.dim() > 1 else 0
    if columns < 2 or judged.wrong.numel() > _ELEMENTS:
        return merged
    plane = [t.reshape(-1, columns) for t in (judged.actual, judged.exact, judged.budget)]
    rows = judged.wrong.reshape(plane[0].shape).any(dim=1).nonzero().flatten()
    if len(rows) > _MATCHED:
        return merged
    found = merged.reshape(-1, columns).clone()
    for row in rows.tolist():
        mine, theirs, budget = plane[0][row], plane[1], plane[2]
        near = ((mine[0] - theirs[:, 0]).abs() <= budget[:, 0]).nonzero().flatten()
        fits = near[((mine - theirs[near]).abs() <= budget[near]).all(dim=1)]
        if not len(fits) or not bool(theirs[fits[0]].any()):
            return merged
        found[row] = base.reshape(-1, columns)[fits[0]]
    return found.reshape(merged.shape)
