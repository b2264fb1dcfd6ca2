"""The ctypes records have the layout of csrc/moe/rank.cuh: names, order, offsets, constants."""

from __future__ import annotations

import ctypes
import shutil

import pytest
from header_layouts import compiled_layout, defines, fields, layout_of, own_fields

from mok.hopper import records
from mok.kernel_sources import read_source

HEADER = "moe/rank.cuh"
STRUCTURES = (
    records.TensorMap,
    records.Group,
    records.Peer,
    records.Failure,
    records.Rank,
)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.__name__)
def test_fields_have_the_names_and_the_order_of_the_header(structure):
    assert own_fields(structure) == fields(HEADER, structure.__name__)


def test_constants_are_those_of_the_header():
    found = dict(defines(read_source(HEADER)))
    shared = {name for name in found if hasattr(records, name)}
    assert {name: getattr(records, name) for name in shared} == {n: found[n] for n in shared}
    assert {"BLOCK", "MAX_RANKS", "PADDING", "COUNTER_HEAD", "PLAN_BAD", "FLAGS"} <= shared
    waits = {name: value for name, value in found.items() if name.startswith("WAIT_")}
    assert {words[0]: value for value, words in records.WAITS.items()} == waits


def test_sizes_of_a_launch_are_those_of_the_pipeline():
    text = read_source("moe/pipeline.cuh")
    found = dict(defines(text))
    assert found["THREADS"] == records.THREADS
    stages = found["STAGES"] * (found["A_BYTES"] + found["B_BYTES"])
    staging = found["CONSUMER_WARPS"] * found["STAGING"]
    assert stages + staging + 1024 == records.SHARED_BYTES
    assert "STAGES * STAGE_BYTES + CONSUMER_WARPS * STAGING + 1024" in text


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiler_sees_the_same_sizes_and_offsets(tmp_path):
    assert compiled_layout([HEADER], STRUCTURES, tmp_path) == layout_of(STRUCTURES)


def test_a_rank_keeps_what_it_is_given_and_its_array_is_aligned():
    encoded = bytes(range(128))
    rank = records.Rank(tokens=7, limit=2.5, counters=0x1234, timeout=10**12)
    rank.shared_down = records.tensor_map(encoded)
    again = records.Rank.from_buffer_copy(records.table([rank, rank]), ctypes.sizeof(rank))
    assert (again.tokens, again.limit, again.counters, again.timeout) == (7, 2.5, 0x1234, 10**12)
    assert bytes(again.shared_down) == encoded
    assert bytes(again.gate) == bytes(128)
    assert ctypes.sizeof(records.Rank) % 64 == 0


def test_a_map_of_another_length_is_refused():
    with pytest.raises(ValueError, match="128 bytes, not 3"):
        records.tensor_map(b"abc")


def test_a_failed_wait_is_told_in_words_and_none_is_none():
    assert records.failed_wait(bytes(32)) is None
    record = records.Failure(state=1, what=2, index=3, rank=1, seen=4, wanted=5, cta=6)
    told = records.failed_wait(bytes(record))
    assert str(told) == (
        "rank 1 waited in vain for rank 3 to enter the launch (wanted 5, seen 4, CTA 6)"
    )
    unknown = records.failed_wait(bytes(records.Failure(state=1, what=99, index=8)))
    assert "something unknown (99) of 8" in str(unknown)
