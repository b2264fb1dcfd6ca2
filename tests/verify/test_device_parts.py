"""What the digest kernel is told: packed parts, read as the kernel reads them, give the digest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_parts import lanes_of

from verify import device_dense, device_parts
from verify.device_dense import pack_wholes
from verify.device_inputs import in_few_parts
from verify.device_kernel import DEFAULT_TUNING
from verify.device_parts import (
    FEW_ROWS,
    MAX_DIMS,
    PART_TILES,
    Axis,
    Geometry,
    PartTable,
    Range,
    Shard,
    lines_of,
    merged,
    parts_of,
)
from verify.errors import UnsupportedError
from verify.hashing import digest_on_host, integer_view

# complex32 is among the dtypes; torch says once per process that it is experimental
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [*device_parts.ITEM_BYTES, torch.complex32, torch.complex64, torch.complex128]
SMALL = Geometry(tile_bytes=1024, gather_bytes=64)  # many tiles of little memory


def lanes(t: torch.Tensor, place: Range | Shard | None = None) -> tuple[int, ...]:
    table = PartTable()
    for part in parts_of(t, place):
        table.add(part, 0)
    packed, num_tiles = table.pack(SMALL)
    return lanes_of(packed, num_tiles, 1, SMALL)[0]


def bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(count).integers(0, top, count * size, np.uint8)
    return torch.from_numpy(raw).view(dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, up to six dimensions, permuted, sliced, expanded, at any offset, conjugated."""
    dtype = draw(st.sampled_from(DTYPES))
    shape: list[int] = []
    for most in draw(st.sampled_from([(), (900,), (3000,), (60, 60), (9, 9, 9), (4,) * 5])):
        shape.append(draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, most)))
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step if draw(st.integers(0, 9)) else 0
        step = step * max(shape[dim], 1) * draw(st.sampled_from([1, 1, 1, 2])) + draw(
            st.sampled_from([0, 0, 0, 3])
        )
    offset = draw(st.integers(0, 5))
    t = bits(offset + step + 1, dtype).as_strided(shape, strides, offset)
    if dtype.is_complex:
        t = t.conj() if draw(st.booleans()) else t
        t = t.imag if draw(st.booleans()) else t
    if dtype.is_floating_point or dtype.is_complex:
        t = torch._neg_view(t) if draw(st.integers(0, 9)) == 0 else t
    return t


@given(tensors())
def test_parts_of_any_tensor_give_its_digest(t: torch.Tensor) -> None:
    assert lanes(t) == digest_on_host(t).lanes


@given(tensors(), st.data())
def test_parts_of_any_shard_give_its_digest(t: torch.Tensor, data: st.DataObject) -> None:
    if t.dim() == 0:
        return
    dim = data.draw(st.integers(0, t.dim() - 1))
    start, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    full = [*t.shape]
    full[dim] += start + behind
    place = Shard(dim, start, tuple(full))
    assert lanes(t, place) == digest_on_host(t, place).lanes


@given(tensors(), st.integers(0, 70))
def test_parts_of_a_range_give_its_digest(t: torch.Tensor, offset: int) -> None:
    place = Range(offset, (offset + t.numel() + 1,))
    assert lanes(t, place) == digest_on_host(t, place).lanes


@given(tensors(), st.integers(1, 400))
def test_groups_have_a_digest_each(t: torch.Tensor, elements: int) -> None:
    parts = parts_of(t)
    if len(parts) != 1:
        return
    item = t.element_size()
    table, count = PartTable(), math.ceil(t.numel() / elements)
    table.add(parts[0], 0, group=min(elements * item, parts[0].num_bytes))
    packed, num_tiles = table.pack(SMALL)
    flat, each = integer_view(t).reshape(-1), (2 if t.is_complex() else 1) * elements
    expected = [
        digest_on_host(flat[at : at + each], Range(at, tuple(flat.shape))).lanes
        for at in range(0, flat.numel(), each)
    ]
    assert lanes_of(packed, num_tiles, count, SMALL) == expected


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_many_tensors_in_one_launch(some: list[torch.Tensor]) -> None:
    table = PartTable()
    for slot, t in enumerate(some):
        for part in parts_of(t):
            table.add(part, slot)
    packed, num_tiles = table.pack(SMALL)
    expected = [digest_on_host(t).lanes for t in some]
    assert lanes_of(packed, num_tiles, len(some), SMALL) == expected


