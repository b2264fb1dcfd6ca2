"""The layer in float64, forward and backward by hand, with an error bound for every element.

One view of the whole problem: all experts, all ranks' tokens in rank order. mode "exact" gives the
true values and a rigorous budget; mode "rounded" rounds where the numerics contract rounds and says
which elements an fp32 realisation may round the other way (mok.deviations states both). It judges
backends, so it shares no code with them. Refuses speed: use small shapes.

Legend: T tokens, K slots, E experts, H hidden size, I width, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.deviations import (
    FP32_UNIT,
    Arithmetic,
    Mode,
    Pair,
    beside,
    given,
    round_bf16,
    round_fp32,
)

__all__ = [
    "Agreement",
    "MoEInputs",
    "Value",
    "agreement",
    "budget_used",
    "moe",
    "round_bf16",
    "round_fp32",
]

_LANE_STEPS = 16
_CROSS_LANE_STEPS = 2
_ROUTER_BLOCK = 64


@dataclass(frozen=True)
class MoEInputs:
    """x [T, H], topk_experts int64 [T, K] (-1: unused), router_weights [T, K], w_gate and w_up
    [E, I, H], w_down [E, H, I], shared (gate [I_s, H], up [I_s, H], down [H, I_s]) or None.
    Floating-point tensors may have any dtype; they are taken as exact.
    """

    x: Tensor
    topk_experts: Tensor
    router_weights: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None = None
    swiglu_limit: float | None = None


@dataclass(frozen=True)
class Value:
    """One output. unrounded, unrounded_m: just before the output cast; v, m: after it.

    In mode "exact" v is unrounded and m contains the cast. In mode "rounded" v is rounded to the
    output's dtype: bf16 for out and d_x, fp32 for d_router_weights and the weight gradients.
    """

    v: Tensor
    m: Tensor
    unrounded: Tensor
    unrounded_m: Tensor


@dataclass(frozen=True)
class Agreement:
    """Elements outside of [R(v - m), R(v + m)], elements different from R(v), and all."""

    outside: int
    different: int
    count: int


def agreement(value: Value, got: Tensor) -> Agreement:
    """Judge a backend's tensor against a "rounded" value; R rounds to the tensor's dtype.

    A weight gradient may be judged as fp32 or, rounded by the caller, as bf16.
    """
    rounded: Callable[[Tensor], Tensor] = round_bf16 if got.dtype == torch.bfloat16 else round_fp32
    result = got.detach().cpu().double()
    low = rounded(value.unrounded - value.unrounded_m)
    high = rounded(value.unrounded + value.unrounded_m)
    inside = (low <= result) & (result <= high)
    different = result != rounded(value.unrounded)
    return Agreement(int((~inside).sum()), int(different.sum()), result.numel())


def budget_used(value: Value, got: Tensor) -> float:
    """Worst |got - v| / m of an "exact" value; above 1 (or NaN as infinity) is a failure."""
    if got.numel() == 0:
        return 0.0
    error = (got.detach().cpu().double() - value.v).abs()
    ratio = torch.where(error == 0, 0.0, error / value.m)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max())


@dataclass(frozen=True)
class _ExpertResult:
    y: Pair
    d_x: Pair | None = None
    d_router: Pair | None = None
    d_weights: tuple[Pair, Pair, Pair] | None = None


def _expert(
    a: Arithmetic,
    x: Pair,
    d_out: Pair | None,
    weight: Pair,
    weights: tuple[Pair, Pair, Pair],
    limit: float | None,
    weight_rows: slice,
) -> _ExpertResult:
    """One expert on its rows. weight: router weights [R, 1]. weight_rows: rows of d_weights."""
    w_gate, w_up, w_down = weights
    low = None if limit is None else -limit
    gate = a.matmul(x, w_gate.map(Tensor.t))
    up = a.matmul(x, w_up.map(Tensor.t))
    hidden = a.round(a.multiply(a.silu(a.clamp(gate, None, limit)), a.clamp(up, low, limit)))
    y = a.round(a.matmul(hidden, w_down.map(Tensor.t)))
    if d_out is None:
        return _ExpertResult(y)
    gate, up = a.round(gate), a.round(up)
    clamped_gate, clamped_up = a.clamp(gate, None, limit), a.clamp(up, low, limit)
    silu, slope = a.silu(clamped_gate), a.silu_slope(clamped_gate)
    hidden = a.multiply(silu, clamped_up)
    product = a.matmul(d_out, w_down)
    blocks = -(-product.v.shape[1] // _ROUTER_BLOCK)
    # A product, 16 additions in a lane, 2 across lanes, then one per block.
    d_router = a.dot(product, hidden, 1 + _LANE_STEPS + _CROSS_LANE_STEPS + blocks)
    d_hidden = a.multiply(weight, product)
    d_gate = a.multiply(a.multiply(d_hidden, clamped_up), slope)
    d_gate = a.round(a.passing(d_gate, gate, None, limit))
    d_up = a.round(a.passing(a.multiply(d_hidden, silu), up, low, limit))
    weighted = a.round(a.multiply(weight, hidden))
    d_x = a.round(a.matmul(beside(d_gate, d_up, 1), beside(w_gate, w_up, 0)))

    def over_rows(left: Pair, right: Pair) -> Pair:
        return a.matmul(left.map(lambda t: t[weight_rows].t()), right.map(lambda t: t[weight_rows]))

    d_weights = (over_rows(d_gate, x), over_rows(d_up, x), over_rows(d_out, weighted))
    return _ExpertResult(y, d_x, d_router, d_weights)


def _sum_slots(a: Arithmetic, start: Pair, slots: Pair, used: Tensor, weights: Pair | None) -> Pair:
    """start + sum over k of w_k * slot k, k ascending; slots [T, K, H]."""
    total = start
    for slot in range(used.shape[1]):
        term = slots.map(lambda t, k=slot: t[:, k])  # type: ignore[misc]
        if weights is not None:
            term = a.multiply(weights.map(lambda t, k=slot: t[:, k, None]), term)  # type: ignore[misc]
        added = a.add(total, term)
        here = used[:, slot, None]
        total = Pair(torch.where(here, added.v, total.v), torch.where(here, added.m, total.m))
    return total


def _output(a: Arithmetic, pair: Pair, to_bf16: bool) -> Value:
    if to_bf16:
        cast = Arithmetic(a.mode, a.unit).round(pair)
    elif a.mode == "exact":
        cast = pair
    else:
        nearest = round_fp32(pair.v)
        above = (round_fp32(pair.v + pair.m) - nearest).abs()
        cast = Pair(nearest, torch.maximum(above, (round_fp32(pair.v - pair.m) - nearest).abs()))
    # Adding +0 turns -0 into +0: an output is a sum that started from +0.
    return Value(cast.v + 0.0, cast.m, pair.v, pair.m)


def moe(
    inputs: MoEInputs,
    d_out: Tensor | None,
    mode: Mode,
    accumulation_unit: float = FP32_UNIT,
    shared_rows: slice | None = None,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Value]:
    """Outputs by name: out, and with d_out [T, H] all gradients.

    d_x, d_router_weights, d_w_gate, d_w_up, d_w_down, and with a shared expert d_w_shared_gate,
    d_w_shared_up, d_w_shared_down, summed over the tokens in shared_rows (default: all), a rank's
    own. accumulation_unit: 2^-24 for fp32 FMA, 2^-22 for a truncating tensor core. arithmetic: for
    observers, instead of mode and unit.
    """
    a = arithmetic or Arithmetic(mode, accumulation_unit)
    # The layer compares fp32 values, so the limit is the fp32 nearest to the one given.
    limit = inputs.swiglu_limit
    limit = None if limit is None else float(round_fp32(torch.tensor(limit, dtype=torch.float64)))
    x, router = given(inputs.x), given(inputs.router_weights)
    upstream = None if d_out is None else given(d_out)
    topk = inputs.topk_experts
    used = topk >= 0
    tokens, slots = topk.shape
    hidden = inputs.x.shape[1]
    y = given(torch.zeros(tokens, slots, hidden))
    d_x = given(torch.zeros(tokens, slots, hidden))
    d_router = given(torch.zeros(tokens, slots))
    weight_gradients: list[tuple[Pair, Pair, Pair]] = []
    for expert in range(inputs.w_gate.shape[0]):
        token, slot = torch.nonzero(topk == expert, as_tuple=True)
        result = _expert(
            a,
            x.map(lambda t, rows=token: t[rows]),  # type: ignore[misc]
            None if upstream is None else upstream.map(lambda t, rows=token: t[rows]),  # type: ignore[misc]
            router.map(lambda t, at=(token, slot): t[at][:, None]),  # type: ignore[misc]
            (
                given(inputs.w_gate[expert]),
                given(inputs.w_up[expert]),
                given(inputs.w_down[expert]),
            ),
            limit,
            slice(None),
        )
        _store(y, result.y, token, slot)
        if result.d_x is not None and result.d_router is not None and result.d_weights is not None:
            _store(d_x, result.d_x, token, slot)
            _store(d_router, result.d_router, token, slot)
            weight_gradients.append(result.d_weights)
    own: _ExpertResult | None = None
    if inputs.shared is not None:
        gate, up, down = (given(weight) for weight in inputs.shared)
        ones = given(torch.ones(tokens, 1))
        rows = slice(None) if shared_rows is None else shared_rows
        own = _expert(a, x, upstream, ones, (gate, up, down), limit, rows)
    zero = given(torch.zeros(tokens, hidden))
    start = zero if own is None else own.y
    results = {"out": _output(a, _sum_slots(a, start, y, used, router), True)}
    if upstream is None:
        return results
    start = zero if own is None or own.d_x is None else own.d_x
    results["d_x"] = _output(a, _sum_slots(a, start, d_x, used, None), True)
    results["d_router_weights"] = _output(a, d_router, False)
    for place, name in enumerate(("gate", "up", "down")):
        parts = [gradients[place] for gradients in weight_gradients]
        whole = Pair(torch.stack([p.v for p in parts]), torch.stack([p.m for p in parts]))
        results[f"d_w_{name}"] = _output(a, whole, False)
        if own is not None and own.d_weights is not None:
            results[f"d_w_shared_{name}"] = _output(a, own.d_weights[place], False)
    return results


def _store(into: Pair, rows: Pair, token: Tensor, slot: Tensor) -> None:
    into.v[token, slot] = rows.v
    into.m[token, slot] = rows.m
