"""Sizes of a workspace: regions apart, bytes as announced, rings that cannot get stuck."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.errors import InputError
from mok.hopper import layout
from mok.hopper.layout import BLOCK, Segments, Sizes, choose_segments, make_layout

SIZES = st.builds(
    Sizes,
    max_tokens=st.integers(0, 3000),
    slots=st.integers(1, 16),
    experts=st.integers(1, 1024),
    hidden=st.integers(1, 120).map(lambda n: 64 * n),
    width=st.integers(1, 60).map(lambda n: 64 * n),
    shared_width=st.integers(0, 40).map(lambda n: 64 * n),
    ranks=st.integers(1, 64),
)


@given(SIZES)
def test_regions_do_not_overlap_and_bytes_are_their_sum(sizes):
    made = make_layout(sizes)
    total = 0
    for regions, nbytes in (
        (made.local, made.local_bytes),
        (made.symmetric, made.symmetric_bytes),
    ):
        end = 0
        for region in regions.values():
            assert region.offset % layout.REGION_ALIGNMENT == 0
            assert region.nbytes > 0
            assert end <= region.offset < end + layout.REGION_ALIGNMENT
            end = region.offset + region.nbytes
        assert end <= nbytes < end + layout.REGION_ALIGNMENT
        total += nbytes
    assert made.nbytes == total
    assert ("x" in made.symmetric) == (sizes.ranks > 1)
    assert ("shared_y" in made.local) == (sizes.shared_width > 0)
    cleared = ("counters", "groups", "blocks", "expert_rows", "peers", "counts", "routes")
    for name in cleared:
        assert made.local[name].offset + made.local[name].nbytes <= made.control


@given(SIZES, st.one_of(st.none(), st.integers(1, 200)))
def test_rings_hold_what_the_order_of_tickets_needs(sizes, wanted):
    segments = choose_segments(sizes.width, wanted)
    made = make_layout(sizes, segments)
    assert segments.least <= segments.most
    for ring, times in ((made.ring_x, 2), (made.ring_h, 3)):
        assert ring == min(times * segments.most, made.max_blocks)
    assert made.local["x_ring"].nbytes == made.ring_x * BLOCK * sizes.hidden * 2
    assert made.local["hidden"].nbytes == made.ring_h * BLOCK * sizes.width * 2


def _segments(blocks: list[int], segments: Segments) -> int:
    """Segments of a routing, as `enter` makes them."""
    count = held = 0
    for number in blocks:
        if number > segments.most:
            count += (held > 0) + -(-number // segments.most)
            held = 0
            continue
        if held + number > segments.most:
            count, held = count + 1, 0
        held += number
        if held >= segments.least:
            count, held = count + 1, 0
    return count + (held > 0)


@given(st.data())
def test_no_routing_needs_more_blocks_or_groups_than_there_are(data):
    experts = data.draw(st.integers(1, 12))
    slots = data.draw(st.integers(1, 4))
    ranks = data.draw(st.integers(1, 3))
    tokens = data.draw(st.integers(0, 700))
    sizes = Sizes(tokens, slots, experts, 64, 64 * data.draw(st.integers(1, 9)), 0, ranks)
    segments = choose_segments(sizes.width, data.draw(st.one_of(st.none(), st.integers(1, 9))))
    made = make_layout(sizes, segments)
    left, rows = sizes.max_rows, []
    for _ in range(experts):
        most = min(left, ranks * tokens)  # a token uses an expert once
        rows.append(data.draw(st.one_of(st.just(most), st.integers(0, most))))
        left -= rows[-1]
    blocks = [-(-count // BLOCK) for count in rows]
    assert sum(blocks) <= made.max_blocks
    assert 2 * _segments(blocks, segments) + 4 <= made.max_groups
    assert made.max_chunks == ranks * max(1, -(-tokens // BLOCK))
    if ranks == 1:
        assert BLOCK * sum(blocks) <= layout.saved_rows(tokens, sizes)


@given(SIZES)
def test_saved_rows_are_whole_blocks_and_never_more_than_can_come(sizes):
    rows = layout.saved_rows(sizes.max_tokens, sizes)
    assert rows % BLOCK == 0
    if sizes.ranks > 1:
        assert rows <= BLOCK * layout.bound_blocks(sizes.max_rows, sizes.experts)


def test_several_ranks_save_what_a_balanced_routing_brings_and_a_quarter_more():
    sizes = Sizes(7168, 8, 48, 7168, 2048, ranks=8)
    balanced = 7168 * 8
    rows = layout.saved_rows(7168, sizes)
    assert 1.25 * balanced <= rows <= 1.25 * (balanced + 48 * 128) + 128


def test_the_memory_of_a_known_shape_is_known():
    made = make_layout(Sizes(7168, 8, 48, 7168, 2048))
    assert (made.segments.least, made.segments.most) == (10, 24)
    assert (made.ring_x, made.ring_h) == (48, 72)
    assert made.max_blocks == (7168 * 8 + 48 * 127) // 128
    large = 7168 * 8 * 7168 * 2 + 48 * 128 * 7168 * 2 + 72 * 128 * 2048 * 2
    assert large <= made.nbytes <= large + 2**20


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden": 96}, "H = 96"),
        ({"width": 0}, "I = 0"),
        ({"shared_width": 100}, "shared expert's I = 100"),
        ({"slots": 17}, "K = 17"),
        ({"experts": 1025}, "E = 1025"),
        ({"ranks": 65}, "ranks = 65"),
        ({"max_tokens": -1}, "T = -1"),
        ({"max_tokens": 2**22}, "T K = 33554432"),
    ],
)
def test_sizes_that_the_kernels_cannot_run_are_refused(change, told):
    good = Sizes(100, 8, 8, 64, 64, 64, 2)
    with pytest.raises(InputError, match=told):
        dataclasses.replace(good, **change)


def test_segments_have_an_order():
    with pytest.raises(InputError, match="1 <= least <= most"):
        Segments(3, 2)
    assert choose_segments(2048, 16) == Segments(10, 16)
    assert choose_segments(2048, 1) == Segments(8, 8)
    assert choose_segments(64) == Segments(160, 168)


def test_the_tables_of_saved_rows_take_symbolic_sizes():
    assert layout.one_rank_saved_rows(100, 2, 3) == (200 + 3 * 127) // 128 * 128
    assert isinstance(layout.one_rank_saved_rows(torch.Size([5])[0], 2, 3), int)


def test_experts_that_can_have_no_row_need_no_block() -> None:
    assert layout.one_rank_saved_rows(1, 8, 384) == 8 * BLOCK
    assert layout.one_rank_saved_rows(0, 8, 384) == 0
