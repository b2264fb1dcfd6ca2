"""Rounding against exact fractions, and both parts of `reference` on right and wrong results."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.budgets import Reference, check, judge, reduction, round_to, spacing
from verify.errors import CaseError
from verify.inputs import generate

# digits (hidden one included), exponent of the smallest normal, largest finite
FORMATS = {
    torch.float32: (24, -126, Fraction(2**24 - 1) * 2**104),
    torch.bfloat16: (8, -126, Fraction(2**8 - 1) * 2**120),
    torch.float16: (11, -14, Fraction(65504)),
    torch.float8_e5m2: (3, -14, Fraction(57344)),
    torch.float8_e4m3fn: (4, -6, Fraction(448)),
}
dtypes = st.sampled_from(list(FORMATS))


def slow(value: float, dtype: torch.dtype) -> float:
    """`value` rounded half to even, by fractions."""
    if not math.isfinite(value) or value == 0:
        return value
    digits, least, largest = FORMATS[dtype]
    exact = abs(Fraction(value))
    exponent = math.frexp(value)[1] - 1
    quantum = Fraction(2) ** (max(exponent, least) - (digits - 1))
    rounded = round(exact / quantum) * quantum  # Fraction rounds half to even
    result = math.inf if rounded > largest else float(rounded)
    return math.copysign(result, value)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def agree(value: float, dtype: torch.dtype) -> None:
    got = round_to(torch.tensor([value], dtype=torch.float64), dtype).item()
    want = slow(value, dtype)
    assert bits(got) == bits(want) or (math.isnan(value) and math.isnan(got)), (value, got, want)


@given(dtypes, st.floats(width=64))
def test_any_double(dtype: torch.dtype, value: float) -> None:
    agree(value, dtype)


@given(dtypes, st.integers(-(2**9), 2**9), st.integers(-150, 130), st.integers(-2, 2))
def test_near_borders_and_ties(dtype: torch.dtype, units: int, exponent: int, nudge: int) -> None:
    value = math.ldexp(units, exponent) / 2  # ties of many formats and exponents
    for _ in range(abs(nudge)):
        value = math.nextafter(value, math.inf if nudge > 0 else -math.inf)
    agree(value, dtype)


@given(dtypes, st.integers(-40, 40), st.sampled_from([-1, 0, 1]))
def test_subnormals(dtype: torch.dtype, halves: int, nudge: int) -> None:
    digits, least, _ = FORMATS[dtype]
    value = math.ldexp(halves, least - digits)  # multiples of half the smallest subnormal
    agree(value if nudge == 0 else math.nextafter(value, nudge * math.inf), dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_overflow_border(dtype: torch.dtype) -> None:
    digits, _, largest = FORMATS[dtype]
    top = float(largest)
    quantum = math.ldexp(1.0, math.frexp(top)[1] - digits)
    border = top + quantum / 2
    for value in (top, math.nextafter(border, 0), border, math.nextafter(border, math.inf), 1e300):
        agree(value, dtype)
        agree(-value, dtype)
    # for e4m3fn the largest finite has an odd neighbour that is NaN, so its border rounds down
    if dtype != torch.float8_e4m3fn:
        assert math.isinf(slow(border, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_finite_values_are_their_own_rounding(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wide = every[torch.isfinite(every)].double()
    assert torch.equal(round_to(wide, dtype), wide)
    gap = spacing(wide.abs(), dtype)
    up = wide.abs() + gap
    assert torch.equal(round_to(up, dtype), up.where(up <= torch.finfo(dtype).max, torch.inf))


def test_one_rounding_where_torch_s_cast_makes_two() -> None:
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to(value, torch.bfloat16).item() == 1 + 2.0**-7


def test_integers_and_doubles_are_left_alone() -> None:
    value = torch.tensor([0.1, 2.5], dtype=torch.float64)
    assert torch.equal(round_to(value, torch.float64), value)
    assert torch.equal(round_to(value, torch.int32), value)
    assert torch.equal(spacing(value, torch.int32), torch.zeros_like(value))


def right(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Reference]:
    a = generate("a", (16, 64), torch.bfloat16).double()
    b = generate("b", (64, 8), torch.bfloat16).double()
    exact, magnitudes = a @ b, a.abs() @ b.abs()
    return (a.float() @ b.float()).to(dtype), reduction(exact, magnitudes, 64, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_right_result_passes_both_parts(dtype: torch.dtype) -> None:
    result, reference = right(dtype)
    measured = check("out", result, reference)
    assert (measured["nonfinite"], measured["over_budget"], measured["forbidden"]) == (0, 0, 0)
    assert 0 < measured["worst_ratio"] <= 1
    assert [row["ratio"] for row in measured["worst_rows"]] == sorted(
        (row["ratio"] for row in measured["worst_rows"]), reverse=True
    )
    assert "first_over_budget" not in measured
    assert "plain_relative_l2" not in measured


def test_one_lost_term_is_over_budget_in_its_row() -> None:
    a = generate("a", (16, 64), torch.bfloat16).double()
    b = generate("b", (64, 8), torch.bfloat16).double()
    reference = reduction(a @ b, a.abs() @ b.abs(), 64, torch.bfloat16)
    lost = a.clone()
    lost[11, 5] = 0
    measured = check("out", (lost @ b).bfloat16(), reference)
    assert measured["over_budget"] > 0
    assert measured["worst_rows"][0]["row"] == 11
    assert measured["first_over_budget"]["index"][0] == 11
    assert measured["worst_ratio"] > 1


def test_truncation_stays_in_the_budget_and_is_rounded_at_the_wrong_place() -> None:
    """Why there are two parts."""
    result, reference = right(torch.bfloat16)
    exact = reference.exact
    quantum = spacing(exact.abs(), torch.bfloat16)
    truncated = (torch.trunc(exact / quantum) * quantum).bfloat16()
    wide_budget = Reference(exact, 2 * reference.budget, reference.unrounded, reference.margin)
    measured = check("out", truncated, wide_budget)
    assert measured["over_budget"] == 0
    assert measured["forbidden"] > 20
    assert check("out", result, wide_budget)["forbidden"] == 0


def constant(value: float, budget: float = 0.5, margin: float = 0.5, n: int = 3) -> Reference:
    full = [torch.full((n,), v, dtype=torch.float64) for v in (value, budget, value, margin)]
    return Reference(*full)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("actual", "reference", "bad"),
    [
        (NAN, 1.0, {"nonfinite": 3, "over_budget": 3, "forbidden": 0}),
        (INF, 1.0, {"nonfinite": 3, "over_budget": 3, "forbidden": 0}),
        (-INF, INF, {"nonfinite": 0, "over_budget": 3, "forbidden": 3}),
        (INF, INF, {"nonfinite": 0, "over_budget": 0, "forbidden": 0}),
        (NAN, NAN, {"nonfinite": 0, "over_budget": 0, "forbidden": 0}),
        (1.0, NAN, {"nonfinite": 0, "over_budget": 3, "forbidden": 3}),
        (1.0, INF, {"nonfinite": 0, "over_budget": 3, "forbidden": 3}),
        (NAN, INF, {"nonfinite": 0, "over_budget": 3, "forbidden": 3}),
        (-0.0, 0.0, {"nonfinite": 0, "over_budget": 0, "forbidden": 0}),
    ],
)
def test_nonfinite(actual: float, reference: float, bad: dict[str, int]) -> None:
    measured = check("out", torch.full((3,), actual), constant(reference))
    assert {key: measured[key] for key in bad} == bad
    for value in measured.values():
        assert not isinstance(value, float) or math.isfinite(value), "it is written as JSON"


def test_zero_budget_permits_only_the_value_itself() -> None:
    measured = check("out", torch.tensor([1.0, 1.0, 1.25]), constant(1.0, 0.0, 0.0))
    assert (measured["over_budget"], measured["forbidden"]) == (1, 1)
    assert measured["worst_ratio"] == "inf"
    assert measured["first_forbidden"] == {"index": [2], "actual": 1.25, "reference": 1.0}


@pytest.mark.parametrize(("budget", "margin"), [(-1.0, 0.0), (NAN, 0.0), (0.0, -1.0), (0.0, NAN)])
def test_a_budget_that_is_no_budget_is_refused(budget: float, margin: float) -> None:
    with pytest.raises(CaseError, match=">= 0"):
        check("out", torch.ones(3), constant(1.0, budget, margin))


def test_shapes_must_fit() -> None:
    with pytest.raises(CaseError, match=r"'out': exact has shape \[3\], the output has \[3, 1\]"):
        check("out", torch.ones(3, 1), constant(1.0))
    with pytest.raises(CaseError, match="imaginary"):
        check("out", torch.ones(3, dtype=torch.complex64), constant(1.0))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), ()])
def test_empty_and_zero_dimensional(shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape, dtype=torch.float64)
    measured = check("out", zeros.float(), Reference(zeros, zeros, zeros, zeros, zeros))
    assert (measured["numel"], measured["over_budget"], measured["worst_ratio"]) == (
        zeros.numel(),
        0,
        0.0,
    )
    if zeros.numel():
        wrong = check("out", zeros.float() + 1, Reference(zeros, zeros, zeros, zeros))
        assert wrong["first_over_budget"]["index"] == []


def test_integers_are_measured_by_the_margin() -> None:
    measured: dict[str, Any] = check("out", torch.tensor([3, 3, 4]), constant(3.0, 0.0, 0.0))
    assert (measured["over_budget"], measured["forbidden"]) == (1, 1)


def test_reduction_budget_grows_with_length_and_magnitude() -> None:
    one = torch.ones(1, dtype=torch.float64)
    short, long = (reduction(one, 100 * one, n, torch.float32).margin for n in (10, 1000))
    assert float(long / short) == pytest.approx(100, rel=1e-3)
    assert float(short) == pytest.approx(10 * 2.0**-24 * 100, rel=1e-5)
    wide = reduction(one, 100 * one, 10, torch.float32, accumulation=torch.float64)
    assert float(wide.margin) < float(short) / 2**28


def test_the_budget_of_a_reduction_is_gamma_n_and_half_an_ulp() -> None:
    exact, magnitudes = torch.tensor([1.5]).double(), torch.tensor([6.0]).double()
    found = reduction(exact, magnitudes, 100, torch.bfloat16)
    unit = 2.0**-24
    margin = 100 * unit / (1 - 100 * unit) * 6.0
    assert found.margin.item() == pytest.approx(margin, rel=1e-15)
    assert found.budget.item() == pytest.approx(margin + 2.0**-8, rel=1e-15)
    assert found.unrounded.item() == found.exact.item() == 1.5


def test_an_infinite_budget_is_refused() -> None:
    one = torch.ones(2).double()
    for part in ("budget", "margin"):
        reference = replace(Reference(one, one, one, one), **{part: one / 0})
        with pytest.raises(CaseError, match=f"infinite {part}"):
            check("out", torch.ones(2), reference)


def test_a_budget_as_large_as_the_values_proves_nothing() -> None:
    exact = torch.tensor([1.0, -2.0, 3.0]).double()
    tight = Reference(exact, exact.abs() * 1e-3, exact, exact.abs() * 1e-3)
    assert check("out", exact.float(), tight)["permissive"] == 0
    wide = replace(tight, budget=exact.abs() * 1.5)
    assert check("out", exact.float() * 1.4, wide)["permissive"] == 3


@pytest.mark.parametrize("part", ["exact", "budget", "unrounded", "margin"])
def test_a_reference_must_be_float64(part: str) -> None:
    """Widened silently, a float32 reference would judge with errors of its own."""
    reference = replace(constant(1.0), **{part: torch.ones(3)})
    with pytest.raises(CaseError, match=f"'out': {part} is float32, it must be float64; widen"):
        check("out", torch.ones(3), reference)
    plain = replace(constant(1.0), plain=torch.ones(3).bfloat16())
    assert check("out", torch.ones(3), plain)["plain_relative_l2"] == 0.0


def test_a_reduction_of_less_than_float64_is_refused() -> None:
    one = torch.ones(3)
    with pytest.raises(CaseError, match="reduction: exact is bfloat16, it must be float64"):
        reduction(one.bfloat16(), one.double(), 3, torch.float32)
    with pytest.raises(CaseError, match="reduction: sum_of_magnitudes is float32"):
        reduction(one.double(), one, 3, torch.float32)


def test_judged_masks_are_what_check_counts() -> None:
    result, reference = right(torch.float32)
    result[3, 2], result[5] = NAN, 0.0
    judged, measured = judge("out", result, reference), check("out", result, reference)
    counts = {"nonfinite": judged.nonfinite, "over_budget": judged.over}
    assert {key: int(mask.sum()) for key, mask in counts.items()} == {
        key: measured[key] for key in counts
    }
    assert judged.wrong.nonzero().tolist() == [[3, 2], *([5, column] for column in range(8))]
