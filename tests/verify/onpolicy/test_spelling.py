"""Two spellings of one float32 are one number; anything a float64 tells apart is two."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onpolicy_records import both, sample

from verify.onpolicy.numbers import measure
from verify.onpolicy.spelling import NARROWEST_FIRST, coarseness, rounded, same_float32

F32 = st.floats(-100.0, 0.0, width=32)


def same(a: float, b: float) -> bool:
    return bool(same_float32(np.array([a]), np.array([b]))[0])


@given(F32, st.sampled_from(["shortest", "9", "9e"]))
def test_a_float32_printed_as_a_decimal_is_that_float32(value, how):
    text = {
        "shortest": str(np.float32(value)), "9": f"{value:.9g}", "9e": f"{value:.8e}"
    }[how]  # fmt: skip
    read = float(text)
    assert np.float32(read) == np.float32(value)
    assert read == value or same(read, value)
    assert read == value or same(value, read)


@given(F32, F32)
def test_two_float32_are_never_made_equal(a, b):
    assert not same(a, b)


@given(st.floats(-50.0, -1e-6), st.integers(1, 1000))
def test_digits_of_a_float64_count(value, steps):
    """Apart by some float64 steps and spelled with seventeen digits: another number."""
    other = value
    for _ in range(steps % 7 + 1):
        other = math.nextafter(other, 0.0)
    nine = {float(f"{one:.8e}") for one in (value, other)}
    exact = {float(np.float32(one)) for one in (value, other)}
    if not {value, other} & (nine | exact):
        assert not same(value, other)


def test_examples():
    third = float(np.float32(-0.1))
    assert third != -0.1
    assert same(-0.1, third)
    assert same(third, -0.1)
    assert not same(-0.1, -0.1)  # equal already
    assert not same(-0.1, math.nextafter(third, 0.0))
    assert not same(float("nan"), float("nan"))
    assert not same(-math.inf, math.inf)
    assert not same(0.0, -0.0)  # equal already
    assert not same(-1e300, -2e300)  # both beyond float32
    assert not same(-1e-60, -2e-60)  # both 0 as float32
    assert not same(-1e-60, 0.0)
    tiny = float(np.float32(-1.2345e-30))
    assert same(-1.2345e-30, tiny)


@pytest.mark.parametrize("stored", ["", "float32"])
def test_a_samplers_decimals_equal_the_trainers_float32(stored):
    rng = np.random.default_rng(5)
    values = (-3 * rng.random(200)).astype(np.float32)
    decimals = [float(str(value)) for value in values]
    one = sample(
        "x", range(200), trainer=values.astype(float).tolist(), rollout=decimals,
        stored={"trainer": stored},
    )  # fmt: skip
    pairs = both(one)
    numbers = measure(pairs)
    assert numbers.differing_tokens == 0
    assert numbers.abs_max == 0
    assert not pairs.difference.any()
    assert any("written in two ways" in note for note in pairs.notes)


def test_a_float64_next_to_a_float32_differs():
    value = float(np.float32(-0.7))
    near = math.nextafter(value, 0.0)
    assert measure(both(sample("x", [1], trainer=[value], rollout=[near]))).differing_tokens == 1


def test_bfloat16_is_not_rounded_away_and_told_apart_from_another_value():
    exact = np.array([-0.3, -1.7, -2.9], np.float32).astype(float)
    coarse = rounded(exact, "bfloat16")
    stored = {"trainer": "float32", "rollout": "bfloat16"}
    numbers = measure(
        both(sample("x", [1, 2, 3], trainer=exact.tolist(), rollout=coarse.tolist(), stored=stored))
    )
    assert numbers.differing_tokens == 3
    assert numbers.differing_beyond_storage == 0
    other = [*coarse[:2].tolist(), float(coarse[2]) - 0.0625]
    numbers = measure(
        both(sample("x", [1, 2, 3], trainer=exact.tolist(), rollout=other, stored=stored))
    )
    assert (numbers.differing_tokens, numbers.differing_beyond_storage) == (3, 1)
    silent = measure(both(sample("x", [1, 2, 3], trainer=exact.tolist(), rollout=other)))
    assert silent.differing_beyond_storage is None


@given(st.floats(width=32, allow_nan=False))
def test_rounding_to_bfloat16_is_to_nearest_even(value):
    found = float(rounded(np.array([value]), "bfloat16")[0])
    bits = int(np.array(value, np.float32).view(np.uint32))
    down, up = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    ends = [np.array(one, np.uint64).astype(np.uint32).view(np.float32) for one in (down, up)]
    if bits & 0xFFFF == 0:
        assert found == value
    elif abs(value) < 3e38:
        low, high = (float(end) for end in ends)
        nearest = min((low, high), key=lambda end: (abs(end - value), 0 if end is low else 1))
        tie = abs(low - value) == abs(high - value)
        assert found == (low if (down >> 16) % 2 == 0 else high) if tie else found == nearest


def test_rounding_of_the_others():
    values = np.array([-0.1, -70000.0, np.nan, -np.inf])
    assert NARROWEST_FIRST[0] == "bfloat16"
    assert rounded(values, "float64")[0] == -0.1
    assert rounded(values, "float32")[0] == np.float32(-0.1)
    half = rounded(values, "float16")
    assert half[0] == np.float16(-0.1)
    assert half[1] == -np.inf
    for dtype in NARROWEST_FIRST:
        assert np.isnan(rounded(values, dtype)[2])
        assert rounded(values, dtype)[3] == -np.inf


@pytest.mark.parametrize(
    ("form", "says"),
    [(".6g", "6 digits"), (".4f", "4 decimals"), (".7g", ""), (".9g", ""), (".17g", "")],
)
def test_values_that_were_cut_for_print_are_told(form, says):
    values = -np.random.default_rng(3).exponential(size=3000).astype(np.float32).astype(np.float64)
    written = np.array([float(format(value, form)) for value in values])
    assert coarseness(written) == says


def test_few_or_equal_values_say_nothing_of_their_digits():
    assert coarseness(np.full(1000, -0.5)) == ""
    assert coarseness(np.array([-0.5, -0.25, np.nan, -np.inf, 0.0])) == ""
    assert coarseness(np.empty(0)) == ""
    halves = rounded(-np.random.default_rng(3).exponential(size=3000), "bfloat16")
    assert coarseness(halves) == ""
