"""Placements: sizes add up, patterns find names, gradients lie where they really lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.errors import CaseError
from verify.placements import (
    batch_dim_of,
    even_sizes,
    local,
    lookup,
    placement_of,
    replicated,
    sharded,
    split,
)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_even_sizes(total: int, parts: int) -> None:
    sizes = even_sizes(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert split(sharded(1), total, parts) == sizes


def test_a_case_s_own_sizes() -> None:
    assert split(sharded(0, lambda total, parts: [0, total]), 5, 2) == [0, 5]
    wrong: list[Callable[[int, int], list[int]]] = [
        lambda total, parts: [total],
        lambda total, parts: [total, 1],
        lambda total, parts: [total + 1, -1],
    ]
    for sizes in wrong:
        with pytest.raises(CaseError, match=r"add up to 5"):
            split(sharded(0, sizes), 5, 2)


def test_lookup_prefers_the_exact_name_then_the_first_pattern() -> None:
    patterns = {"w_*": 1, "w_gate": 2, "*": 3, "w[0]": 4}
    assert lookup(patterns, "w_gate") == 2
    assert lookup(patterns, "w_up") == 1
    assert lookup(patterns, "x") == 3
    assert lookup(patterns, "w[0]") == 4
    assert lookup({"W": 1}, "w") is None, "names have a case on every platform"
    assert lookup({"n": 0}, "n") == 0


def test_gradients_of_sharded_inputs_lie_with_them_others_must_be_declared() -> None:
    given_ = {"x": sharded(0), "w": replicated, "v": local, "grad.v": replicated}
    assert placement_of(given_, "grad.x") == sharded(0)
    assert placement_of(given_, "grad.w") is None
    assert placement_of(given_, "grad.v") == replicated
    assert placement_of(given_, "y") is None
    assert [str(p) for p in (replicated, local, sharded(2))] == [
        "replicated",
        "local",
        "sharded(2)",
    ]


def test_batch_dimension_of_gradients() -> None:
    assert batch_dim_of({"x": 1}, "grad.x") == 1
    assert batch_dim_of({"x": 1, "grad.x": 0}, "grad.x") == 0
    assert batch_dim_of({"x": 1}, "out") is None