def test_what_lies_together_is_one_contiguous_part() -> None:
    t = torch.zeros(4, 6, 5)
    for view in (t, t.expand(1, 4, 6, 5), t[1:], t[2], t[0, 0, 0], t.unsqueeze(1), t.flatten()):
        (part,) = parts_of(view)
        assert (part.axes, part.num_bytes) == ((), 4 * view.numel())
    assert parts_of(t[:0]) == []
    (part,) = parts_of(t.transpose(0, 1))
    assert [axis.size for axis in part.axes] == [6, 4, 5]
    (part,) = parts_of(t.permute(1, 2, 0))
    assert part.axes == (Axis(30, 1, 30), Axis(4, 30, 4))


def test_axes_merge_up_to_a_cut() -> None:
    axes = [Axis(2, 60, 2), Axis(3, 20, 3), Axis(9, 5, 4), Axis(5, 1, 5), Axis(1, 77, 1)]
    assert merged(axes) == (Axis(6, 20, 6), Axis(45, 1, 20))


def test_few_rows_of_a_shard_are_read_at_full_speed_and_many_in_one_part() -> None:
    few, many = torch.zeros(FEW_ROWS, 100), torch.zeros(FEW_ROWS + 1, 100)
    parts = parts_of(few, Shard(1, 7, (FEW_ROWS, 300)))
    assert len(parts) == FEW_ROWS
    assert all(part.axes == () for part in parts)
    (part,) = parts_of(many, Shard(1, 7, (FEW_ROWS + 1, 300)))
    assert part.axes == (Axis(65, 100, 65), Axis(300, 1, 100))
    assert (part.offset, part.num_bytes) == (28, 4 * (64 * 300 + 100))


def test_more_dimensions_than_a_part_holds_are_several_parts() -> None:
    t = bits(2**12, torch.int16).reshape([2] * 12).permute(*range(11, -1, -1))
    parts = parts_of(t)
    assert len(parts) == 2 ** (12 - MAX_DIMS)
    assert {len(part.axes) for part in parts} == {MAX_DIMS}
    assert lanes(t) == digest_on_host(t).lanes


def test_a_layout_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_parts, "MAX_PARTS", 15)
    t = torch.zeros([2] * 12).permute(*range(11, -1, -1))
    with pytest.raises(UnsupportedError, match=r"would need 16 parts.*t\.contiguous\(\)"):
        parts_of(t)
    assert not in_few_parts(t, None)
    assert in_few_parts(t.contiguous(), None)
    assert in_few_parts(t[:1], None)


def test_lazily_negated_integers_are_refused() -> None:
    negated = torch._neg_view(torch.arange(3))
    with pytest.raises(UnsupportedError, match="resolve_neg"):
        parts_of(negated)
    assert lanes(torch._neg_view(torch.ones(3))) == digest_on_host(-torch.ones(3)).lanes


def test_memory_from_elsewhere_may_be_aligned_to_a_byte() -> None:
    raw = bytearray(bits(8 * 31 + 3, torch.uint8).numpy().tobytes())
    for start in (1, 2, 3):
        for dtype in (torch.int16, torch.float32, torch.float64):
            t = torch.frombuffer(raw, dtype=dtype, count=30, offset=start).view(5, 6).t()
            assert lanes(t) == digest_on_host(t).lanes


def test_layouts_that_do_not_fit_are_refused() -> None:
    t = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"elements 1 \.\. 6 are not all in a tensor"):
        parts_of(t, Range(1, (2, 3)))
    with pytest.raises(ValueError, match="dim 2 is not a dimension"):
        parts_of(t, Shard(2, 0, (2, 3)))
    with pytest.raises(ValueError, match="does not lie in"):
        parts_of(t, Shard(0, 1, (2, 3)))


