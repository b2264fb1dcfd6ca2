"""A peer's layer in float64, with the spread of a pipeline that rounds every result to bf16.

No peer states an error budget, so none can be held to one. What is known is the arithmetic of the
least careful of them: bf16 tensors between all operations, fp32 accumulation. Here each of these
roundings is a random one, uniform over the largest half ulp (2^-8 of the value) and independent of
all others, variances are carried through both passes, and DEVIATIONS standard deviations are the
budget. It is measured against, not promised: a peer outside of it computes something else or
rounds more often; one inside may still round where it should not. Rigorous bounds would exceed the
values themselves after four matrix products and say nothing.

Legend: T tokens, K slots, E experts, H hidden size, I width, R rows of one expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEVIATIONS = 8.0
"""Of 10^7 elements with Gaussian errors the largest is 5.5; the rest is for what is correlated."""

_ROUNDING = 2.0**-8 / math.sqrt(3)
_ACCUMULATION = 2.0**-22  # a tensor core truncates when it aligns
_PARTIAL_COLUMNS = 64  # the narrowest tile whose partial sums a peer adds up in bf16


@dataclass(frozen=True)
class Spread:
    """v: the value without any rounding. s >= 0: the variance of what a pipeline computes."""

    v: Tensor
    s: Tensor


def _given(tensor: Tensor) -> Spread:
    value = tensor.detach().double()
    return Spread(value, torch.zeros_like(value))


def _round(a: Spread) -> Spread:
    return Spread(a.v, a.s + _ROUNDING**2 * (a.v**2 + a.s))


def _matmul(a: Spread, b: Spread) -> Spread:
    """fp32 accumulation of exact products, rounded; its own error grows with the length."""
    squares_a, squares_b = a.v**2, b.v**2
    own = (2 * _ACCUMULATION * a.v.shape[1]) ** 2
    s = squares_a @ (b.s + own * squares_b) + a.s @ (squares_b + b.s)
    return _round(Spread(a.v @ b.v, s))


def _multiply(a: Spread, b: Spread) -> Spread:
    return _round(Spread(a.v * b.v, a.v**2 * b.s + a.s * b.v**2 + a.s * b.s))


def _dot(a: Spread, b: Spread) -> Spread:
    """Sum of products over the last dimension, also where partial sums are added in bf16."""
    terms = _multiply(a, b)
    partial_sums = -(-terms.v.shape[1] // _PARTIAL_COLUMNS)
    own = partial_sums * _ROUNDING**2 * (terms.v**2).sum(1)
    return _round(Spread(terms.v.sum(1), terms.s.sum(1) + own))


def _transposed(a: Spread) -> Spread:
    return Spread(a.v.t(), a.s.t())


def _halves(a: Spread) -> tuple[Spread, Spread]:
    half = a.v.shape[1] // 2
    return Spread(a.v[:, :half], a.s[:, :half]), Spread(a.v[:, half:], a.s[:, half:])


def _silu(g: Spread) -> tuple[Spread, Spread]:
    """silu and its derivative; |silu'| <= 1.1 and |silu''| <= 0.5 everywhere."""
    sigmoid = torch.sigmoid(g.v)
    value = Spread(g.v * sigmoid, 1.1**2 * g.s)
    slope = Spread(sigmoid * (1 + g.v * torch.sigmoid(-g.v)), 0.5**2 * g.s)
    return _round(value), slope


def layer(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_experts: Tensor,
    router: Tensor,
    d_out: Tensor,
) -> dict[str, Spread]:
    """out [T, H], d_x [T, H], d_gate_up [E, 2I, H], d_down [E, H, I] and d_router [T, K].

    gate_up: an expert's I gate rows, then its I up rows. Dense by expert, on the inputs' device.
    """
    (tokens, slots), (experts, width, hidden) = topk_experts.shape, gate_up.shape

    def zeros(*shape: int) -> Spread:
        made = torch.zeros(*shape, dtype=torch.float64, device=x.device)
        return Spread(made, made.clone())

    y_slots, dx_slots = zeros(tokens, slots, hidden), zeros(tokens, slots, hidden)
    d_router = zeros(tokens, slots)
    d_gate_up, d_down = zeros(experts, width, hidden), zeros(experts, hidden, width // 2)
    for expert in range(experts):
        token, slot = torch.nonzero(topk_experts == expert, as_tuple=True)
        if not len(token):
            continue
        rows, upstream = _given(x[token]), _given(d_out[token])
        weight = _given(router[token, slot, None])
        both, out_weights = _given(gate_up[expert]), _given(down[expert])
        before = _matmul(rows, _transposed(both))
        gate, up = _halves(before)
        silu, slope = _silu(gate)
        h = _multiply(silu, up)
        y = _matmul(h, _transposed(out_weights))
        _store(y_slots, (token, slot), _multiply(weight, y))

        # some multiply by the upstream gradient at the end, others in the middle: the wider one
        late, early = _dot(upstream, y), _dot(_matmul(upstream, out_weights), h)
        _store(d_router, (token, slot), Spread(late.v, torch.maximum(late.s, early.s)))
        d_y = _multiply(weight, upstream)
        d_h = _matmul(d_y, out_weights)
        d_up, d_silu = _multiply(d_h, silu), _multiply(d_h, up)
        d_gate = _multiply(d_silu, slope)
        d_both = Spread(torch.cat((d_gate.v, d_up.v), 1), torch.cat((d_gate.s, d_up.s), 1))
        _store(dx_slots, (token, slot), _matmul(d_both, both))
        _store(d_gate_up, expert, _matmul(_transposed(d_both), rows))
        _store(d_down, expert, _matmul(_transposed(d_y), h))
    return {
        "out": _summed(y_slots),
        "d_x": _summed(dx_slots),
        "d_gate_up": d_gate_up,
        "d_down": d_down,
        "d_router": d_router,
    }


def _store(into: Spread, index: object, part: Spread) -> None:
    into.v[index] = part.v  # type: ignore[index]
    into.s[index] = part.s  # type: ignore[index]


def _summed(slots: Spread) -> Spread:
    """Over a token's slots, added up in bf16 or better."""
    own = slots.v.shape[1] * _ROUNDING**2 * (slots.v**2).sum(1)
    return _round(Spread(slots.v.sum(1), slots.s.sum(1) + own))


def budget(spread: Spread) -> Tensor:
    """The largest deviation that such a pipeline explains, float64 of the value's shape."""
    return DEVIATIONS * spread.s.sqrt()
