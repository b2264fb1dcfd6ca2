"""Tries what may have happened to the inputs: exchanged, in another layout, a mask ignored.

A case's own reference is called with inputs changed in one way after the other. If the output that
does not fit the reference fits one of these, the change names the fault better than any pattern of
wrong values. Few changes, bounded in number and in time, and none that the output could fit by
chance rather than the reference: a fit is inside the same budget. It never changes a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import torch
from torch import Tensor

from verify.budgets import spacing
from verify.captures import same_bits
from verify.explanation.reference_errors import ranges

LIMIT = 48  # changes that are tried
SECONDS = 5.0  # for all of them
_PAIRS = 12
_NARROW = 8  # columns of an input that may stand for slots of a token
_CHANCE = 0.01  # that the wrong rows are among the special ones
_MANY = 16  # elements, to speak of distinct values
_STEPS = 64  # of a dtype, between the smallest and the largest of values that it tells apart
_RARE = 0.1  # the same for NaN, which are suspect by themselves
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """What may have happened, as it is said after "the reference with", and the inputs then."""

    text: str
    inputs: Inputs


def fitting(
    tensors: Inputs,
    fits: Callable[[Inputs], Mapping[str, str]],
    *,
    limit: int = LIMIT,
    seconds: float = SECONDS,
) -> dict[str, list[str]]:
    """By output, the changes of `tensors` under which it fits, at most three.

    fits: called with changed inputs, returns how well an output fits, for those that do. It may
    raise for inputs that make no sense. Stops when the time that is left is less than the last call
    took.
    """
    found: dict[str, list[str]] = {}
    end, took = time.monotonic() + seconds, 0.0
    for hypothesis in islice(hypotheses(tensors), limit):
        started = time.monotonic()
        if started + took > end:
            break
        try:
            fitted = fits({n: t.detach().clone() for n, t in hypothesis.inputs.items()})
        except Exception:
            fitted = {}
        took = time.monotonic() - started
        for name, how in fitted.items():
            if len(found.setdefault(name, [])) < 3:
                found[name].append(f"{hypothesis.text} ({how})")
    return found


def hypotheses(tensors: Inputs) -> Iterator[Hypothesis]:
    """The changes, the likeliest first. Those that change no bit are left out."""
    for text, changed in _changes(tensors):
        if any(not same_bits(changed[name], tensors[name]) for name in changed):
            yield Hypothesis(text, {**tensors, **changed})


def _changes(tensors: Inputs) -> Iterator[tuple[str, Inputs]]:
    numbers = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    pairs = (
        (a, b)
        for a, b in combinations(numbers, 2)
        if numbers[a].shape == numbers[b].shape and numbers[a].dtype == numbers[b].dtype
    )
    for a, b in islice(pairs, _PAIRS):
        yield f"{a} and {b} exchanged", {a: tensors[b], b: tensors[a]}
    for name, value in numbers.items():
        if not value.is_contiguous() and (stored := _storage_order(value)) is not None:
            yield f"{name} read in storage order, its strides ignored", {name: stored}
    for name, value in tensors.items():
        if name not in numbers:
            yield from ((text, {name: new}) for text, new in _indices(name, value, tensors))
    for name, value in numbers.items():
        if value.dim() > 1 and 2 <= value.shape[-1] <= _NARROW:
            for index, which in ((-1, "last"), (0, "first")):
                cut = value.detach().clone()
                cut[..., index] = 0
                yield f"the {which} column of {name} left out", {name: cut}
    for name, value in numbers.items():
        yield from ((text, {name: new}) for text, new in _layouts(name, value))
    for name, value in numbers.items():
        if value.dtype == torch.float32:
            rounded = value.detach().bfloat16().float()
            count = f"{len(value.unique())} distinct values become {len(rounded.unique())}"
            yield f"{name} rounded to bfloat16: {count}", {name: rounded}


def _storage_order(value: Tensor) -> Tensor | None:
    """What reads on from the first element would find; None when the storage ends before."""
    count = value.untyped_storage().nbytes() // value.element_size()
    start = value.storage_offset()
    if count - start < value.numel():
        return None
    flat = torch.empty(0, dtype=value.dtype, device=value.device)
    flat = flat.set_(value.untyped_storage(), start, (value.numel(),), (1,))
    return flat.clone().view(value.shape)


def _indices(name: str, value: Tensor, tensors: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Masks and ids that were not looked at, and negative ids that wrapped around."""
    value = value.detach()
    if value.dtype == torch.bool:
        yield f"{name} ignored, all False", torch.zeros_like(value)
        yield f"{name} ignored, all True", torch.ones_like(value)
        yield f"{name} inverted", ~value
        return
    if value.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        return
    if bool((value < 0).any()):
        sizes = [t.shape[0] for n, t in tensors.items() if n != name and t.dim()]
        for size in list(dict.fromkeys(sizes))[:4]:
            wrapped = torch.where(value < 0, value + size, value)
            yield f"negative {name} used as an index from the end of {size}", wrapped
    yield f"{name} ignored, all 0", torch.zeros_like(value)


