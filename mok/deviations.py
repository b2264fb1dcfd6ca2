"""Float64 arithmetic on (value, deviation) pairs: the error analysis behind mok.reference.

A pair (v, m) says that a faithful realisation of the contract lies in [v - m, v + m]. Two modes
share all formulas:

exact    v is never rounded. m is a rigorous budget: every rounding place adds half an ulp of
         |v| + m, a product of matrices adds gamma_K (|A| + mA)(|B| + mB) with
         gamma_K = K u / (1 - K u) (Higham, Accuracy and Stability, section 3.1).
rounded  v is rounded to bf16 where the contract rounds. m is how far an fp32 realisation may be
         from v. A product of matrices adds the statistical 2 sqrt(K) u (|A| + mA)(|B| + mB), a
         sharper figure than gamma_K, so that few values are near a rounding border. At a rounding
         place m becomes max(|R(v + m) - R(v)|, |R(v - m) - R(v)|): 0 away from the borders.

u is the unit of the accumulation: 2^-24 for fp32 FMA; a tensor core that truncates when it aligns
has about 2^-22 per step. Single fp32 operations always count 2^-24. Refuses correlation: a value
used twice deviates independently, which only widens m.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Mode = Literal["exact", "rounded"]

FP32_UNIT = 2.0**-24
_BF16_UNIT = 2.0**-8  # 8 significant bits, so half an ulp is at most 2^-8 of the value
_BF16_FLOOR = 2.0**-134
_FP32_FLOOR = 2.0**-150
_EXP_OVERFLOW = -88.7228
_EXP_UNITS = 8.0
"""Relative error of 1 / (1 + exp(-g)) and g / (1 + exp(-g)) in fp32, in units of 2^-24: exp within
2 ulp (4 units), the addition and the division (1 unit each), rounded up."""


def round_bf16(value: Tensor) -> Tensor:
    """Nearest bf16, ties to even, of a float64 tensor in one rounding; returns float64.

    Subnormals (spacing 2^-133) and overflow to infinity included; NaN stays NaN. Going through
    fp32 would round twice.
    """
    array = value.detach().double().numpy()
    finite = np.where(np.isfinite(array), array, 0.0)
    quantum = np.maximum(np.frexp(finite)[1] - 8, -133)
    nearest = np.ldexp(np.rint(np.ldexp(finite, -quantum)), quantum)
    nearest = np.where(np.abs(nearest) >= 2.0**128, np.copysign(np.inf, nearest), nearest)
    return torch.from_numpy(np.where(np.isfinite(array), nearest, array))


def round_fp32(value: Tensor) -> Tensor:
    """Nearest fp32, ties to even, of a float64 tensor; returns float64."""
    return value.float().double()


@dataclass(frozen=True)
class Pair:
    """v: value, m >= 0: deviation; float64 tensors of one shape."""

    v: Tensor
    m: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Pair:
        """The same reshaping, indexing or transposition of both."""
        return Pair(change(self.v), change(self.m))


def given(tensor: Tensor) -> Pair:
    """An input, known exactly."""
    value = tensor.detach().double()
    return Pair(value, torch.zeros_like(value))


def beside(first: Pair, second: Pair, dim: int) -> Pair:
    """Two pairs concatenated along a dimension."""
    return Pair(torch.cat([first.v, second.v], dim), torch.cat([first.m, second.m], dim))


@dataclass(frozen=True)
class Arithmetic:
    """The operations of the contract in one mode.

    on_round, on_matmul: observers of every value before its rounding and of both operands of every
    product; mok.exact uses them to assert exactness.
    """

    mode: Mode
    unit: float = FP32_UNIT
    on_round: Callable[[Tensor], None] | None = None
    on_matmul: Callable[[Tensor, Tensor], None] | None = None

    def accumulation(self, steps: int) -> float:
        """Error of a sum of this many terms, relative to the sum of their magnitudes."""
        if self.mode == "exact":
            return steps * self.unit / (1.0 - steps * self.unit)
        return 2.0 * steps**0.5 * self.unit

    def matmul(self, a: Pair, b: Pair) -> Pair:
        """fp32 product of matrices with exact products (bf16 operands)."""
        if self.on_matmul is not None:
            self.on_matmul(a.v, b.v)
        magnitude_a, magnitude_b = a.v.abs(), b.v.abs()
        carried = magnitude_a @ b.m + a.m @ magnitude_b + a.m @ b.m
        terms = (magnitude_a + a.m) @ (magnitude_b + b.m)
        factor = self.accumulation(max(a.v.shape[-1], 1))
        return Pair(a.v @ b.v, carried + factor * terms)

    def dot(self, a: Pair, b: Pair, steps: int) -> Pair:
        """fp32 sum of a * b over the last axis; each term meets at most `steps` roundings."""
        if self.on_matmul is not None:
            self.on_matmul(a.v[..., None, :], b.v[..., :, None])
        carried = a.v.abs() * b.m + a.m * b.v.abs() + a.m * b.m
        terms = (a.v.abs() + a.m) * (b.v.abs() + b.m)
        factor = steps * FP32_UNIT / (1.0 - steps * FP32_UNIT)
        if self.mode == "rounded":
            factor = 2.0 * steps**0.5 * FP32_UNIT
        return Pair((a.v * b.v).sum(-1), carried.sum(-1) + factor * terms.sum(-1))

    def multiply(self, a: Pair, b: Pair) -> Pair:
        """One fp32 multiplication."""
        v = a.v * b.v
        return self._one_operation(v, a.v.abs() * b.m + a.m * b.v.abs() + a.m * b.m)

    def add(self, a: Pair, b: Pair) -> Pair:
        """One fp32 addition."""
        return self._one_operation(a.v + b.v, a.m + b.m)

    def _one_operation(self, v: Tensor, m: Tensor) -> Pair:
        return Pair(v, m + FP32_UNIT * (v.abs() + m) + _FP32_FLOOR)

    def round(self, a: Pair) -> Pair:
        """A place where the contract rounds to bf16."""
        if self.on_round is not None:
            self.on_round(a.v)
        if self.mode == "exact":
            return Pair(a.v, a.m + _BF16_UNIT * (a.v.abs() + a.m) + _BF16_FLOOR)
        nearest = round_bf16(a.v)
        above = (round_bf16(a.v + a.m) - nearest).abs()
        below = (round_bf16(a.v - a.m) - nearest).abs()
        return Pair(nearest, torch.maximum(above, below))

    def sigmoid(self, g: Pair) -> Pair:
        """1 / (1 + exp(-g)) in fp32. |s'| <= min(1/4, s (1 - s) e^m) within m of g."""
        s = torch.sigmoid(g.v)
        slope = torch.clamp(s * torch.sigmoid(-g.v) * torch.exp(g.m.clamp(max=80.0)), max=0.25)
        return self._flushed(g, s, g.m * slope + _EXP_UNITS * FP32_UNIT * s, s)

    def silu(self, g: Pair) -> Pair:
        """g / (1 + exp(-g)) in fp32. |silu'| <= 1.1 everywhere."""
        v = g.v * torch.sigmoid(g.v)
        return self._flushed(g, v, 1.1 * g.m + _EXP_UNITS * FP32_UNIT * v.abs(), v.abs())

    def silu_slope(self, g: Pair) -> Pair:
        """s (1 + g (1 - s)) in fp32, as written. |silu''| <= 1/2 everywhere."""
        s, rest = torch.sigmoid(g.v), torch.sigmoid(-g.v)
        inner = 1.0 + g.v.abs() * rest
        error = FP32_UNIT * s * ((_EXP_UNITS + 1.0) * g.v.abs() + (_EXP_UNITS + 3.0) * inner)
        v = s * (1.0 + g.v * rest)
        return self._flushed(g, v, 0.5 * g.m + error, s * inner)

    def _flushed(self, g: Pair, v: Tensor, m: Tensor, size: Tensor) -> Pair:
        """Where exp(-g) may leave the range of fp32, the result may be zero or subnormal."""
        edge = g.v - g.m < _EXP_OVERFLOW + 2.0
        m = torch.where(edge, m + size + 2.0**-126, m)
        if self.mode == "rounded":
            v = torch.where(g.v < _EXP_OVERFLOW, 0.0, v)
        return Pair(v, m)

    def clamp(self, a: Pair, low: float | None, high: float | None) -> Pair:
        """A clamp is exact and never widens a deviation."""
        if low is None and high is None:
            return a
        return Pair(a.v.clamp(low, high), a.m)

    def passing(self, a: Pair, at: Pair, low: float | None, high: float | None) -> Pair:
        """a where low <= at <= high, else 0; both are possible within at.m of a limit."""
        inside = torch.ones_like(at.v, dtype=torch.bool)
        unsure = torch.zeros_like(inside)
        for limit, sign in ((high, 1.0), (low, -1.0)):
            if limit is not None:
                inside &= sign * (at.v - limit) <= 0
                unsure |= ((at.v - limit).abs() <= at.m) & (at.m > 0)
        sure = torch.where(inside, a.m, 0.0)
        return Pair(torch.where(inside, a.v, 0.0), torch.where(unsure, a.v.abs() + a.m, sure))
