"""The digest value: adding, printing, parsing, combining; and what it must tell apart."""

import hashlib
import itertools
import math
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.digests import Digest, StateDigest, combine
from verify.hashing import digest_tensor
from verify.lanes import BLOCK, DEFAULT_SEED, block_keys, key_seeds, splitmix64

LANE = st.integers(0, 2**64 - 1)


@st.composite
def digests(draw: st.DrawFn) -> Digest:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    whole = Digest("float32", shape, 0, (0, 0, 0, 0)).numel
    count = draw(st.integers(0, whole))
    name = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "py_int"]))
    return Digest(name, shape, count, draw(st.tuples(LANE, LANE, LANE, LANE)))


@given(digests())
def test_text_is_one_line_and_reads_back(d: Digest) -> None:
    text = str(d)
    assert "\n" not in text
    assert " " not in text
    assert Digest.parse(text) == d


def test_text_of_whole_and_part() -> None:
    part = Digest("bfloat16", (64, 32), 512, (1, 2, 3, 0xABC))
    lanes = "".join(f"{lane:016x}" for lane in part.lanes)
    assert str(part) == f"bfloat16[64,32]{{512}}:{lanes}"
    assert str(Digest("bfloat16", (64, 32), 2048, part.lanes)) == f"bfloat16[64,32]:{lanes}"
    assert str(Digest.zero("bool", ())) == "bool[]{0}:" + "0" * 64
    assert Digest.zero("bool", (0, 4)).whole


@pytest.mark.parametrize(
    "text",
    [
        "",
        "float32[2]",
        "float32[2]:00",
        "float32[2]:" + "g" * 64,
        "float32[2]:" + "A" * 64,
        "float32[2,]:" + "0" * 64,
        "float32[2]{3}:" + "0" * 64,
        "float32[2]:" + "0" * 64 + "\n",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        Digest.parse(text)


@given(st.lists(st.tuples(LANE, LANE, LANE, LANE), min_size=3, max_size=3))
def test_parts_add_in_any_order(lanes: list[tuple[int, int, int, int]]) -> None:
    a, b, c = (Digest("int8", (9,), 3, some) for some in lanes)
    assert (a + b) + c == c + (b + a)
    assert (a + b + c).whole
    assert a + Digest.zero("int8", (9,)) == a


@pytest.mark.parametrize(
    "other",
    [
        Digest("int16", (9,), 1, (0, 0, 0, 0)),
        Digest("int8", (9, 1), 1, (0, 0, 0, 0)),
        Digest("int8", (9,), 7, (0, 0, 0, 0)),
    ],
)
def test_parts_of_other_tensors_or_too_many_are_refused(other: Digest) -> None:
    mine = Digest("int8", (9,), 3, (1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"digests of different|cover more") as caught:
        _ = mine + other
    assert str(mine) in str(caught.value)
    assert str(other) in str(caught.value)


def test_impossible_digests_are_refused() -> None:
    for shape, count, lanes in (
        ((2,), 3, (0, 0, 0, 0)),
        ((2,), -1, (0, 0, 0, 0)),
        ((-1,), 0, (0, 0, 0, 0)),
        ((2,), 2, (0, 0, 0, 2**64)),
        ((2,), 2, (0, 0, 0, -1)),
    ):
        with pytest.raises(ValueError, match="digest"):
            Digest("int8", shape, count, lanes)


def test_combining_depends_on_names_and_digests_but_not_on_order() -> None:
    one, two = Digest("int8", (1,), 1, (1, 0, 0, 0)), Digest("int8", (1,), 1, (2, 0, 0, 0))
    base = combine({"a": one, "b": two})
    assert base == combine({"b": two, "a": one}) == str(StateDigest({"b": two, "a": one}))
    others = [{"a": two, "b": one}, {"a": one}, {"a": one, "c": two}, {"a": one, "b": one}, {}]
    assert len({base, *map(combine, others)}) == 6
    text = str(one).encode()
    frames = b"lanes4x64-v1" + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", len(text)) + text
    assert combine({"a": one}) == hashlib.sha256(frames).hexdigest()


def test_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, verify.digests; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_flipped_bit_changes_every_lane() -> None:
    t = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 64, np.uint8))
    base = digest_tensor(t)
    seen = {base}
    for byte, bit in itertools.product(range(64), range(8)):
        other = t.clone()
        other[byte] ^= 1 << bit
        found = digest_tensor(other)
        assert all(x != y for x, y in zip(found.lanes, base.lanes, strict=True))
        seen.add(found)
    assert len(seen) == 64 * 8 + 1


def test_structured_inputs_do_not_collide() -> None:
    base = torch.arange(1, 25, dtype=torch.float32)
    tensors = [base, base.flip(0), -base, base.sort(descending=False).values.roll(1)]
    for i, j in itertools.combinations(range(24), 2):
        swapped = base.clone()
        swapped[[i, j]] = base[[j, i]]
        tensors.append(swapped)
        negated = base.clone()
        negated[[i, j]] *= -1
        tensors.append(negated)
    for i, j, k in itertools.combinations(range(10), 3):
        moved = base.clone()
        moved[[i, j, k]] += torch.tensor([1.0, -2.0, 1.0])
        tensors.append(moved)
    tensors += [base[torch.tensor([*p, *range(6, 24)])] for p in itertools.permutations(range(6))][
        1:
    ]
    unique = {tuple(t.tolist()) for t in tensors}
    assert len({digest_tensor(t) for t in tensors}) == len(unique)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bfloat16, torch.float64])
