"""Inputs: Philox's known answers, bits that do not move, exact values, refusals."""

import hashlib
import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.errors import CaseError
from verify.hashing import digest_tensor
from verify.inputs import (
    TensorSpec,
    generate,
    integers,
    materialise,
    normal,
    permutation,
    philox4x32,
    uniform,
)

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("0" * 32, "0" * 16, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("f" * 32, "f" * 16, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, answer: str) -> None:
    words = [int(counter[at : at + 8], 16) for at in range(0, 32, 8)]
    keys = int(key[:8], 16), int(key[8:], 16)
    found = philox4x32(np.array([words, words]), keys)
    for row in found.tolist():
        assert " ".join(f"{word:08x}" for word in row) == answer


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_exact_and_spread_as_said(dtype: torch.dtype, kind: str) -> None:
    t = generate("x", (40000,), dtype, kind=kind)
    x = t.to(torch.float64)
    assert torch.equal(x.to(dtype).to(torch.float64), x)
    assert bool(x.isfinite().all())
    assert not bool(((x == 0) & x.signbit()).any())
    want = 1.0 if kind == "normal" else (1 / 3) ** 0.5
    assert abs(float(x.std()) / want - 1) < 0.1
    assert float(x.abs().max()) <= (5.01 if kind == "normal" else 1.0)
    assert len(x.unique()) >= 16
    if kind == "normal":
        assert abs(float(x.mean())) < 0.02
    else:
        assert float(x.max()) < 1.0


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_scale_is_a_power_of_two_and_exact(dtype: torch.dtype) -> None:
    base = generate("x", (1000,), dtype).double()
    for scale in (0.25, 2.0, 64.0):
        assert torch.equal(generate("x", (1000,), dtype, scale=scale).double(), base * scale)


def test_small_scales_stay_exact_on_the_subnormal_grid() -> None:
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        tiny = torch.finfo(dtype).smallest_normal
        x = generate("x", (2000,), dtype, scale=tiny).double()
        assert torch.equal(x.to(dtype).double(), x)
        assert not bool(((x == 0) & x.signbit()).any())
        assert 0.5 * tiny < float(x.std()) < 1.5 * tiny


PRECISION = dict(zip(FLOATS, (53, 24, 11, 8, 4, 3, 4, 3), strict=True))
LOWEST = dict(zip(FLOATS, (-1074, -149, -24, -133, -9, -16, -10, -17), strict=True))


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_coarser_dtype_is_the_finer_one_truncated(dtype: torch.dtype, kind: str) -> None:
    fine = generate("x", (5000,), torch.float64, kind=kind).numpy()
    fraction, exponent = np.frexp(fine)
    bits = np.minimum(PRECISION[dtype], exponent - LOWEST[dtype])
    want = np.ldexp(np.trunc(np.ldexp(fraction, bits)), exponent - bits)
    found = generate("x", (5000,), dtype, kind=kind).double().numpy()
    assert np.array_equal(found, want)


def test_sums_depend_on_the_order() -> None:
    """Values on a fixed grid would add exactly, and hide an unordered sum."""
    for kind, dtype in itertools.product(("normal", "uniform"), (torch.float32, torch.float64)):
        x = generate("x", (4000,), dtype, kind=kind).reshape(4, 1000)
        forward, backward = ((x[0] + x[1]) + x[2]) + x[3], x[0] + (x[1] + (x[2] + x[3]))
        assert float((forward != backward).double().mean()) > 0.1
    wide = generate("x", (5000,), torch.float64)
    assert float((wide.float().double() != wide).double().mean()) > 0.99


@given(num=st.integers(0, 300), kind=st.sampled_from(["normal", "uniform", "integers"]))
def test_a_longer_tensor_begins_with_the_shorter_one(num: int, kind: str) -> None:
    bounds = {"low": -8, "high": 8} if kind == "integers" else {}
    long = generate("x", (20000,), kind=kind, **bounds)
    assert torch.equal(generate("x", (num,), kind=kind, **bounds), long[:num])
    assert torch.equal(generate("x", (4, 5), kind=kind, **bounds), long[:20].reshape(4, 5))


def test_names_seeds_and_kinds_give_unrelated_tensors() -> None:
    base = generate("x", (1000,))
    for other in (generate("y", (1000,)), generate("x", (1000,), seed=1)):
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.15
    assert torch.equal(base, generate("x", (1000,)))
    order = torch.argsort(base)
    assert not torch.equal(order, torch.argsort(generate("x", (1000,), kind="uniform")))


def test_global_random_state_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    first = generate("x", (10,))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    assert torch.equal(first, generate("x", (10,)))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_fill_their_range(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    t = generate("i", (2000,), dtype, kind="integers", low=limits.min, high=limits.max + 1)
    low, high = min(t.tolist()), max(t.tolist())
    span = limits.max - limits.min
    assert low < limits.min + span / 50
    assert high > limits.max - span / 50
    small = generate("i", (4000,), dtype, kind="integers", low=3, high=8)
    counts = np.bincount(small.tolist())
    assert counts[:3].sum() == 0
    assert counts.sum() == 4000
    assert np.all(np.abs(counts[3:8] - 800) < 150)


def test_integers_in_bool_and_float_dtypes() -> None:
    assert set(generate("b", (100,), torch.bool, kind="integers").tolist()) == {False, True}
    x = generate("f", (500,), torch.bfloat16, kind="integers", low=-256, high=257)
    assert torch.equal(x, x.round())
    assert not bool(((x == 0) & x.signbit()).any())


def test_integers_match_exact_arithmetic() -> None:
    from verify.inputs import _mulhi

    words = np.array([0, 1, 2**64 - 1, 0x123456789ABCDEF0, 2**63], np.uint64)
    for n in (1, 3, 2**32 - 1, 2**32, 2**53 + 1, 2**64 - 1, 2**64):
        assert _mulhi(words, n).tolist() == [word * n >> 64 for word in words.tolist()]


def test_permutations() -> None:
    t = generate("p", (1000,), torch.int64, kind="permutation")
    assert sorted(t.tolist()) == list(range(1000))
    assert not torch.equal(t, torch.arange(1000))
    assert materialise(permutation(0), "p").tolist() == []


def test_complex_parts_are_drawn_separately() -> None:
    for dtype in (torch.complex64, torch.complex128):
        z = generate("z", (5000,), dtype)
        parts = torch.stack([z.real, z.imag])
        assert torch.allclose(
            parts.double().std(dim=1), torch.ones(2, dtype=torch.float64), atol=0.1
        )
        assert abs(float(torch.corrcoef(parts)[0, 1])) < 0.1


def slow_words(name: str, kind: str, seed: int, index: int) -> list[int]:
    text = f"mok-verify inputs 1\0{kind}\0{seed}\0{name}".encode()
    k0, k1 = struct.unpack("<II", hashlib.sha256(text).digest()[:8])
    c = [index % 2**32, index >> 32, 0, 0]
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right >> 32 ^ c[1] ^ k0, right % 2**32, left >> 32 ^ c[3] ^ k1, left % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def test_equals_a_slow_reference_in_python_integers() -> None:
    found = generate("r", (40,), torch.float32, seed=9).tolist()
    flat = generate("r", (40,), torch.bfloat16, seed=9, kind="uniform", low=-3, high=4).tolist()
    whole = generate("r", (40,), torch.int64, seed=9, kind="integers", low=-7, high=1000).tolist()
    for at in range(40):
        w = slow_words("r", "normal", 9, at)
        units = 5 * (2 * sum((x & 0xFFFF) + (x >> 16) for x in w) - 8 * 0xFFFF) << 40
        mixed = (w[0] << 32 | w[1]) * 0x9E3779B97F4A7C15 ^ (w[2] << 32 | w[3]) * 0xD1342543DE82EF95
        units += mixed % 2**64 >> 24
        drop = max(abs(units).bit_length() - 24, 0)
        assert found[at] == math.copysign((abs(units) >> drop << drop) / 2**59, units)
        w = slow_words("r", "uniform", 9, at)
        units = ((w[0] << 32 | w[1]) * (7 << 58) >> 64) - (3 << 58)
        drop = max(abs(units).bit_length() - 8, 0)
        assert flat[at] == math.copysign((abs(units) >> drop << drop) / 2**58, units)
        w = slow_words("r", "integers", 9, at)
        assert whole[at] == ((w[0] << 32 | w[1]) * 1007 >> 64) - 7


def test_bits_are_the_same_everywhere() -> None:
    """Digests taken once; they must be equal on every machine and version."""
    found = {
        "normal": digest_tensor(generate("golden", (1000,), torch.float32)),
        "normal64": digest_tensor(generate("golden", (1000,), torch.float64, seed=3)),
        "uniform": digest_tensor(generate("golden", (1000,), torch.bfloat16, kind="uniform")),
        "integers": digest_tensor(materialise(integers(1000, low=-5, high=100), "golden")),
        "permutation": digest_tensor(materialise(permutation(1000), "golden", 2)),
    }
    assert {name: f"{d.lanes[0]:016x}" for name, d in found.items()} == GOLDEN


def test_specs() -> None:
    spec = normal(3, 4, dtype=torch.bfloat16, scale=0.5, requires_grad=True)
    assert spec == TensorSpec((3, 4), torch.bfloat16, "normal", None, None, 0.5, True)
    t = materialise(spec, "w", seed=2)
    assert t.is_leaf
    assert t.requires_grad
    assert t.is_contiguous()
    assert torch.equal(t.detach(), generate("w", (3, 4), torch.bfloat16, seed=2, scale=0.5))
    u = materialise(uniform(2000, low=-2, high=6), "u")
    assert -2 <= float(u.min()) < -1.9
    assert 5.9 < float(u.max()) < 6
    assert materialise(normal(), "s").shape == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.3}, "no power of two"),
        ({"scale": 0.0}, "no power of two"),
        ({"scale": float("inf")}, "no power of two"),
        ({"scale": 2.0**14, "dtype": torch.float16}, "values"),
        ({"scale": 2.0**-20, "dtype": torch.float16}, "scale must be"),
        ({"low": 0, "high": 1}, "no bounds"),
        ({"dtype": torch.int32}, "not made here"),
        ({"dtype": torch.float8_e8m0fnu}, "not made here"),
        ({"kind": "poisson"}, "allowed: normal"),
        ({"kind": "integers"}, "need bounds"),
        ({"kind": "integers", "low": 3, "high": 3}, "need bounds"),
        ({"kind": "integers", "low": 0, "high": 300, "dtype": torch.bfloat16}, "not all exact"),
        ({"kind": "integers", "low": -1, "high": 3, "dtype": torch.uint8}, "not all exact"),
        ({"kind": "integers", "low": 0, "high": 3, "scale": 2.0}, "no scale"),
        ({"kind": "permutation", "dtype": torch.int8}, "not all exact"),
        ({"kind": "permutation", "shape": (2, 3)}, "one size"),
        ({"kind": "uniform", "low": 0, "high": 2**30}, "not all exact"),
    ],
)
def test_what_cannot_be_exact_is_refused(arguments: dict[str, object], message: str) -> None:
    given = {"shape": (1000,), **arguments}
    with pytest.raises(CaseError, match=message):
        generate("x", **given)


GOLDEN = {
    "integers": "40c18ff07d643c22",
    "normal": "761ffc21fe15265a",
    "normal64": "0087201471dacf05",
    "permutation": "0003cb7dfd84860c",
    "uniform": "5e68d6890efb0d7e",
}
