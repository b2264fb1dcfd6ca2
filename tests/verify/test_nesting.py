"""Tensors inside containers are inputs like all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import verify
from verify.nesting import arguments_of, unnest


def test_containers_are_taken_apart_and_built_anew() -> None:
    x, module = torch.ones(2), nn.Linear(2, 2)
    made = {"x": x, "xs": [x, {"m": module, "n": 3}], "a": np.arange(3.0), "plain": {"k": (1, "s")}}
    flat, nests = unnest(made)
    assert set(flat) == {"x", "xs.0", "xs.1", "a", "plain"}
    assert flat["plain"] is made["plain"]
    fresh = {**flat, "xs.0": torch.zeros(2)}
    built = arguments_of(fresh, nests)
    assert set(built) == set(made)
    assert built["xs"][0] is fresh["xs.0"]
    assert built["xs"][1] == {"m": module, "n": 3}
    assert isinstance(built["a"], np.ndarray)
    assert built["a"] is not made["a"]


def relu_first(xs: Any) -> Tensor:
    return xs[0].relu_() * 2


def test_a_mutation_inside_a_list_is_seen_and_does_not_reach_the_caller() -> None:
    x = torch.tensor([-1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match=r"input xs\.0 has other bits"):
        verify.assert_repeatable(relu_first, [x])
    assert x[0] == -1.0
    verify.assert_repeatable(lambda xs: xs[0].relu() * 2, [x])


def test_a_mutation_of_a_numpy_array_is_seen() -> None:
    array = np.array([-1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match="input-mutated"):
        verify.assert_repeatable(lambda a: np.maximum(a, 0, out=a).copy(), array)
    assert array[0] == -1.0
    verify.assert_repeatable(lambda a: np.maximum(a, 0), array)


def test_gradients_of_tensors_inside_containers_are_compared() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    verdict = verify.assert_repeatable(lambda ws, x: x @ ws["w"], {"w": weight}, torch.rand(4, 3))
    assert "grad.ws.0" in verdict.claims[0].compared
