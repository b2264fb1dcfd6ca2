"""Bitwise comparison: what is equal, what is counted, and what is said about it."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.comparison import (
    Comparison,
    compare,
    differing,
    tile_map,
    ulp_distance,
    ulp_histogram,
)
from verify.errors import UnsupportedError

SMALL_FLOATS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
DTYPES = [
    *SMALL_FLOATS,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def _f32(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 4), (2, 3, 4)):
        a = torch.ones(shape).to(dtype)
        same = compare(a, a.clone(), "t")
        assert same.equal
        assert same.value_equal
        assert same.num_differing == 0
        b = a.clone()
        last = tuple(size - 1 for size in shape)
        b[last] = torch.tensor(0.5 if dtype is torch.float8_e8m0fnu else 0.0).to(dtype)
        found = compare(a, b, "t")
        assert not found.equal
        assert (found.num_differing, found.first, found.numel) == (1, last, math.prod(shape))
        assert found.bits is not None
        assert found.bits[0] != found.bits[1]
        json.dumps(found.to_json(), allow_nan=False)
    assert compare(a[:, :0], a[:, :0]).describe() == ["tensor: 0 elements compared"]


def test_strides_are_no_difference() -> None:
    a = torch.arange(24.0).reshape(4, 6)
    assert compare(a.t(), a.t().contiguous()).equal
    assert compare(torch.ones(1).expand(5), torch.ones(5)).equal
    assert compare(torch.ones(1).expand(5), torch.ones(5).mul(2)).num_differing == 5
    z = torch.randn(3, dtype=torch.complex64)
    assert compare(z.conj(), z.conj().resolve_conj()).equal


def test_special_values_are_classified() -> None:
    nan, other_nan, inf = 0x7FC00000, 0xFFC00001, 0x7F800000
    a = _f32(nan, nan, 0, inf, inf, nan, 0x3F800000, 0, inf)
    b = _f32(nan, other_nan, 0x80000000, 0xFF800000, 0x3F800000, inf, 0x3F800003, 2, inf)
    found = compare(a, b, "x")
    assert found.classes == {
        "signed_zero": 1,
        "finite": 2,
        "inf_vs_finite": 1,
        "inf_sign": 1,
        "nan_vs_value": 1,
        "nan_payload": 1,
    }
    assert (found.num_differing, found.num_nan_equal, found.max_ulp) == (7, 1, 3)
    assert found.first == (1,)
    assert found.bits == ("0x7fc00000", "0xffc00001")
    text = "\n".join(found.describe())
    assert "NaN payload (both NaN)" in text
    assert "-0.0 vs 0.0 (value-equal, sign bit)" in text
    assert "1 NaN in both" in text
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["values"] == ["nan", "nan"]


def test_signs_of_zeros_alone_are_value_equal() -> None:
    found = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "z")
    assert not found.equal
    assert found.value_equal
    assert found.max_ulp == 0
    assert not compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 2.0])).value_equal
    assert "first: z[0] 0.0 (0x00000000) vs -0.0 (0x80000000), 0 ulp" in found.describe()


def test_equal_nans_are_equal_and_counted() -> None:
    a = torch.tensor([math.nan, 1.0, math.nan])
    found = compare(a, a.clone(), "a")
    assert found.equal
    assert found.describe() == ["a: equal bits, 3 elements, 2 NaN in both (same bits)"]
    eighth = torch.tensor([0x7F, 0x01, -1], dtype=torch.int8).view(torch.float8_e4m3fn)
    assert compare(eighth, eighth.clone()).num_nan_equal == 2
    whole = torch.full((4,), math.nan)
    assert compare(torch.ones(4), whole).classes == {"nan_vs_value": 4}


def test_dtype_shape_and_layout_are_findings() -> None:
    a = torch.tensor([1.5, 2.0])
    cast = compare(a.bfloat16(), a, "w")
    assert cast.describe() == ["w: dtype bfloat16 vs float32 (values equal after cast)"]
    assert not cast.equal
    assert cast.value_equal
    assert "after cast" not in compare(a.bfloat16(), a + 2**-20, "w").problem
    assert compare(torch.zeros(3), torch.zeros(3, 1)).problem == "shape (3,) vs (3, 1)"
    assert not compare(torch.zeros(0, 4), torch.zeros(4, 0)).equal
    assert "layout" in compare(torch.eye(2), torch.eye(2).to_sparse()).problem
    with pytest.raises(UnsupportedError, match="takes tensors"):
        compare(a, [1.0, 2.0])
    with pytest.raises(UnsupportedError, match="to_dense"):
        compare(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())


def test_describe_names_everything() -> None:
    a = torch.zeros(10, 10)
    a[3, 7] = 0.5
    b = a.clone()
    b[3, 7] = math.nextafter(0.5, 1) + 2**-24
    b[9] = 1.0
    lines = compare(a, b, "out").describe()
    assert lines[0].startswith("out: 11 of 100 elements differ (11 %)")
    assert lines[1] == "first: out[3,7] 0.5 (0x3f000000) vs 0.5000000596046448 (0x3f000001), 1 ulp"


def test_complex_numbers_are_pairs() -> None:
    a = torch.tensor([1 + 2j, 3 + 4j, complex(0.0, 1.0)])
    b = torch.tensor([1 + 2j, 3 + 5j, complex(-0.0, 1.0)])
    found = compare(a, b)
    assert (found.num_differing, found.first) == (2, (1,))
    assert found.classes == {"signed_zero": 1, "finite": 1}
    assert found.bits == ("0x40400000,0x40800000", "0x40400000,0x40a00000")
    assert found.to_json()["values"] == ["(3+4j)", "(3+5j)"]


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_ulp_and_classes_of_every_pair_of_an_8_bit_format(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    t = bits.view(dtype)
    value = t.double()
    order = sorted(set(value[value.isfinite()].tolist()))
    rank = {v: n for n, v in enumerate(order)}
    far = ulp_distance(t[:, None].expand(256, 256), t[None, :].expand(256, 256))
    for i, j in itertools.product(range(256), repeat=2):
        x, y = float(value[i]), float(value[j])
        finite = math.isfinite(x) and math.isfinite(y)
        assert int(far[i, j]) == (abs(rank[x] - rank[y]) if finite else -1)
    found = compare(t, bits.flip(0).view(dtype))
    assert sum(found.classes.values()) == found.num_differing == 256


@given(st.floats(), st.floats())
def test_ulp_of_float64_counts_numbers_between(x: float, y: float) -> None:
    far = int(ulp_distance(torch.tensor(x).double(), torch.tensor(y).double()))
    a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    far = int(ulp_distance(a, b))
    assert far == int(ulp_distance(b, a))
    if not (math.isfinite(x) and math.isfinite(y)):
        assert far == -1
    elif x == y:
        assert far == 0
    else:
        steps = math.nextafter(x, y)
        rest = int(ulp_distance(torch.tensor(steps, dtype=torch.float64), b))
        assert far == min(rest + 1, 2**63 - 1)
        assert far > 0


def test_ulp_saturates_and_refuses() -> None:
    top = torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64)
    assert int(ulp_distance(-top, top)) == 2**63 - 1
    with pytest.raises(ValueError, match="no float"):
        ulp_distance(torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="shape"):
        ulp_distance(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="dtype"):
        differing(torch.ones(2), torch.ones(2).half())


def test_ulp_histogram() -> None:
    a = torch.ones(8, dtype=torch.float32)
    steps = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9], dtype=torch.int32)
    b = (a.view(torch.int32) + steps).view(torch.float32)
    want = {"0": 1, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 1}
    assert ulp_histogram(a, b) == want
    b[0] = math.nan
    del want["0"]
    assert ulp_histogram(a, b) == {**want, "not finite": 1}


@given(
    shape=st.lists(st.integers(1, 40), min_size=0, max_size=3),
    seed=st.integers(0, 100),
    side=st.integers(1, 16),
)
def test_tile_map_counts_every_difference_once(shape: list[int], seed: int, side: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    found = tile_map(mask, side)
    assert sum(map(sum, found.counts)) == int(mask.sum())
    for tiles, size, tile in zip(
        (len(found.counts), len(found.counts[0])), found.shape, found.tile, strict=True
    ):
        assert tiles <= side
        assert tiles == -(-size // tile)
        assert tile & (tile - 1) == 0


def test_tile_map_places() -> None:
    mask = torch.zeros(2, 64, 100, dtype=torch.bool)
    mask[1, 40:, 99] = True
    found = compare(torch.zeros(mask.shape), mask.float()).tiles
    assert found is not None
    assert found.tile == (4, 8)
    assert [row[12] for row in found.counts] == [0] * 10 + [4] * 6
    assert tile_map(mask[:0]).counts == ()


@given(data=st.data())
def test_counts_and_first_are_right(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    num = math.prod(shape)
    flags = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
    mask = torch.tensor(flags).reshape(shape)
    a = torch.arange(num, dtype=torch.bfloat16).reshape(shape)
    found = compare(a, torch.where(mask, -a - 1, a))
    assert found.num_differing == int(mask.sum())
    assert isinstance(found, Comparison)
    if found.first is not None:
        assert list(found.first) == torch.nonzero(mask)[0].tolist()


@pytest.mark.parametrize("dtype", [*SMALL_FLOATS, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("block", [3, 1 << 22])
def test_buckets_are_those_of_the_distances(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.comparison._BLOCK", block)
    generator = torch.Generator().manual_seed(3)
    size = 16 if dtype.is_complex else dtype.itemsize
    raw = [
        torch.randint(0, 256, (40 * size,), dtype=torch.uint8, generator=generator) for _ in "ab"
    ]
    raw[1][: 10 * size] = raw[0][: 10 * size]
    a, b = (one.view(dtype) for one in raw)
    for only in (False, True):
        want: dict[str, int] = {}
        kept = differing(a, b) if only else torch.ones(len(a), dtype=torch.bool)
        for far in ulp_distance(a, b)[kept].reshape(-1).tolist():
            top = 1 << max(far - 1, 0).bit_length()
            label = str(far) if far <= 2 else f"{top // 2 + 1}-{top}"
            label = "not finite" if far < 0 else label
            want[label] = want.get(label, 0) + 1
        assert ulp_histogram(a, b, differing_only=only) == want


def test_the_ulp_histogram_of_what_differs_counts_zeros_of_opposite_sign() -> None:
    a, b = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([-0.0, 0.0, 1.0])
    assert ulp_histogram(a, b, differing_only=True) == {"0": 1}
    assert ulp_histogram(a, a, differing_only=True) == {}
    with pytest.raises(ValueError, match="no float"):
        ulp_histogram(a.int(), a.int())
