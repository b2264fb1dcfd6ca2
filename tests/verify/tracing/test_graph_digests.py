"""Digests that are nodes of a graph: rows over several chunks, pieces of shards, what is held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_graphs import FakeGraph, capture, use_fake_graphs

from verify.errors import UnsupportedError
from verify.hashing import digest_on_host
from verify.tracing import graph_digests
from verify.tracing.definitions import Whole
from verify.tracing.graph_digests import GraphDigests, PoolMemory

M64 = 2**64 - 1


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_graphs(monkeypatch)
    monkeypatch.setattr(graph_digests, "ROWS", 4)


def sums(digests: GraphDigests, rows: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    lanes = digests.lanes().numpy().view(np.uint64)
    return [
        tuple(int(value) for value in lanes[at : at + count].sum(axis=0, dtype=np.uint64))
        for at, count in rows
    ]


def test_rows_over_several_chunks() -> None:
    """Also of shards in several pieces, of strided and of empty tensors."""
    torch.manual_seed(0)
    made = [torch.randn(3, 5), torch.randn(4, 6).t(), torch.empty(0, 3), torch.randn(2, 3, 4)]
    made += [torch.randn(7).to(torch.bfloat16), torch.arange(9)]
    whole = Whole((4, 8), ((1, 4), (2, 7)))  # of the first one: three pieces
    graph, digests = FakeGraph(), GraphDigests(20)
    with capture(graph):
        rows = digests.add([(t, None) for t in made])
        rows += digests.add([(made[0], whole), (made[1], None)])
        rows += digests.add([(made[3], None)])
    digests.finish()
    assert len(digests._taken) >= 3
    for _ in range(2):
        made[0].add_(1)
        digests.clear()
        graph.replay()
        found = sums(digests, rows)
        expected = [digest_on_host(t).lanes for t in made]
        full = torch.zeros(4, 8)
        full[1:4, 2:7] = made[0]
        expected += [digest_on_host(full).lanes, expected[1], expected[3]]
        assert found == expected
    assert sum(found[0]) != sum(found[6])


def test_no_room_is_refused_and_what_is_left_over_goes_to_the_next() -> None:
    digests = GraphDigests(8)
    first, *_ = digests._free
    with capture(FakeGraph()):
        for _ in range(7):
            digests.add([(torch.ones(2), None)])
        with pytest.raises(UnsupportedError, match="room for 7 digests, and more are asked for"):
            digests.add([(torch.ones(2), None)])
    other = GraphDigests(8)
    with capture(FakeGraph()), pytest.raises(UnsupportedError, match="record at"):
        other.add([(torch.ones(9), None)] * 10)
    other.finish()
    left = len(graph_digests._spare[0])
    del digests
    assert len(graph_digests._spare[0]) == left + 2
    assert any(one is first for one in graph_digests._spare[0])


def test_the_first_row_tells_whether_the_kernel_ran() -> None:
    graph, digests = FakeGraph(), GraphDigests(4)
    with capture(graph):
        digests.add([(torch.zeros(2), None)])
    digests.finish()
    for runs in (False, True):
        digests.clear()
        if runs:
            graph.replay()
        first, *_ = digests.lanes().numpy().view(np.uint64).tolist()
        assert (tuple(first) == digests.expected) == runs


def test_what_is_not_of_the_pool_is_held() -> None:
    inside, outside = torch.ones(100), torch.ones(100)
    marker = graph_digests.torch.empty

    for pool in ((0, 7), (0, 0)):
        digests, made = GraphDigests(4), []

        def empty(*args: Any, made: list[Any] = made, **given: Any) -> torch.Tensor:
            made.append(marker(*args, **given))
            return made[-1]

        def snapshot(made: list[Any] = made, pool: tuple[int, int] = pool) -> list[dict[str, Any]]:
            return [
                {"address": t.data_ptr(), "total_size": 400, "segment_pool_id": pool}
                for t in (made[-1], inside)
            ]

        graph_digests.torch.empty = empty
        graph_digests.torch.cuda.memory_snapshot = snapshot
        with capture(FakeGraph()):
            digests.add([(inside, None), (outside, None)])
        held = {t.data_ptr() for t in digests._held.values()}
        mine = {outside.data_ptr()} if pool[1] else {outside.data_ptr(), inside.data_ptr()}
        assert held == mine


def test_memory_of_a_pool() -> None:
    taken = []
    segments = [
        {"address": 100, "total_size": 50, "segment_pool_id": (0, 0)},
        {"address": 200, "total_size": 50, "segment_pool_id": (0, 7)},
        {"address": 300, "total_size": 50, "segment_pool_id": (0, 8)},
    ]

    def snapshot() -> list[dict[str, Any]]:
        taken.append(1)
        return list(segments)

    pool = PoolMemory(snapshot, 210)
    found = [pool.holds(one) for one in (200, 249, 100, 149, 300)]
    assert found == [True, True, False, False, False]
    assert len(taken) == 1
    assert not pool.holds(250)
    assert len(taken) == 2
    segments.append({"address": 400, "total_size": 8, "segment_pool_id": (0, 7)})
    assert pool.holds(407)
    assert len(taken) == 3


@pytest.mark.parametrize("own", [100, 5])
def test_without_a_pool_all_is_held(own: int) -> None:
    segments = [{"address": 100, "total_size": 50, "segment_pool_id": (0, 0)}]
    pool = PoolMemory(lambda: segments, own)
    assert not pool.holds(100)
    assert not pool.holds(110)


def test_another_allocator_has_no_segments() -> None:
    def raises() -> list[dict[str, Any]]:
        raise RuntimeError("not supported")

    assert not PoolMemory(raises, 100).holds(100)