def test_constants_differ_by_value_length_shape_and_dtype(dtype: torch.dtype) -> None:
    found = set()
    for value, num in itertools.product((0, 1, 3), (0, 1, 2, 3, 4, 8, 16, 4096, 4100)):
        found.add(digest_tensor(torch.full((num,), value, dtype=dtype)))
    assert len(found) == 3 * 8 + 1
    lengths = {digest_tensor(torch.ones(num, dtype=dtype)).lanes for num in range(1, 200)}
    assert len(lengths) == 199
    shapes = [(12,), (1, 12), (12, 1), (3, 4), (4, 3)]
    assert len({digest_tensor(torch.zeros(s, dtype=dtype)) for s in shapes}) == 5
    assert digest_tensor(torch.zeros(3, dtype=dtype)) != digest_tensor(torch.zeros(3).bool())


def test_zeros_and_nans_are_told_apart() -> None:
    assert digest_tensor(torch.tensor(0.0)) != digest_tensor(torch.tensor(-0.0))
    patterns = torch.tensor([0x7FC00000, -0x400000, 0x7FC00001, 0x7F800001], dtype=torch.int32)
    assert len({digest_tensor(p.view(torch.float32)) for p in patterns}) == 4


def test_compensating_changes_across_blocks_do_not_cancel() -> None:
    rng = np.random.default_rng(7)
    patterns = {
        "rectangle": ((0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1)),
        "second difference": ((0, 0, 1), (0, 1, -2), (0, 2, 1)),
        "second difference of blocks": ((0, 0, 1), (1, 0, -2), (2, 0, 1)),
    }
    base = torch.full((3 * BLOCK,), 1000, dtype=torch.int32)
    want = digest_tensor(base)
    for pattern in patterns.values():
        for _ in range(25):
            step, column = int(rng.integers(1, 1300)), int(rng.integers(0, 1400))
            other = base.clone()
            for block, n, change in pattern:
                other[block * BLOCK + column + n * step] += change
            lanes = digest_tensor(other).lanes
            assert all(x != y for x, y in zip(lanes, want.lanes, strict=True))


def test_keys_are_distinct_and_rectangles_of_keys_do_not_cancel() -> None:
    table = splitmix64(key_seeds(DEFAULT_SEED)[0], 0, BLOCK + 3)
    blocks = block_keys(DEFAULT_SEED, 0, 256)
    assert len(np.unique(table)) == BLOCK + 3
    assert len(np.unique(blocks)) == 256
    assert np.all(blocks % np.uint64(2) == 1)
    keys = (table[None, :] * blocks[:, None]) >> np.uint64(32)
    num = keys.size
    expected = num - num * num / 2 / 2**32  # birthday bound for 32-bit keys
    assert abs(len(np.unique(keys)) - expected) < 6 * math.sqrt(num - expected)
    assert abs(float(keys.mean()) / 2**31 - 1) < 0.01
    signed = keys.astype(np.int64)
    for step in (1, 2, 64, 1000):
        rows = signed[1:] - signed[:-1]
        sums = rows[:, step:] - rows[:, :-step]
        assert np.count_nonzero(sums == 0) == 0
        # for ideal keys a sum is within +-2**12 about 2 * 2**12 / 2**32 of the time
        assert np.count_nonzero(np.abs(sums) < 2**12) < 20
