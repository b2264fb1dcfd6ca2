"""Strict parsing: nothing is taken for a number that is none, nothing is dropped in silence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.onpolicy.formats import problems, values
from verify.onpolicy.formats.json_records import Refused
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import META, Place


@pytest.fixture
def spot() -> Spot:
    return Spot(Place("f.jsonl", "line 3"), Problems())


def _told(spot: Spot) -> list[str]:
    return [f"{problem.field} {problem.what}" for problem in spot.problems.listed()]


def test_ids(spot: Spot) -> None:
    found = values.ids([0, 5, 2**31 - 1], spot, "ids")
    assert found is not None
    assert found.dtype == np.int64
    assert found.tolist() == [0, 5, 2**31 - 1]
    assert values.ids(np.array([1, 2], np.uint8), spot, "ids") is not None
    assert values.ids(None, spot, "ids") is None
    empty = values.ids([], spot, "ids")
    assert empty is not None
    assert empty.shape == (0,)
    assert _told(spot) == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1, -1], "entry 1 is -1"),
        ([2**31], "entry 0 is 2147483648"),
        ([2**70, 1], "entry 0 is 1180591620717411303424"),
        ([10**400], "an integer beyond 100 bits"),
        ([1, True], "entry 1 is true"),
        ([1.0], "entry 0 is 1.0"),
        (["1"], "entry 0 is '1'"),
        ([None], "entry 0 is null"),
        ([[1]], "entry 0 is a list of 1"),
        ("123", "is '123'"),
        ({"a": 1}, "is an object of 1 names"),
        (5, "is 5"),
        (np.zeros((2, 2), np.int64), "is an array of int64 [2, 2]"),
        (np.array([2**64 - 1], np.uint64), "holds 18446744073709551615"),
    ],
)
def test_ids_that_are_none(spot: Spot, value: Any, why: str) -> None:
    assert values.ids(value, spot, "response_ids") is None
    (told,) = _told(spot)
    assert told.startswith("response_ids ")
    assert why in told
    assert "from 0 to 2147483647" in told


def test_masks(spot: Spot) -> None:
    for value in ([1, 0, 1], [True, False, True], [1.0, 0, True], np.array([1.0, 0.0, 1.0])):
        found = values.mask(value, spot, "mask")
        assert found is not None
        assert found.tolist() == [True, False, True]
    assert _told(spot) == []


@pytest.mark.parametrize(
    "value",
    [[2], [0.5], [-1], [None], ["1"], [math.nan], [[1]], "101", 1, np.array([2]), [10**400]],
)
def test_masks_that_are_none(spot: Spot, value: Any) -> None:
    assert values.mask(value, spot, "mask") is None
    assert "true, false, 0 and 1" in _told(spot)[0]


def test_series_keep_what_is_written(spot: Spot) -> None:
    found = values.series([-1.5, 0, None, math.nan, -math.inf], spot, "logprobs", "bfloat16")
    assert found is not None
    assert found.stored == "bfloat16"
    assert found.absent.tolist() == [False, False, True, False, False]
    expected = np.array([-1.5, 0, math.nan, math.nan, -math.inf])
    assert np.array_equal(found.values, expected, equal_nan=True)
    written = values.series(["NaN", "-inf", "Infinity", -1], spot, "logprobs")
    assert written is not None
    assert not written.absent.any()
    expected = np.array([math.nan, -math.inf, math.inf, -1.0])
    assert np.array_equal(written.values, expected, equal_nan=True)
    stored = values.series(np.array([-0.5, -0.25], np.float32), spot, "logprobs")
    assert stored is not None
    assert (stored.stored, stored.values.dtype) == ("float32", np.float64)
    assert _told(spot) == []


def test_entries_of_series_that_are_no_numbers_are_absent_and_named(spot: Spot) -> None:
    given_ = [-1.0, "-0.5", True, Refused("1e999"), 10**400, [1]]
    found = values.series(given_, spot, "sampler_logprobs")
    assert found is not None
    assert found.absent.tolist() == [False, True, True, True, True, True]
    (told,) = _told(spot)
    assert "entry 1 is '-0.5' (5 of 6 entries are no numbers)" in told
    assert values.series([[-1.0, 5, None]], spot, "nested") is None
    assert values.series("-0.5", spot, "text") is None
    assert values.series(np.zeros((1, 2)), spot, "matrix") is None
    assert [told.split(" ")[0] for told in _told(spot)[1:]] == ["nested", "text", "matrix"]


@pytest.mark.parametrize(
    ("value", "key"), [("a", "a"), (7, "7"), (-1, "-1"), (np.int64(5), "5"), ("\ud800", "\ud800")]
)
def test_keys(spot: Spot, value: Any, key: str) -> None:
    assert values.key(value, spot, "id") == key
    assert _told(spot) == []


@pytest.mark.parametrize("value", [1.5, True, [1], {}, "", "x" * 1001, 2**70, Refused("1e999")])
def test_keys_that_are_none(spot: Spot, value: Any) -> None:
    assert values.key(value, spot, "id") is None
    assert len(_told(spot)) == 1


def test_settings(spot: Spot) -> None:
    whole = {
        "temperature": 0.7,
        "top_k": -1,
        "processed": True,
        "rollout_version": ["a", 5, None],
        "eos_token_ids": 2,
        "other": object(),
        "group": None,
    }
    assert values.meta(whole, spot) == {
        "temperature": 0.7,
        "top_k": -1,
        "processed": True,
        "rollout_version": ["a", "5", ""],
        "eos_token_ids": [2],
    }
    assert _told(spot) == []


@pytest.mark.parametrize("name", META)
@pytest.mark.parametrize("wrong", [object(), [object()], {"a": 1}, math.nan, Refused("1e999")])
def test_settings_of_a_wrong_kind_are_left_out_and_named(
    spot: Spot, name: str, wrong: object
) -> None:
    assert values.meta({name: wrong}, spot) == {}
    assert _told(spot)
    assert all(f"meta.{name}" in told for told in _told(spot))


@pytest.mark.parametrize(
    ("name", "wrong"), [("top_p", 1.5), ("temperature", -1), ("top_k", -2), ("temperature", True)]
)
def test_settings_out_of_range(spot: Spot, name: str, wrong: Any) -> None:
    assert values.meta({name: wrong}, spot) == {}
    assert len(_told(spot)) == 1


def test_problems_are_bounded_and_counted() -> None:
    found = Problems()
    for number in range(problems.MOST_PROBLEMS + 5):
        found.add(Place("f", f"line {number}"), "a", "b")
    listed = found.listed()
    assert len(listed) == problems.MOST_PROBLEMS + 1
    assert listed[-1].what.startswith("5 more problems")
    assert listed[-1].kind == "note"


def test_too_many_records_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "MOST_SAMPLES", 3)
    found = Problems()
    given_ = ((Place("f", f"line {at}"), {"n": at}) for at in range(5))
    assert [record["n"] for _, record in values.objects(given_, found)] == [0, 1, 2]
    (told,) = found.listed()
    assert (told.kind, told.place.record) == ("unreadable", "line 3")


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(_anything)
def test_whatever_is_given_gives_a_value_or_a_problem(value: Any) -> None:
    for parse in (values.ids, values.mask, values.series, values.number, values.text, values.key):
        spot = Spot(Place("f"), Problems())
        found = parse(value, spot, "field")
        assert value is None or found is not None or spot.problems.listed()
