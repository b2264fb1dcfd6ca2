"""Whether the experts of a transformers model are a layer that `mok` computes, and why not.

It exists so that a model which does not fit is refused in words, never run by something else in
silence. The library's own marks say how weights are stored (`marks`); what a module does between
its two products, and which columns it takes for gate and up, is found by its values on a grid,
since nothing marks the one and a mark may be wrong about the other. Needs no transformers: it reads
attributes. Refuses to trust an attribute that is not there, unless the library cannot set it.

Legend: E experts, H hidden size, I width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, SimpleNamespace

import torch
from torch import Tensor, nn

from mok.errors import UnsupportedError
from mok.integrations import marks

_LIMITS = ("limit", "swiglu_limit")
"""Attributes that hold the bound of a clamped SwiGLU, in the models of the library."""
_SLOPES = ("alpha", "swiglu_alpha")
_CONCATENATED, _HAS_GATE = (marks.NAMES.index(name) for name in ("is_concatenated", "has_gate"))
_FUNCTIONS = (FunctionType, BuiltinFunctionType)  # as activations: functional.silu, for one
Activation = Callable[..., object]
"""A class of modules, which is made anew, or a function."""
_NEAR = (0.0, 0.25, 1.0, 1.5, 3.5, 30.0)
_FAR = (1e3, 3e4)  # where a bound that is no attribute would show
_GRID = tuple(sign * value for value in (*_NEAR, *_FAR) for sign in (-1.0, 1.0))
_SAME = 1e-5  # of float32 values; other activations differ by far more somewhere on the grid


def swiglu_limit(experts: nn.Module, known: marks.Marks = marks.ALL) -> float | None:
    """The swiglu_limit of mok.moe with which it computes what these experts compute.

    known: the marks that the module's library can set. Raises UnsupportedError that lists all that
    does not fit.
    """
    act = getattr(experts, "act_fn", None)
    own_gate = "_apply_gate" in experts.__dict__
    limits = tuple(_number(getattr(experts, name, None)) for name in _LIMITS)
    slopes = [_number(getattr(experts, name, None)) for name in _SLOPES]
    alpha = next((slope for slope in slopes if slope is not None), None)
    apply = None if own_gate else getattr(type(experts), "_apply_gate", None)
    kind = act if act is None or isinstance(act, _FUNCTIONS) else type(act)
    read, unknown = marks.read(experts, known), marks.unknown(experts, known)
    limit, refusal = _judged(type(experts), apply, kind, read, unknown, limits, alpha)
    if refusal:
        raise UnsupportedError(refusal)
    return limit


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


@torch.compiler.assume_constant_result  # its arguments are classes and constants
def _judged(
    kind: type,
    apply: Activation | None,
    act: Activation | None,
    read: tuple[object, ...],
    unknown: tuple[str, ...],
    limits: tuple[float | None, ...],
    alpha: float | None,
) -> tuple[float | None, str]:
    return _judge(kind, apply, act, read, unknown, limits, alpha)


@functools.cache
def _judge(
    kind: type,
    apply: Activation | None,
    act: Activation | None,
    read: tuple[object, ...],
    unknown: tuple[str, ...],
    limits: tuple[float | None, ...],
    alpha: float | None,
) -> tuple[float | None, str]:
    """The limit, and the text of a refusal or ""."""
    unsaid = [name for name, mark in zip(marks.NAMES, read, strict=True) if mark is None]
    if unsaid:
        found = [f"it does not say {', '.join(unsaid)}: not an experts module of transformers?"]
        limit = None
    else:
        limit, problem, values = None, "", list(read)
        if read[_HAS_GATE]:
            limit, problem, joined = _gate(apply, act, limits, alpha, bool(read[_CONCATENATED]))
            if not joined:  # the other way round, the mark is right about what is stored
                values[_CONCATENATED] = False
        found = [
            what
            for (_, fits, what), mark in zip(marks.MARKS, values, strict=True)
            if mark is not fits
        ]
        if problem:
            found.append(problem)
        found += [f"it says {name}, which mok does not know" for name in unknown]
    if not found:
        return limit, ""
    told = "; ".join(f"({number}) {what}" for number, what in enumerate(found, 1))
    return None, (
        f"mok cannot run {kind.__name__}: {told}. mok takes gate_up_proj [E, 2 I, H] (gate above "
        "up) and down_proj [E, H, I] without biases, and silu(gate) * up, clamped or not. Choose "
        "another implementation: model.set_experts_implementation('grouped_mm')."
    )


def _gate(
    apply: Activation | None,
    act: Activation | None,
    limits: tuple[float | None, ...],
    alpha: float | None,
    concatenated: bool,
) -> tuple[float | None, str, bool]:
    """The limit with which an _apply_gate is SwiGLU, or else what it is, as far as known; and
    whether gate is the first half of its columns, which `concatenated` says it is.

    It is called with what is given here only, so nothing else that it reads goes unnoticed.
    """
    other = "its activation is not silu(gate) * up"
    if apply is None:
        why = "its class has no _apply_gate, or the module has one of its own"
        return None, f"{other}: {why}", concatenated
    if isinstance(act, type) and _settable(act):
        why = f"{act.__name__} has settings, so its class does not say what it is"
        return None, f"{other}: {why}", concatenated
    bounds = [limit for limit in limits if limit is not None]
    points = sorted({*_GRID, *(sign * 2.0 * limit for limit in bounds for sign in (-1, 1))})
    line = torch.tensor(points, dtype=torch.float32, device="cpu")
    gate, up = (part.flatten() for part in torch.meshgrid(line, line, indexing="ij"))
    # two columns of each, so that halves and alternating columns differ
    gate, up = (torch.stack([part, part.roll(1)], dim=1) for part in (gate, up))
    given = SimpleNamespace(
        act_fn=act() if isinstance(act, type) else act,
        **dict(zip(_LIMITS, limits, strict=True)),
        **({} if alpha is None else dict.fromkeys(_SLOPES, alpha)),
    )
    for halves in (concatenated, not concatenated):
        columns = torch.stack([gate, up], dim=1 if halves else 2).flatten(1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                got = apply(given, columns)
            except Exception as error:  # whatever somebody's model raises
                return None, f"{other} ({type(error).__name__}: {error})", concatenated
        for limit in (*bounds, None):
            if _same(got, _swiglu(gate, up, limit)):
                return limit, "", halves
            if alpha is not None and _same(got, _swiglu(gate, up, limit, alpha, 1.0)):
                clamped = "" if limit is None else f", clamped at {limit:g}"
                told = f"gate * sigmoid({alpha:g} gate) * (up + 1){clamped}"
                return None, f"its activation is {told}, not silu(gate) * up", halves
    return None, other, concatenated


def _settable(act: type) -> bool:
    """Whether two activations of a class may differ: whether it is made with arguments."""
    if not issubclass(act, nn.Module):
        return True  # a partial, say
    own = [kind for kind in act.__mro__ if kind not in nn.Module.__mro__]
    return act is not nn.SiLU and any("__init__" in vars(kind) for kind in own)


def _swiglu(
    gate: Tensor, up: Tensor, limit: float | None, alpha: float = 1.0, shift: float = 0.0
) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + shift)


def _same(got: object, wanted: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.numel() != wanted.numel():
        return False
    error = (got.float().reshape(wanted.shape) - wanted).abs()
    return bool((error <= _SAME * (1.0 + wanted.abs())).all())
