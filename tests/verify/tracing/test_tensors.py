"""The tensors inside a value: the usual values, which are read quickly, and all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verify.tracing.tensors import _searched, tensors_in, tensors_of_call

X, Y = torch.ones(2), torch.nn.Parameter(torch.ones(3))


class Sub(torch.Tensor):
    pass


VALUES: list[Any] = [
    X,
    Y,
    X.as_subclass(Sub),
    (),
    [],
    (X, Y),
    [X, Y],
    [X, None, Y],
    (X, [Y, {"a": X}]),
    {"a": X},
    torch.Size([1, 2]),
    torch.max(torch.ones(2, 2), 1),  # a tuple of a class of its own
    None,
    "text",
    3,
]


@pytest.mark.parametrize("path", ["", "1.mask"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_usual_values_have_the_paths_that_a_search_finds(value: Any, path: str) -> None:
    quick, slow = list(tensors_in(value, path)), list(_searched(value, path, ()))
    assert [at for at, _ in quick] == [at for at, _ in slow]
    assert all(one is other for (_, one), (_, other) in zip(quick, slow, strict=True))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_arguments_have_their_places(value: Any) -> None:
    found = tensors_of_call((value,), {"k": Y})
    assert [at for at, _ in found] == [
        *(at for at, _ in _searched((value,), "", ())),
        "kwargs.k",
    ]
