"""Watches arithmetic on numbers that are narrower than float64, while a reference is computed.

The inputs are given in float64, and every tensor made of them knows what dtype it would have had
without that, and whether narrow arithmetic has rounded anything that it is made of. Casts, copies
and exact arithmetic (a mask, a sign, sums of small integers) round nothing; indices and masks carry
nothing on. It watches torch functions only and refuses to judge: what numpy, a custom operator or
writing into a fresh narrow buffer does is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WIDER = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_WIDE = (torch.float64, torch.complex128)
_CASTS = ("to", "type", "type_as", "double", "float", "half", "bfloat16", "cdouble", "cfloat")
_DRAWN = re.compile(
    r"rand.*|normal_?|bernoulli_?|multinomial|poisson|exponential_|.*dropout.*"
    r"|.*_like|new_.*|empty.*|zeros|ones|full"
)  # numbers that are made of no other ones


class Watched(Tensor):
    """A tensor with `claimed`, the dtype that it would have, and `rounded`, whether it is made of
    something that narrow arithmetic rounded."""

    claimed: torch.dtype
    rounded: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        in_place = _in_place(name)
        if in_place:
            _adopt(args[0])
        operands = list(_tensors((*args, *given.values())))
        result = super().__torch_function__(func, types, args, given)
        if not in_place and any(result is one for one in operands):
            result = plain(result).as_subclass(cls)  # a cast to its own dtype
        made = [one for one in _tensors(result) if isinstance(one, Watched)]
        if name == "__setitem__":
            args[0].rounded = _rounded(args)
        if made:
            _watch(name, func, operands, made, args, given)
        return result


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values in float64, watched; integers and narrower formats stay as they are."""
    found = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().clone()
        if tensor.dtype in WIDER:
            copy = copy.to(WIDER[tensor.dtype]).as_subclass(Watched)
            _know(copy, tensor.dtype)
        found[name] = copy
    return found


def rounded(tensor: Tensor) -> bool:
    """Whether narrow arithmetic was seen to round something that the tensor is made of."""
    return isinstance(tensor, Watched) and _rounded(tensor)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, watched no longer."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, Watched) else tensor


def _adopt(buffer: Any) -> None:
    """Watches a tensor from now on that is made of nothing watched so far: it is written to."""
    if type(buffer) is Tensor:
        dtype = buffer.dtype
        buffer.__class__ = Watched
        _know(buffer, dtype)


def _know(tensor: Any, dtype: torch.dtype) -> None:
    tensor.claimed, tensor.rounded = dtype, False


def _watch(
    name: str,
    func: Callable[..., Any],
    operands: Sequence[Tensor],
    made: Sequence[Watched],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Says of what was made what is known of the operands, and whether making it rounded."""
    carried = any(_rounded(one) for one in operands)
    claimed = _claimed(name, operands, args, kwargs)
    in_place = _in_place(name)
    known = carried or name in _CASTS or _DRAWN.fullmatch(name) is not None
    for result in made:
        if not (result.is_floating_point() or result.is_complex()):
            result.claimed, result.rounded = plain(result).dtype, False
            continue
        actual = plain(result).dtype
        kept = getattr(result, "claimed", None) if in_place else None
        result.claimed = kept or (actual if actual not in _WIDE else claimed or actual)
        result.rounded = carried
        if known or result.claimed in _WIDE:
            continue
        if actual in _WIDE:  # exact when it would have fitted into the narrow dtype
            held = plain(result).detach()
            fits = held.to(result.claimed).to(actual)
            result.rounded = not _equal(held, fits)
    narrow = [one for one in made if plain(one).dtype in WIDER and one.claimed in WIDER]
    if narrow and not (known or in_place) and not _same_when_wide(func, args, kwargs, narrow):
        for result in narrow:
            result.rounded = True


def _in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _claimed(
    name: str, operands: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    """The dtype that type promotion would give; None when it is the actual one."""
    if name in ("double", "cdouble"):
        return None
    if name in _CASTS:
        targets = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype)]
        targets += [_of(one) for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor)]
        return targets[0] if targets else _of(operands[0])
    dims = [one for one in operands if one.dim()] or list(operands)
    dtypes = [_of(one) for one in dims]
    dtypes = [one for one in dtypes if one.is_floating_point or one.is_complex]
    found: torch.dtype | None = None
    for dtype in dtypes:
        found = dtype if found is None else torch.promote_types(found, dtype)
    return found


def _same_when_wide(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    made: Sequence[Tensor],
) -> bool:
    """Whether float64 gives what arithmetic on narrow tensors gave."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = plain(value)
            return value.to(WIDER.get(value.dtype, value.dtype))
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(map(wide, value))
        return value

    try:
        again = func(*map(wide, args), **{key: wide(value) for key, value in kwargs.items()})
    except Exception:  # it takes nothing else, so nothing is known
        return True
    pairs = list(zip(made, _tensors(again), strict=False))
    return all(
        one.shape == other.shape and _equal(plain(one).detach(), other.detach())
        for one, other in pairs
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _of(tensor: Tensor) -> torch.dtype:
    return getattr(tensor, "claimed", None) or plain(tensor).dtype


def _rounded(value: Any) -> bool:
    return any(getattr(one, "rounded", False) for one in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