def test_sizes_beyond_32_bits_are_counted_in_full() -> None:
    table = PartTable()
    table.add_contiguous(256, 3 * 2**32 + 5, 0)
    table.add_contiguous(256, 2**40, 1, offset=2**41 + 8, group=2**20)
    packed, num_tiles = table.pack(DEFAULT_TUNING.geometry)
    first = (3 * 2**32 + 5) // 16384 + 1 + PART_TILES
    assert packed[:, 4].tolist() == [0, first]
    assert packed[1, 1:4].tolist() == [2**41 + 8, 2**40, 2**20]
    assert packed[1, 5] == 2**20 // 16384 + 1, "groups that no tile begins with"
    assert num_tiles == first + 2**20 * (2**20 // 16384 + 1) + PART_TILES


@given(st.lists(st.tuples(st.integers(0, 2**48), st.integers(1, 2**40)), min_size=1, max_size=70))
def test_whole_tensors_are_packed_as_any_others(wholes: list[tuple[int, int]]) -> None:
    table = PartTable()
    for slot, (address, size) in enumerate(wholes):
        table.add_contiguous(address, size, slot)
    packed, num_tiles = table.pack(DEFAULT_TUNING.geometry)
    addresses, sizes = zip(*wholes, strict=True)
    found = pack_wholes(addresses, sizes, DEFAULT_TUNING.geometry)
    assert (found[0].tolist(), found[1]) == (packed.tolist(), num_tiles)
    again, used = pack_wholes(addresses[::-1], sizes, DEFAULT_TUNING.geometry), found[0].copy()
    used.fill(7)
    found = pack_wholes(addresses, sizes, DEFAULT_TUNING.geometry, used)
    assert found[0] is used
    assert (used.tolist(), found[1]) == (packed.tolist(), num_tiles), "whatever was kept"
    assert again[0][:, 0].tolist() == list(addresses[::-1])


@given(st.lists(tensors(), min_size=1, max_size=3))
def test_parts_are_packed_into_memory_that_held_something_else(some: list[torch.Tensor]) -> None:
    table = PartTable()
    for slot, t in enumerate(some):
        for part in parts_of(t):
            table.add(part, slot)
    packed, num_tiles = table.pack(SMALL)
    rows = np.full(packed.shape, 2**64 - 1, np.uint64)
    found = table.pack(SMALL, rows)
    assert found[0] is rows
    assert (rows.tolist(), found[1]) == (packed.tolist(), num_tiles)


def test_tensors_of_two_devices_are_not_dense_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.zeros(3), torch.zeros(4)
    elsewhere = {id(second): 1}

    class Placed(torch.Tensor):
        @staticmethod
        def get_device(t: torch.Tensor) -> int:  # type: ignore[override]
            return elsewhere.get(id(t), first.get_device())

    monkeypatch.setattr(device_dense, "_ON_CUDA", lambda t: True)
    monkeypatch.setattr(device_dense, "Tensor", Placed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_dense.dense_memory((first, second)) is None
    elsewhere.clear()
    found = device_dense.dense_memory((first, second))
    assert found is not None
    assert (found.sizes, found.addresses) == ((12, 16), [first.data_ptr(), second.data_ptr()])
    for other in (torch.zeros(3, 4).t(), torch.zeros(0), torch._neg_view(torch.ones(2))):
        assert device_dense.dense_memory((first, other)) is None


def test_plans_of_very_many_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_dense, "KEPT_PARTS", 2)
    kept = device_dense._kept.cache_info().currsize
    packed, num_tiles = pack_wholes([256, 512, 1024], (5, 6, 7), DEFAULT_TUNING.geometry)
    assert device_dense._kept.cache_info().currsize == kept
    assert packed[:, 7].tolist() == [0, 1, 2]
    assert num_tiles == 3 * (1 + PART_TILES)


def test_the_model_sees_bytes_that_are_missed_or_taken_twice() -> None:
    t = bits(3000, torch.float32)
    table = PartTable()
    for part in parts_of(t):
        table.add(part, 0)
    packed, num_tiles = table.pack(SMALL)
    with pytest.raises(AssertionError, match="end too early"):
        lanes_of(packed, num_tiles - 1, 1, SMALL)
    packed[0, 5] -= 1
    with pytest.raises(AssertionError):
        lanes_of(packed, num_tiles, 1, SMALL)


def test_memory_is_visited_in_its_own_order_where_that_is_another() -> None:
    t = torch.zeros(5, 30, 70)
    (part,) = parts_of(t.transpose(1, 2))  # 5 x 70 x 30, of which the 70 are neighbours
    lines = lines_of(part)
    assert lines is not None
    assert (lines.lines, lines.num_bytes, lines.quads) == (70, 30 * 4, 8)
    assert lines.visits == 5 * 70 * 8
    (part,) = parts_of(t.transpose(1, 2), Shard(0, 1, (7, 70, 30)))
    assert lines_of(part) == lines, "begins at a multiple of 16"
    (part,) = parts_of(t.bfloat16().transpose(0, 2), Range(3, (20000,)))
    lines = lines_of(part)
    assert lines is not None
    assert (lines.lines, lines.quads) == (70, 20), (
        "the first line has a quad that it does not begin"
    )
    for plain in (t[:, :9, :60], t[..., ::2], t[:3, 0, :2].t(), t[0, 0, :1].expand(9, 9)):
        (part,) = parts_of(plain)
        assert part.axes
        assert lines_of(part) is None


def test_groups_are_visited_in_the_order_of_the_whole() -> None:
    (part,) = parts_of(torch.zeros(64, 64).t())
    table = PartTable()
    table.add(part, 0)
    table.add(part, 1, group=1024)
    packed, _ = table.pack(SMALL)
    assert packed[:, 27].tolist() == [64, 0]
