"""What may have happened to the inputs of a case: the changes that `hypotheses` tries.

Each is a text and a function that makes the changed inputs when it is called, since making them
costs as much as trying them. Whether one fits is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice

import torch
from torch import Tensor

_PAIRS = 12
_NARROW = 8  # columns of an input that may stand for slots of a token
_SORTED = 1 << 22  # elements whose distinct values are counted by sorting them
Inputs = Mapping[str, Tensor]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """What may have happened, as it is said after "the reference with".

    change: makes the inputs that are another then, by name, when it is called; none where there is
    no such change. detail: what is added to the text when it fits.
    """

    text: str
    change: Callable[[], Inputs]
    detail: Callable[[], str] = str


def hypotheses(tensors: Inputs) -> Iterator[Hypothesis]:
    """The changes, the likeliest first. None is made before it is asked for."""
    numbers = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    pairs = (
        (a, b)
        for a, b in combinations(numbers, 2)
        if numbers[a].shape == numbers[b].shape and numbers[a].dtype == numbers[b].dtype
    )
    for a, b in islice(pairs, _PAIRS):
        swapped = {a: tensors[b], b: tensors[a]}
        yield Hypothesis(f"{a} and {b} exchanged", partial(dict, swapped))
    for name, value in numbers.items():
        if not value.is_contiguous():
            text = f"{name} read in storage order, its strides ignored"
            yield Hypothesis(text, partial(_storage_order, name, value))
    for name, value in tensors.items():
        if name not in numbers:
            yield from _of(name, value, _indices(name, value, tensors))
    for name, value in numbers.items():
        if value.dim() > 1 and 2 <= value.shape[-1] <= _NARROW:
            for index, which in ((-1, "last"), (0, "first")):
                cut = partial(_without_column, index)
                yield from _of(name, value, [(f"the {which} column of {name} left out", cut)])
    for name, value in numbers.items():
        yield from _of(name, value, _layouts(name, value))
    for name, value in numbers.items():
        if value.dtype == torch.float32:
            text = f"{name} rounded to bfloat16"
            detail = partial(_distinct_values, value)
            yield Hypothesis(text, partial(_apply, name, value, _to_bfloat16), detail)


def _of(name: str, value: Tensor, changes: Iterable[tuple[str, Change]]) -> Iterator[Hypothesis]:
    for text, change in changes:
        yield Hypothesis(text, partial(_apply, name, value, change))


def _apply(name: str, value: Tensor, change: Change) -> Inputs:
    return {name: change(value.detach())}


def _to_bfloat16(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def _without_column(index: int, value: Tensor) -> Tensor:
    cut = value.clone()
    cut[..., index] = 0
    return cut


def _distinct_values(value: Tensor) -> str:
    """How many values were told apart before and after; sorting is for a fit alone."""
    if value.numel() > _SORTED:
        return ""
    counts = [len(one.unique()) for one in (value.detach(), _to_bfloat16(value.detach()))]
    return f": {counts[0]} distinct values become {counts[1]}"


def _storage_order(name: str, value: Tensor) -> Inputs:
    """What reads on from the first element would find; nothing when the storage ends before."""
    count = value.untyped_storage().nbytes() // value.element_size()
    start = value.storage_offset()
    if count - start < value.numel():
        return {}
    flat = torch.empty(0, dtype=value.dtype, device=value.device)
    flat = flat.set_(value.untyped_storage(), start, (value.numel(),), (1,))
    return {name: flat.clone().view(value.shape)}


def _indices(name: str, value: Tensor, tensors: Inputs) -> Iterator[tuple[str, Change]]:
    """Masks and ids that were not looked at, and negative ids that wrapped around."""
    if value.dtype == torch.bool:
        yield f"{name} ignored, all False", torch.zeros_like
        yield f"{name} ignored, all True", torch.ones_like
        yield f"{name} inverted", torch.logical_not
        return
    if value.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        return
    sizes = [t.shape[0] for n, t in tensors.items() if n != name and t.dim()]
    for size in list(dict.fromkeys(sizes))[:4]:  # the same bits where none is negative
        yield f"negative {name} used as an index from the end of {size}", partial(_wrapped, size)
    yield f"{name} ignored, all 0", torch.zeros_like


def _wrapped(size: int, value: Tensor) -> Tensor:
    return torch.where(value < 0, value + size, value)


def _layouts(name: str, value: Tensor) -> Iterator[tuple[str, Change]]:
    """The same content in another order."""
    dims, shape = value.dim(), value.shape
    if dims >= 2 and shape[-1] == shape[-2] > 1:
        yield f"{name} transposed", lambda v: v.transpose(-1, -2).contiguous()
    elif dims >= 2 and min(shape[-2:]) > 1:
        if value.is_contiguous():  # else the storage order says it
            yield (
                f"{name} read in column-major order",
                lambda v: v.transpose(-1, -2).reshape(shape),
            )
        turned = (*shape[:-2], shape[-1], shape[-2])
        yield (
            f"{name} stored in column-major order",
            lambda v: v.reshape(turned).transpose(-1, -2).contiguous(),
        )
    for dim in dict.fromkeys((dims - 1, dims - 2, 0)):
        size = shape[dim] if 0 <= dim < dims else 0
        if size >= 2:
            for text, order in _orders(name, size, "" if dims == 1 else f" of dim {dim}", dim == 0):
                yield text, partial(_reordered, dim, order)


def _orders(
    name: str, size: int, where: str, leading: bool
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Other orders of a dimension: functions of its indices."""
    if size % 2 == 0:
        yield f"the halves{where} of {name} exchanged", lambda i: i.view(2, -1).flip(0).flatten()
        if size > 2:
            yield f"the halves{where} of {name} interleaved", lambda i: i.view(2, -1).t().flatten()
            yield (
                f"interleaved rows{where} of {name} taken for halves",
                lambda i: i.view(2, -1).t().flatten().argsort(),
            )
    if leading:
        yield f"{name} in reversed order{where}", lambda i: i.flip(0)
        yield f"{name} moved on by one{where}", lambda i: i.roll(1)
        yield f"{name} moved back by one{where}", lambda i: i.roll(-1)


def _reordered(dim: int, order: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    return value.index_select(dim, order(torch.arange(value.shape[dim], device=value.device)))
