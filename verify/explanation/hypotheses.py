"""Tries what may have happened to the inputs: exchanged, in another layout, a mask ignored.

A case's own reference is called with inputs changed in one way after the other. If the output that
does not fit the reference fits one of these, the change names the fault better than any pattern of
wrong values. Few changes, bounded in number and in time, and none that the output could fit by
chance rather than the reference: a fit is inside the same budget. It never changes a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import comb, isfinite

import torch
from torch import Tensor

from verify.budgets import spacing
from verify.captures import same_bits
from verify.explanation.changed_inputs import Inputs, hypotheses
from verify.explanation.reference_errors import ranges
from verify.hashing import integer_view

LIMIT = 48  # changes that are tried
SECONDS = 5.0  # for all of them
_CHANCE = 0.01  # that the wrong rows are among the special ones
_MANY = 16  # elements, to speak of distinct values
_STEPS = 64  # of a dtype, between the smallest and the largest of values that it tells apart
_RARE = 0.1  # the same for NaN, which are suspect by themselves
_BLOCK = 1 << 22  # elements that are widened to int64 at once


def fitting(
    tensors: Inputs,
    fits: Callable[[Inputs], Mapping[str, str]],
    *,
    limit: int = LIMIT,
    seconds: float = SECONDS,
) -> dict[str, list[str]]:
    """By output, the changes of `tensors` under which it fits, at most three.

    fits: called with changed inputs, which it must not write to (some are those of `tensors`);
    returns how well an output fits, for those that do. It may raise for inputs that make no sense.
    Changes that change no bit are not tried. Stops when the time that is left is less than the last
    change took, making it included.
    """
    found: dict[str, list[str]] = {}
    end, took, tried = time.monotonic() + seconds, 0.0, 0
    for hypothesis in hypotheses(tensors):
        started = time.monotonic()
        if tried >= limit or started + took >= end:
            break
        try:
            changed = hypothesis.change()
            if all(same_bits(changed[name], tensors[name]) for name in changed):
                continue
            tried += 1
            fitted = fits({n: t.detach() for n, t in {**tensors, **changed}.items()})
        except Exception:
            fitted = {}
        took = time.monotonic() - started
        for name, how in fitted.items():
            if len(found.setdefault(name, [])) < 3:
                found[name].append(f"{hypothesis.text}{hypothesis.detail()} ({how})")
    return found


def common_rows(wrong: Tensor, tensors: Inputs) -> list[str]:
    """What the rows of inputs have in common whose outputs are wrong: NaN, or negative ids.

    wrong: mask of the output; rows are entries of dimension 0. Silent when it may well be chance.
    """
    if wrong.dim() == 0 or not bool(wrong.any()):
        return []
    rows = wrong.reshape(len(wrong), -1).any(dim=1)
    said = []
    for name, value in tensors.items():
        if value.dim() == 0 or len(value) != len(rows) or value.is_complex():
            continue
        flat = value.detach().reshape(len(rows), -1)
        if value.is_floating_point():
            wide = flat if flat.element_size() > 1 else flat.float()
            special, what = ~torch.isfinite(wide).all(dim=1), "NaN or infinity"
            limit = _RARE
        elif value.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            special, what, limit = (flat < 0).any(dim=1), "a negative number", _CHANCE
        else:
            continue
        many, few = len(rows), int(rows.sum())
        equal = bool((rows == special).all())
        chance = 1 / comb(many, few) if equal else float(special.double().mean()) ** few
        if bool((rows & ~special).any()) or chance > limit:
            continue
        shown = ranges(rows)
        said.append(
            f"every wrong row ({shown}) is one in which the input {name} holds {what}: look at"
            " what is done with it"
        )
    return said


def too_coarse(tensors: Inputs) -> list[str]:
    """Inputs of large values with a small spread, that their dtype can hardly tell apart."""
    said = []
    for name, value in tensors.items():
        if value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            continue
        if value.numel() < _MANY:
            continue
        low, high = (float(one) for one in value.detach().aminmax())
        largest = max(abs(low), abs(high))
        if not isfinite(low) or not isfinite(high):
            continue
        step = float(spacing(torch.tensor(largest, dtype=torch.float64), value.dtype))
        if not 0 < high - low < min(_STEPS * step, largest / 2):
            continue
        distinct = _distinct(value.detach(), low, high)
        if 2 * distinct < value.numel():
            dtype = str(value.dtype).removeprefix("torch.")
            said.append(
                f"{name} holds {distinct} distinct values in {value.numel()} elements, a spread of"
                f" {(high - low) / step:.3g} steps of {dtype}: too coarse to tell them apart"
            )
    return said


def _distinct(value: Tensor, low: float, high: float) -> int:
    """Values of one sign and of a small spread, counted by their bits, which are close integers."""
    ends = torch.tensor([low, high], dtype=value.dtype)
    first, last = (int(bits) for bits in integer_view(ends).sort().values)
    flat, device = integer_view(value).reshape(-1), value.device
    counts = torch.zeros(last - first + 1, dtype=torch.int64, device=device)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK].long() - first
        counts += torch.bincount(block, minlength=len(counts))
    return int((counts > 0).sum())


def repeated(expected: Tensor, actual: Tensor) -> str | None:
    """Rows of indices that hold one twice where the expected ones are distinct."""
    if actual.dim() != 2 or actual.shape != expected.shape or actual.dtype.is_floating_point:
        return None
    if actual.dtype == torch.bool or actual.dtype.is_complex or actual.shape[1] < 2:
        return None

    def twice(values: Tensor) -> Tensor:
        ordered = values.long().sort(dim=1).values
        return (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)

    if bool(twice(expected).any()) or not bool(twice(actual).any()):
        return None
    rows = twice(actual)
    row = int(rows.view(torch.uint8).argmax())
    first: Sequence[int] = actual[row].tolist()
    return (
        f"rows {ranges(rows)} hold the same index twice (row {row}:"
        f" {', '.join(map(str, first[:8]))}), expected are distinct ones: no valid selection"
    )
