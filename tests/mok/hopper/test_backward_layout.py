"""Sizes of the backward's memory: regions apart, a ring that cannot get stuck, tables that fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mok.hopper import backward_layout, layout
from mok.hopper.backward_layout import (
    choose_backward_segments,
    largest_expert,
    make_backward_layout,
    weight_tiles,
)
from mok.hopper.backward_protocol import Columns, list_segments, order_groups
from mok.hopper.gradient_records import PART_NUMBER
from mok.hopper.layout import BLOCK, Segments, Sizes, make_layout
from mok.hopper.schedule_model import cut_segments

SIZES = st.builds(
    Sizes,
    max_tokens=st.one_of(st.integers(0, 300), st.integers(0, 30000)),
    slots=st.integers(1, 16),
    experts=st.one_of(st.integers(1, 8), st.integers(1, 1024)),
    hidden=st.integers(1, 120).map(lambda n: 64 * n),
    width=st.integers(1, 60).map(lambda n: 64 * n),
    shared_width=st.integers(0, 40).map(lambda n: 64 * n),
    ranks=st.one_of(st.just(1), st.integers(1, 64)),
)
KIMI = Sizes(7168, 8, 48, 7168, 2048)
SEGMENTS = st.one_of(
    st.none(), st.tuples(st.integers(1, 60), st.integers(1, 60)).map(lambda t: Segments(*sorted(t)))
)


@given(SIZES, SEGMENTS)
def test_regions_do_not_overlap_and_bytes_are_their_sum(sizes, segments):
    made = make_backward_layout(make_layout(sizes), segments)
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
    assert made.nbytes == made.local_bytes + made.symmetric_bytes


@given(SIZES, SEGMENTS)
def test_a_region_is_there_when_it_is_needed(sizes, segments):
    made = make_backward_layout(make_layout(sizes), segments)
    peers = {"d_out", "router"} if sizes.ranks > 1 else set()
    assert set(made.symmetric) == {"d_router", *peers}
    wanted = {"d_ring", "x_ring", "d_gate", "d_up", "weighted", "row_weights", "partials"}
    wanted |= {"counters", "segment_of", "used_target", "groups", "peers"}
    if sizes.shared_width:
        wanted |= {"shared_d_x", "shared_d_gate", "shared_d_up", "shared_weighted"}
    assert set(made.local) - {"scratch"} == wanted
    rows = made.ring * BLOCK
    for name, nbytes in {
        "d_ring": 2 * sizes.hidden,
        "x_ring": 2 * sizes.hidden,
        "d_gate": 2 * sizes.width,
        "weighted": 2 * sizes.width,
        "row_weights": 4,
        "partials": sizes.width // 64 * 4,
    }.items():
        assert made.local[name].nbytes == rows * nbytes, name


@given(SIZES, SEGMENTS)
@example(KIMI, None)  # a long ring and no scratch, which is rare among drawn ones
def test_two_neighbouring_segments_fit_into_the_ring_or_all_rows_do(sizes, segments):
    whole = make_layout(sizes)
    made = make_backward_layout(whole, segments)
    if segments is not None:
        assert made.segments == segments
    assert 1 <= made.ring <= whole.max_blocks
    assert made.uncut >= made.segments.most
    longest = max(made.uncut, made.segments.most)
    assert made.ring == whole.max_blocks or 2 * longest <= made.ring
    if "scratch" not in made.local:
        assert made.uncut >= largest_expert(sizes), "an expert could be cut"
    else:
        assert made.uncut < largest_expert(sizes), "scratch that nobody needs"
        tiles = weight_tiles(sizes.hidden, sizes.width)
        assert made.local["scratch"].nbytes == tiles * 32 * 256 * 16


@given(SIZES)
def test_scratch_is_taken_only_where_it_makes_the_memory_smaller(sizes):
    whole = make_layout(sizes)
    made = make_backward_layout(whole)
    ring = min(max(3 * made.segments.most, 2 * largest_expert(sizes)), whole.max_blocks)
    row = sum(
        made.local[name].nbytes
        for name in ("d_ring", "x_ring", "d_gate", "d_up", "weighted", "row_weights", "partials")
    )
    block = row // made.ring
    scratch = made.local["scratch"].nbytes if "scratch" in made.local else 0
    assert made.ring * block + scratch <= ring * block
    if not scratch:
        assert made.ring == ring


@given(st.data())
def test_no_routing_needs_more_groups_than_there_are(data):
    experts, slots = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    ranks, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4000))
    sizes = Sizes(tokens, slots, experts, 64, 64 * data.draw(st.integers(1, 9)), 64, ranks)
    least = data.draw(st.integers(1, 5))
    segments = Segments(least, data.draw(st.integers(least, 7)))
    whole = make_layout(sizes)
    made = make_backward_layout(whole, segments)
    left, rows = sizes.max_rows, []
    for _ in range(experts):
        most = min(left, ranks * tokens)  # a token uses an expert once
        rows.append(data.draw(st.one_of(st.just(most), st.integers(0, most))))
        left -= rows[-1]
    blocks = [-(-count // BLOCK) for count in rows]
    assert max(blocks) <= largest_expert(sizes)
    runs = cut_segments(blocks, segments, made.uncut)
    found = list_segments(rows, runs, BLOCK)
    assert len(found) <= whole.max_blocks
    if made.ring < whole.max_blocks:
        assert all(one.blocks + two.blocks <= made.ring for one, two in pairwise(found))
    if "scratch" not in made.local:
        parts = [portion.part for one in found for portion in one.portions]
        assert not any(part & PART_NUMBER for part in parts), "an expert was cut"
    groups = order_groups(
        found,
        Columns(*7 * [1]),
        saved_blocks=0,
        shared_blocks=1,
        sums=1,
        empty=[expert for expert, count in enumerate(rows) if count == 0],
    )
    assert len(groups) <= made.max_groups
    assert made.local["groups"].nbytes == 32 * made.max_groups


@pytest.mark.parametrize(
    ("sizes", "ring", "uncut", "megabytes"),
    [
        (KIMI, 112, 56, 589),
        (Sizes(7168, 10, 64, 4096, 1024), 144, 56, 417),  # qwen35
        (Sizes(32768, 8, 128, 2048, 768), 186, 93, 326),  # qwen3-30b: sums of one expert are small
        (Sizes(300, 2, 4, 128, 64), 8, 168, 1),
    ],
)
def test_the_memory_of_a_known_shape_is_known(sizes, ring, uncut, megabytes):
    made = make_backward_layout(make_layout(sizes))
    assert (made.ring, made.uncut) == (ring, uncut)
    assert ("scratch" in made.local) == (uncut < largest_expert(sizes))
    assert megabytes - 1 <= made.nbytes / 1e6 <= megabytes + 1


def test_segments_follow_the_columns_of_the_hidden_tiles():
    assert choose_backward_segments(2048) == Segments(20, 28)
    assert choose_backward_segments(64) == Segments(160, 168)
    assert choose_backward_segments(2048, 16) == Segments(16, 16)
    assert backward_layout.hidden_columns(257) == 2


def test_tiles_of_an_experts_weights_cover_all_three():
    assert weight_tiles(256, 128) == 1 + 1 + 2
    assert weight_tiles(7168, 2048) == 3 * 448
    assert weight_tiles(64, 64) == 3
