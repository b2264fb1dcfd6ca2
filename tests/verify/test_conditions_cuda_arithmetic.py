"""What conditions on a GPU decide without one: which loads, how often, and what was in effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.conditions import (
    cuda_contention,
    cuda_memory,
    cuda_probes,
    multiprocessors,
    streams,
)
from verify.conditions.cuda_contention import Variant, more_wanted, timeout_for, variants
from verify.conditions.cuda_loads import LoadUnavailable, refuse_blocking
from verify.conditions.overlap import (
    HEAD,
    RELEASED,
    TIMED_OUT,
    WORDS,
    Overlap,
    Trace,
    overlap_of,
    settled,
    traces_of,
)
from verify.conditions.recording import Replays, own_tensors

CUDA = torch.device("cuda", 0)


def test_a_record_is_read_as_the_kernels_write_it() -> None:
    words = [0] * (HEAD + WORDS * 3)
    words[HEAD : HEAD + 6] = [100, 250, 7, 12, RELEASED, 251]
    words[HEAD + 2 * WORDS : HEAD + 2 * WORDS + 6] = [101, 240, 6, 1, 0, 0]
    assert traces_of(words, 3) == [Trace(100, 250, 7, 11, RELEASED), Trace(101, 240, 6, 0)]


def test_a_load_beside_the_whole_execution_is_complete() -> None:
    traces = [Trace(90, 220, 5, 3), Trace(95, 210, 5, 4)]
    found = overlap_of(traces, 2, 100, 200)
    assert found == Overlap(2, 2, 2, 2, 0, 10, 100)
    assert found.complete
    assert found.to_json() == {
        "load_blocks": 2,
        "multiprocessors": 2,
        "load_steps": 10,
        "microseconds": 0,
    }


@pytest.mark.parametrize(
    ("traces", "start", "end"),
    [
        ([Trace(90, 150, 5, 3, TIMED_OUT)] * 2, 100, 200),  # the case waited until it was over
        ([Trace(101, 220, 5, 3)] * 2, 100, 200),  # it came later than the execution
        ([Trace(90, 220, 5, 3), Trace(90, 199, 5, 4)], 100, 200),  # one block was gone
        ([Trace(90, 220, 5, 3)], 100, 200),  # one never started
        ([], 100, 200),
        ([Trace(90, 220, 5, 3)] * 2, 0, 200),  # the execution was never stamped
        ([Trace(90, 220, 5, 3)] * 2, 100, 0),
        ([Trace(90, 220, 5, 3)] * 2, 200, 100),
    ],
)
def test_a_load_that_was_not_there_all_the_time_is_not(
    traces: list[Trace], start: int, end: int
) -> None:
    found = overlap_of(traces, 2, start, end)
    assert not found.complete
    assert found.to_json()


def test_no_load_is_never_complete() -> None:
    assert not overlap_of([], 0, 100, 200).complete


moments = st.integers(1, 60)


@given(st.lists(st.tuples(moments, moments), max_size=6), moments, moments)
def test_a_block_covers_exactly_what_lies_inside_it(
    spans: list[tuple[int, int]], start: int, end: int
) -> None:
    traces = [Trace(a, b, 1, i) for i, (a, b) in enumerate(spans)]
    found = overlap_of(traces, len(traces), start, end)
    inside = [a <= start <= end <= b for a, b in spans]
    assert found.covering == sum(inside)
    assert found.complete == (bool(spans) and all(inside))
    if found.complete:
        assert settled(traces, len(traces), end)


def test_waiting_ends_when_no_block_can_tell_more() -> None:
    assert not settled([Trace(1, 5, 1, 0)], 1, 6)
    assert settled([Trace(1, 5, 1, 0, TIMED_OUT)], 1, 6)
    assert settled([Trace(1, 6, 1, 0)], 1, 6)
    assert not settled([Trace(1, 6, 1, 0)], 2, 6)


@given(st.integers(1, 300), st.booleans())
def test_loads_for_any_device(count: int, tensor: bool) -> None:
    found = variants(count, tensor_cores=tensor)
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert {"busy memory", "busy tensor" if tensor else "busy fma"} <= set(names)
    assert all(0 <= one.held < count for one in found)
    if count >= 8:
        held = [one.held for one in found if one.held and not one.work]
        assert held == sorted({count // 4, count // 2, count - max(1, count // 32)})
        assert [one.held for one in found if one.held and one.work] == [count // 2]


def test_loads_of_an_h200() -> None:
    assert [one.name for one in variants(132)] == [
        "busy memory",
        "busy tensor",
        "hold=33",
        "hold=66",
        "hold=128",
        "hold=66 memory",
    ]
    assert variants(132)[-1].requested == {"held": 66, "work": "memory"}
    assert variants(132)[2].requested == {"held": 33}
    assert variants(132)[0].requested == {"busy": "memory"}


@given(
    st.integers(1, 8),
    st.integers(1, 12),
    st.lists(st.booleans(), min_size=80, max_size=80),
    st.booleans(),
)
def test_executions_under_a_load_end_and_ranks_make_equally_many(
    world: int, least: int, overlaps: list[bool], hopeless: bool
) -> None:
    tried = overlapped = 0
    while more_wanted(world, least, tried, overlapped, 0.0, hopeless=hopeless):
        overlapped += overlaps[tried]
        tried += 1
    if world > 1:
        assert tried == least
    elif all(overlaps):
        assert tried == max(least, cuda_contention.MOST_EACH)
    else:
        missed = tried - overlapped
        given_up = missed == overlapped + (1 if hopeless else cuda_contention.MISSES)
        assert given_up or overlapped == max(least, cuda_contention.MOST_EACH)


def test_a_slow_case_is_not_executed_more_often_than_asked() -> None:
    assert more_wanted(1, 2, 1, 1, 60.0)
    assert not more_wanted(1, 2, 2, 2, 60.0)


@given(st.floats(0, 1e4), st.integers(1, 200))
def test_loads_end_by_themselves(alone: float, count: int) -> None:
    low, high = cuda_contention.TIMEOUTS
    for one in variants(count):
        assert low <= timeout_for(one, count, alone) <= high
    assert timeout_for(Variant("x", 128), 132, 0.1) > timeout_for(Variant("x", 33), 132, 0.1)


def test_what_counts_as_a_cold_cache() -> None:
    told, held = cuda_contention.cold_effect([(280, 700)], 1)
    assert (told, held) == ({"cycles_warm": [280], "cycles_cold": [700]}, True)
    assert not cuda_contention.cold_effect([(280, 300)], 1)[1]
    assert not cuda_contention.cold_effect([(280, 700)], 2)[1]
    assert not cuda_contention.cold_effect([(280, 700), (280, 281)], 2)[1]


def test_what_counts_as_filled_and_as_shifted() -> None:
    assert cuda_memory.filled_effect([(9, 10)]) == ({"filled_allocations": 9, "of": 10}, True)
    assert not cuda_memory.filled_effect([(8, 10)])[1]
    assert not cuda_memory.filled_effect([])[1]
    told, held = cuda_memory.shifted_effect([0, 2**21], [2**22 + 512, 2**23])
    assert (told, held) == ({"moved": 2, "other_offset": 1, "of": 2}, True)
    assert cuda_memory.shifted_effect(range(10), [0, *range(11, 20)])[1]
    assert not cuda_memory.shifted_effect(range(10), [0, 1, *range(12, 20)])[1]
    assert not cuda_memory.shifted_effect([0, 512], [0, 512])[1]
    assert not cuda_memory.shifted_effect([0], [512, 1024])[1]
    assert not cuda_memory.shifted_effect([], [])[1]


def block(size: int, state: str = "inactive") -> dict[str, Any]:
    return {"size": size, "state": state}


def segment(blocks: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "stream": 5,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
        **fields,
    }


def test_free_blocks_are_asked_for_by_their_exact_sizes() -> None:
    mega = 2**20
    snapshot = [
        segment([block(20 * mega), block(4 * mega, "active_allocated"), block(mega // 2)]),
        segment([block(2 * mega), block(1024)], segment_type="small"),
        segment([block(8 * mega)], stream=6),
        segment([block(8 * mega)], device=1),
        segment([block(8 * mega)], segment_pool_id=(0, 3)),
        segment([block(6 * mega, "active_pending_free")]),
    ]
    assert cuda_memory.free_blocks(snapshot, 0, 5) == [20 * mega, mega, mega, 1024]


@given(st.lists(st.integers(1, 100)), st.integers(0, 300))
def test_no_more_is_held_than_allowed(sizes: list[int], limit: int) -> None:
    chosen = cuda_memory.within(sizes, limit)
    assert sum(chosen) <= limit
    if sum(sizes) <= limit:
        assert chosen == sizes


@given(st.integers(0, 2**40))
def test_sizes_are_the_allocators(size: int) -> None:
    whole = cuda_memory.rounded(size)
    assert whole % 512 == 0
    assert max(size, 1) <= whole < size + 513


def test_what_counts_as_another_stream() -> None:
    assert streams.effect([7, 7], 0) == ({"looks": 2, "on_another_stream": 2}, True)
    assert not streams.effect([7, 0], 0)[1]
    assert not streams.effect([7], 0)[1]  # the case raised
    assert not streams.effect([], 0)[1]


@given(st.integers(1, 300))
def test_limits_are_some_but_not_all(count: int) -> None:
    found = multiprocessors.limits(count)
    assert all(0 < limit < count for limit in found)
    assert bool(found) == (count > 1)
    assert multiprocessors.limits(132) == [33, 99]


def test_what_counts_as_a_limit() -> None:
    assert multiprocessors.effect(40, 40, 132)[1]
    assert multiprocessors.effect(40, 38, 132)[1]
    assert not multiprocessors.effect(40, 41, 132)[1]
    assert not multiprocessors.effect(40, 0, 132)[1]
    assert not multiprocessors.effect(132, 132, 132)[1]


def test_what_counts_as_a_replay() -> None:
    assert Replays(3, done=3, poisoned=2, rewritten=2).effect()[1]
    assert Replays(3, done=3, changed=1).effect()[1]
    assert not Replays(3, done=3, poisoned=2).effect()[1]
    assert not Replays(3).effect()[1]
    told, _ = Replays(3, 3, 1, 1, elsewhere=["out"]).effect()
    assert told == {"replays": 3, "poisoned": 1, "rewritten": 1, "not_poisoned": 1}


def test_only_what_lies_in_the_graphs_memory_is_its_own() -> None:
    inside, outside, empty = torch.zeros(8), torch.zeros(8), torch.zeros(0)
    snapshot = [
        {"address": inside.data_ptr(), "total_size": 32, "segment_pool_id": (0, 4)},
        {"address": outside.data_ptr(), "total_size": 32, "segment_pool_id": (0, 0)},
    ]
    tensors = {"inside": inside, "view": inside[2:], "outside": outside, "empty": empty}
    assert set(own_tensors(snapshot, (0, 4), tensors)) == {"inside", "view"}


def test_launches_that_wait_are_refused() -> None:
    for fine in ({}, {"CUDA_LAUNCH_BLOCKING": "0"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        refuse_blocking(fine)
    with pytest.raises(LoadUnavailable, match="unset it"):
        refuse_blocking({"CUDA_LAUNCH_BLOCKING": "1"})


@pytest.mark.parametrize("lines", [cuda_probes.NEAR, cuda_probes.HOPS])
def test_a_chain_visits_every_line_once_and_comes_back(lines: int) -> None:
    chain, at, seen = cuda_probes.ring_of_lines(lines), 0, []
    for _ in range(lines):
        seen.append(at)
        at = int(chain[at])
    assert at == 0
    assert sorted(seen) == [cuda_probes.LINE * line for line in range(lines)]
