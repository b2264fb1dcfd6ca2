"""A difference from a golden: the errors of both sides, and which of them is likelier wrong."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.goldens.likely import told

EXACT = torch.linspace(1.0, 2.0, 64, dtype=torch.float64)
NEAREST = EXACT.float()


def off(ulps: int, every: int = 2) -> torch.Tensor:
    """The nearest float32 values, some of them moved by so many units in the last place."""
    moved = NEAREST.clone()
    moved.view(torch.int32)[::every] += ulps
    return moved


def likely(golden: torch.Tensor, actual: torch.Tensor) -> str:
    return told(golden, actual, EXACT, stable=True)[-1]


def test_errors_of_the_same_size_are_a_stale_golden() -> None:
    said = told(off(1), off(-1, every=3), EXACT, stable=True)
    assert said[0] == "this run is stable: a second execution gave the same bits"
    assert re.fullmatch(
        r"worst error against float64: golden 1(\.\d+)? ulp, this run 1(\.\d+)? ulp", said[1]
    )
    assert said[2].startswith("likely: a stale golden, not a regression: ")
    assert said[2].endswith("decide by hand")


def test_a_run_that_is_much_further_off_is_a_regression() -> None:
    assert "likely: a regression: this run is" in likely(off(1), off(40))
    assert "as far from float64 as the golden" in likely(off(1), off(40))


def test_one_element_that_is_far_off_does_not_drown_in_the_mean() -> None:
    spike = off(1)
    spike.view(torch.int32)[7] += 12
    assert "a regression" in likely(off(1), spike)
    assert "a wrong golden" in likely(spike, off(1))


def test_a_golden_that_is_much_further_off_is_named_as_such() -> None:
    assert "likely: a better result, or a wrong golden: the golden is" in likely(off(40), off(1))


def test_an_exact_golden_is_not_divided_by() -> None:
    exact = NEAREST.double()
    for golden, actual, said in (
        (NEAREST, off(1), "a regression: this run is infx"),
        (off(1), NEAREST, "a wrong golden: the golden is infx"),
    ):
        assert said in told(golden, actual, exact, stable=True)[-1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float) -> None:
    broken = NEAREST.clone()
    broken[3] = value
    said = told(broken, NEAREST, EXACT, stable=True)
    assert "the golden itself holds 1 NaN or infinity, this run 0" in said
    assert said[-1].startswith("likely: the golden was made by a broken run")
    assert told(NEAREST, broken, EXACT, stable=True)[-1] == (
        "likely: a regression: this run is not finite where the reference is"
    )


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.complex64])
def test_values_that_are_not_finite_are_counted_in_every_dtype(dtype: torch.dtype) -> None:
    broken, fine = torch.tensor([1.0, torch.inf, torch.nan]).to(dtype), torch.ones(3).to(dtype)
    said = told(broken, fine, None, stable=True)
    assert "the golden itself holds 2 NaN or infinity, this run 0" in said
    assert not any("NaN" in line for line in told(fine, fine, None, stable=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint16, torch.uint64])
def test_integers_are_finite(dtype: torch.dtype) -> None:
    ones = torch.ones(3).to(dtype)
    assert len(told(torch.zeros(3).to(dtype), ones, None, stable=True)) == 1


def test_a_run_that_differs_from_itself_says_nothing_about_the_golden() -> None:
    said = told(off(1), off(40), EXACT, stable=False)
    assert said[0].startswith("this run is not stable: ")
    assert not any(line.startswith("likely") for line in said)


def test_without_a_reference_it_asks_for_one() -> None:
    said = told(off(1), off(2), None, stable=True)
    assert said[-1] == "a reference=... would say which of the two is nearer to float64"


@pytest.mark.parametrize(
    "other", [NEAREST.double(), NEAREST[:3], torch.zeros(0), torch.ones(64, dtype=torch.int64)]
)
def test_what_cannot_be_compared_is_left_alone(other: torch.Tensor) -> None:
    for exact in (EXACT, None):
        assert len(told(NEAREST, other, exact, stable=True)) == 1
    assert len(told(NEAREST, off(1), EXACT[:5], stable=True)) == 1


@given(st.integers(-30, 30), st.integers(-30, 30))
def test_swapping_the_sides_swaps_the_verdict(one: int, other: int) -> None:
    forward, backward = likely(off(one), off(other)), likely(off(other), off(one))
    assert ("stale" in forward) == ("stale" in backward)
    assert ("likely: a regression" in forward) == ("a wrong golden" in backward)


def masked(values: torch.Tensor, rows: slice = slice(0, 8)) -> torch.Tensor:
    """As attention scores of a masked row are."""
    values = values.clone()
    values[rows] = float("-inf")
    return values


def test_values_that_are_infinite_as_the_reference_is_are_no_error() -> None:
    exact = masked(EXACT)
    said = told(masked(off(1)), masked(off(-1, every=3)), exact, stable=True)
    assert said[-1].startswith("likely: a stale golden, not a regression: ")
    assert not any("NaN" in line for line in said)
    assert (
        "a regression: this run is" in told(masked(off(1)), masked(off(40)), exact, stable=True)[-1]
    )
    nan = exact.clone()
    nan[:8] = float("nan")
    both = [one.clone() for one in (off(1), off(40))]
    for one in both:
        one[:8] = float("nan")
    assert "x as far from float64 as the golden" in told(*both, nan, stable=True)[-1]
    whole = slice(0, 64)
    said = told(*[masked(off(k), whole) for k in (1, 2)], masked(EXACT, whole), stable=True)
    assert len(said) == 1


def test_a_mask_that_one_side_lost() -> None:
    exact, kept, lost = masked(EXACT), masked(off(1)), masked(off(1), slice(0, 5))
    line = (
        "of 8 elements whose reference is NaN or infinity the golden has {} otherwise, this run {}"
    )
    said = told(kept, lost, exact, stable=True)
    assert line.format(0, 3) in said
    assert said[-1].startswith("likely: a regression: this run has other values where")
    said = told(lost, kept, exact, stable=True)
    assert line.format(3, 0) in said
    assert said[-1].startswith("likely: a better result, or a wrong golden: it has other values")
    assert not any(x.startswith("likely") for x in told(lost, kept, exact, stable=False))
