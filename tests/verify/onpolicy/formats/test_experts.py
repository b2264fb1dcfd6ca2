"""Which experts were chosen, in every notation; shapes are checked before memory is taken."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onpolicy_files import EXPERTS, npy, packed

from verify.onpolicy.formats import experts
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import Place


@pytest.fixture
def spot() -> Spot:
    return Spot(Place("f.jsonl", "line 3"), Problems())


def _told(spot: Spot) -> list[str]:
    return [f"{problem.field} {problem.what}" for problem in spot.problems.listed()]


@pytest.mark.parametrize(
    "value",
    [
        EXPERTS.tolist(),
        EXPERTS,
        {"data": packed(EXPERTS.astype(np.uint8)), "dtype": "uint8", "shape": [5, 2, 2]},
        {"data": packed(EXPERTS.astype(np.int16)), "dtype": "int16", "shape": (5, 2, 2)},
        "nrlre1:int32:5x2x2:" + packed(EXPERTS),
        npy(EXPERTS.astype(np.uint16)),
        npy(np.asfortranarray(EXPERTS)),
    ],
    ids=["lists", "array", "packed", "packed tuple", "envelope", "npy", "npy by column"],
)
def test_notations(spot: Spot, value: Any) -> None:
    found = experts.routing(value, spot, "routing", start=0)
    assert _told(spot) == []
    assert found is not None
    assert np.array_equal(found.experts, EXPERTS)
    assert (found.experts.dtype, found.start) == (np.int16, 0)


def test_null_in_place_of_a_row_or_a_layer_is_none_recorded(spot: Spot) -> None:
    found = experts.routing([[[1, 2], None], None], spot, "routing")
    assert found is not None
    assert found.experts.tolist() == [[[1, 2], [-1, -1]], [[-1, -1], [-1, -1]]]


def test_large_numbers_of_experts(spot: Spot) -> None:
    found = experts.routing([[[2**15]]], spot, "routing")
    assert found is not None
    assert found.experts.dtype == np.int32
    empty = experts.routing([], spot, "routing")
    assert empty is not None
    assert empty.experts.shape == (0, 0, 0)


def test_what_stands_beside_the_experts(spot: Spot) -> None:
    weights = np.full((5, 2, 2), 0.5)
    found = experts.routing(
        EXPERTS,
        spot,
        "routing",
        weights=weights.tolist(),
        margins=np.zeros((5, 2), np.float32),
        layers=[3, 5],
    )
    assert found is not None
    assert found.weights is not None
    assert found.margins is not None
    assert (found.weights.dtype, found.margins.shape) == (np.float32, (5, 2))
    assert found.layers == (3, 5)
    assert _told(spot) == []
    found = experts.routing(
        EXPERTS, spot, "routing", weights=[[1.0]], margins=[["a"]], layers=[1, 2, 3]
    )
    assert found is not None
    assert (found.weights, found.margins, found.layers) == (None, None, None)
    assert [told.split(" ")[0] for told in _told(spot)] == [
        "routing.weights",
        "routing.margins",
        "routing.layers",
    ]


_HUGE = np.lib.format.header_data_from_array_1_0(np.zeros(1, np.uint8)) | {"shape": (2**40,)}
_huge_file = io.BytesIO()
np.lib.format.write_array_header_1_0(_huge_file, _HUGE)
_objects = io.BytesIO()
np.save(_objects, np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([[[1, 2]], [[1]]], "row 1 holds a list of 1, others hold lists of 2"),
        ([[[1], [2]], [[1]]], "row 1 is a list of 1, others are lists of 2"),
        ([[[1.0]]], "holds 1.0"),
        ([[[True]]], "holds true"),
        ([[["1"]]], "holds '1'"),
        ([[[2**70]]], "beyond 64 bits"),
        ([[[2**31]]], "holds 2147483648 to 2147483648"),
        ([[[-2]]], "holds -2 to -2"),
        ([[[0] * 4096] * 4096, *[None] * 100], "holds 101 rows of 4096 times 4096, at most"),
        ([1, 2], "no row is a list of lists"),
        (5, "is 5"),
        (np.zeros((2, 2), np.int64), "an array of int64 [2, 2]"),
        (np.zeros((2, 2, 2)), "an array of float64"),
        (np.zeros((0, 2**20, 2**20), np.int64), "at most 4096 layers and k"),
        ({"data": "AAAA", "dtype": "uint8", "shape": [2**39, 2**39, 1]}, "another number"),
        ({"data": "AAAA", "dtype": "object", "shape": [3]}, "its dtype is 'object'"),
        ({"data": "AAAA", "dtype": ["uint8"], "shape": [3]}, "its dtype is a list of 1"),
        ({"data": "AAAA", "dtype": "uint8", "shape": [-1]}, "its shape is"),
        ({"data": "A?", "dtype": "uint8", "shape": [1]}, "no base64"),
        ({"data": 5, "dtype": "uint8", "shape": [1]}, "its data is 5"),
        ({}, "its dtype is null"),
        ("nrlre1:int32:5x2:AAAA", "begins with 'nrlre1:int32:5x2:AAAA'"),
        ("nrlre1:int32:5x2x2:AAAA", "holds 3 bytes"),
        ("AAAA", "holds 3 bytes with no shape"),
        ("\u00e9", "no base64"),
        (base64.b64encode(_huge_file.getvalue()).decode(), "in 0 bytes"),
        (base64.b64encode(_objects.getvalue()).decode(), "they are integers"),
        (npy(np.zeros((2, 2, 2))), "an array of float64"),
    ],
)
def test_what_is_no_routing_is_named(spot: Spot, value: Any, why: str) -> None:
    assert experts.routing(value, spot, "routing") is None
    (told,) = _told(spot)
    assert why in told


def test_experts_without_a_shape(spot: Spot) -> None:
    found = experts.shaped(packed(EXPERTS), (2, 2), 5, spot, "routed_experts")
    assert found is not None
    assert np.array_equal(found, EXPERTS)
    for sizes in (None, (3, 2)):
        assert experts.shaped(packed(EXPERTS), sizes, 5, spot, "routed_experts") is None
    first, second = _told(spot)
    assert "20 numbers, 5 rows of 4; it does not say its shape" in first
    assert 'add "routed_experts_shape": [layers, experts a token]' in first
    assert "no multiple of 3 times 2" in second


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["data", "dtype", "shape", "x"]), inner)
        ),
        max_leaves=20,
    )
)
def test_whatever_is_given_gives_routing_or_a_problem(value: Any) -> None:
    spot = Spot(Place("f"), Problems())
    found = experts.routing(value, spot, "r", weights=value, margins=value, layers=value)
    assert value is None or found is not None or spot.problems.listed()


@given(st.binary(max_size=200))
def test_bytes_that_say_they_are_npy(content: bytes) -> None:
    spot = Spot(Place("f"), Problems())
    for start in (b"", b"\x93NUMPY\x01\x00v\x00", npy_start):
        found = experts.npy(start + content, spot, "r")
        assert found is None or found.size * found.itemsize <= len(content)


npy_start = base64.b64decode(npy(EXPERTS))[:60]
