"""What two tensors of one parameter differ in, in memory that does not grow with the difference.

Equal bits are found at the speed of reading. Only then is it said where and how tensors differ,
block by block. It refuses to call tensors of other dtypes equal: it says whether a cast of A gives
B, and what that costs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verify.comparison import Comparison, compare, differing
from verify.explanation import suggest
from verify.hashing import dtype_name, integer_view

_BLOCK = 1 << 20  # elements that are compared at a time once a difference is known
_MEASURED = 1 << 16  # differing elements whose distances are taken
_EXPLAINED = 1 << 22  # a pattern in more elements is not looked for
_COUNTED = 1 << 20  # elements whose distinct values are counted


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits."""
    return torch.equal(integer_view(a), integer_view(b))


def difference(name: str, a: Tensor, b: Tensor) -> tuple[str, tuple[str, ...]]:
    """What differs between two tensors of one dtype and shape: a line, and further ones."""
    found = compare(a, b, name) if a.numel() <= _EXPLAINED else _by_blocks(name, a, b)
    lines = [line.removeprefix(f"{name}: ") for line in found.describe()]
    hints: list[str] = []
    if a.dim() == 2 and a.shape[0] == a.shape[1] and equal_bits(a.t(), b):
        hints = ["B is A transposed"]
    elif a.numel() <= _EXPLAINED:
        hints = [f"suggests: {hint}" for hint in suggest(found, a, b, None)]
    return lines[0], (*lines[1:], *hints)


def other_dtype(name: str, a: Tensor, b: Tensor) -> tuple[str, tuple[str, ...]]:
    """Whether A cast to B's dtype is B, and what the cast changes; tensors of one shape."""
    kinds = dtype_name(a.dtype), dtype_name(b.dtype)
    try:
        cast, back = a.to(b.dtype), b.to(a.dtype)
    except (RuntimeError, NotImplementedError) as error:  # packed dtypes have no values
        return f"no cast from {kinds[0]} to {kinds[1]}: {str(error).splitlines()[0]}", ()
    if not _same_values(cast, b):
        first, more = difference(name, cast, b)
        return f"not equal after a cast of A to {kinds[1]} either: {first}", more
    changed = int((integer_view(back) != integer_view(a)).count_nonzero())
    if not changed:
        return f"equal after a cast of A to {kinds[1]}, which loses nothing", ()
    share = f"{changed} of {a.numel()} values ({100 * changed / a.numel():.3g} %)"
    line = f"equal after a cast of A to {kinds[1]}, which changes {share}"
    counts = _distinct(a), _distinct(b)
    if counts[0] is None or counts[1] is None or counts[1] > counts[0] // 2:
        return line, ()
    return line, (f"{counts[0]} distinct values in A, {counts[1]} in B",)


def other_shape(a: Tensor, b: Tensor) -> str:
    """What a tensor of another shape is of A, or ""."""
    if a.dtype != b.dtype or a.numel() != b.numel() or a.numel() == 0:
        return ""
    if a.dim() == 2 and a.t().shape == b.shape and equal_bits(a.t(), b):
        return "B is A transposed"
    if equal_bits(a.reshape(-1), b.reshape(-1)):
        return "the same elements in the same order: reshaped"
    return ""


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or other bits only in NaNs: a cast need not keep their payload."""
    if equal_bits(a, b):
        return True
    if not a.is_floating_point():
        return False
    return set(_by_blocks("", a, b).classes) == {"nan_payload"}


def _by_blocks(name: str, a: Tensor, b: Tensor) -> Comparison:
    """As `compare`, for tensors of one dtype and shape of any size.

    Without a tile map; ULP distances and kinds of pairs only if at most _MEASURED elements differ,
    since they cost far more than counting.
    """
    left, right = a.detach().reshape(-1), b.detach().reshape(-1)
    count, first, kept = 0, -1, torch.empty(0, dtype=torch.int64)
    for at in range(0, left.numel(), _BLOCK):
        mask = differing(left[at : at + _BLOCK], right[at : at + _BLOCK])
        here = int(mask.count_nonzero())  # a sum of bools takes ten times as long
        if not here:
            continue
        if first < 0:
            first = at + int(mask.view(torch.uint8).argmax())
        count += here
        if count <= _MEASURED:
            kept = torch.cat((kept, at + mask.nonzero().reshape(-1)))
    if first < 0:
        return compare(left[:1], right[:1], name)
    all_kept = count <= _MEASURED
    some = kept if all_kept else torch.tensor([first])
    found = compare(left[some], right[some], name)
    index = torch.unravel_index(torch.tensor(first), a.shape)
    return replace(
        found,
        shapes=(tuple(a.shape), tuple(b.shape)),
        numel=a.numel(),
        num_differing=count,
        first=tuple(map(int, index)),
        max_ulp=found.max_ulp if all_kept else None,
        classes=found.classes if all_kept else {},
        value_equal=found.value_equal and all_kept,
        tiles=None,
    )


def _distinct(t: Tensor) -> int | None:
    """Distinct bit patterns; None for large tensors."""
    if t.numel() > _COUNTED:
        return None
    return int(torch.unique(integer_view(t)).numel())