def _layouts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same content in another order."""
    contiguous, value = value.is_contiguous(), value.detach()
    dims = value.dim()
    if dims >= 2 and value.shape[-1] == value.shape[-2] > 1:
        yield f"{name} transposed", value.transpose(-1, -2).contiguous()
    elif dims >= 2 and min(value.shape[-2:]) > 1:
        shape = value.shape
        if contiguous:  # else the storage order says it
            yield f"{name} read in column-major order", value.transpose(-1, -2).reshape(shape)
        other = value.reshape(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        yield f"{name} stored in column-major order", other.contiguous()
    for dim in dict.fromkeys((dims - 1, dims - 2, 0)):
        size = value.shape[dim] if 0 <= dim < dims else 0
        if size < 2:
            continue
        where = "" if dims == 1 else f" of dim {dim}"
        index = torch.arange(size, device=value.device)
        orders = []
        if size % 2 == 0:
            halves = index.view(2, -1)
            orders.append((f"the halves{where} of {name} exchanged", halves.flip(0).flatten()))
            if size > 2:
                mixed = halves.t().flatten()
                orders.append((f"the halves{where} of {name} interleaved", mixed))
                orders.append(
                    (f"interleaved rows{where} of {name} taken for halves", mixed.argsort())
                )
        if dim == 0:
            orders.append((f"{name} in reversed order{where}", index.flip(0)))
            orders.append((f"{name} moved on by one{where}", index.roll(1)))
            orders.append((f"{name} moved back by one{where}", index.roll(-1)))
        for text, order in orders:
            yield text, value.index_select(dim, order)


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
            special, what = ~torch.isfinite(flat.double()).all(dim=1), "NaN or infinity"
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
        shown = ranges(rows.nonzero().flatten().tolist())
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
        wide = value.detach().double().flatten()
        if len(wide) < _MANY or not bool(torch.isfinite(wide).all()):
            continue
        low, high = float(wide.min()), float(wide.max())
        largest, distinct = max(abs(low), abs(high)), len(wide.unique())
        step = float(spacing(wide.abs().max(), value.dtype))
        if 0 < high - low < min(_STEPS * step, largest / 2) and 2 * distinct < len(wide):
            dtype = str(value.dtype).removeprefix("torch.")
            said.append(
                f"{name} holds {distinct} distinct values in {len(wide)} elements, a spread of"
                f" {(high - low) / step:.3g} steps of {dtype}: too coarse to tell them apart"
            )
    return said


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
    rows = twice(actual).nonzero().flatten().tolist()
    first: Sequence[int] = actual[rows[0]].tolist()
    return (
        f"rows {ranges(rows)} hold the same index twice (row {rows[0]}:"
        f" {', '.join(map(str, first[:8]))}), expected are distinct ones: no valid selection"
    )
