"""Gradients of what nobody passed, and of functions that differentiate themselves."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import verify
from verify.gradients import differentiate, reached_leaves


class NoisyWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        noise = 1 + int.from_bytes(os.urandom(2), "little") * 1e-4
        return g @ w.t(), (x.t() @ g) * noise


class Layer(nn.Module):
    def __init__(self, *, noisy: bool) -> None:
        super().__init__()
        self.noisy = noisy
        self.w = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return NoisyWeightGradient.apply(x, self.w) if self.noisy else x @ self.w


X = torch.arange(20.0).reshape(5, 4) / 3


@pytest.mark.parametrize("how", ["module", "method", "partial", "closure", "list"])
def test_a_random_weight_gradient_is_found_however_the_module_comes(how: str) -> None:
    def call(layer: Layer) -> verify.Case | Any:
        calls = {
            "module": (layer, X),
            "method": (layer.forward, X),
            "partial": (functools.partial(layer), X),
            "closure": (lambda x: layer(x), X),
            "list": (lambda ms, x: ms[0](x), [layer], X),
        }
        return verify.assert_repeatable(*calls[how])

    with pytest.raises(AssertionError, match="bits-differ"):
        call(Layer(noisy=True))
    clean = Layer(noisy=False)
    call(clean)
    assert clean.w.grad is None


def test_a_backward_elsewhere_does_not_switch_gradients_off() -> None:
    layer = Layer(noisy=True)

    def function(x: Tensor) -> Tensor:
        own = torch.ones(2, requires_grad=True)
        (own**2).sum().backward()
        return layer(x)

    with pytest.raises(AssertionError, match="bits-differ"):
        verify.assert_repeatable(function, X)


def test_outputs_whose_graph_is_used_are_named() -> None:
    def function(w: Tensor) -> tuple[Tensor, Tensor]:
        y = w * w
        (gradient,) = torch.autograd.grad(y.sum(), w)
        return y, gradient

    verdict = verify.assert_repeatable(function, X.clone().requires_grad_())
    assert any("gradients of out.0" in note for note in verdict.notes)


def test_reached_leaves_come_in_a_fixed_order_without_the_known_ones() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    out = a * b + c
    assert [id(t) for t in reached_leaves([out], [b])] == [id(a), id(c)]
    assert reached_leaves([torch.ones(2)], []) == []


def test_the_reached_leaves_own_gradients_are_put_back() -> None:
    a = torch.ones(2, requires_grad=True)
    a.grad = torch.full((2,), 7.0)
    out = a * 3
    found, left = differentiate({"out": out}, {"out": torch.ones(2)}, [a])
    assert found["reached.0"].tolist() == [3.0, 3.0]
    assert left == []
    assert a.grad.tolist() == [7.0, 7.0]


def test_other_errors_in_backward_are_not_swallowed() -> None:
    a = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        differentiate({"out": a * 2}, {"out": torch.ones(3)}, [a])
