"""The schedule's kernels write what the model says, for ranks that share a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_schedules import (
    DIRT,
    KERNELS,
    KINDS,
    Inputs,
    cuda_backend,
    find_differences,
    launch,
    make_dirty,
    make_group,
    make_inputs,
    random_routing,
    run_kernels,
)

from mok.hopper import records
from mok.hopper.layout import Segments, Sizes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backend():
    return cuda_backend()


def unequal(ranks: int, most: int) -> list[int]:
    """Tokens of each rank: the most, none, one, a block's borders, and others."""
    return (
        [most]
        if ranks == 1
        else [[most, 0, 1, 127, 128, 129, 40, 256][r % 8] for r in range(ranks)]
    )


def check(backend, sizes, segments, routings, most_ctas=0):
    """Schedules one after the other in the same memory, as the layers of a model do."""
    group = make_group(sizes, segments, "cuda")
    for epoch, topk in enumerate(routings, 1):
        inputs = make_inputs(group, topk, epoch)
        make_dirty(group)
        run_kernels(group, inputs, backend, most_ctas)
        assert find_differences(group, inputs, topk, epoch) == []


def routing_of(ranks, experts, slots, tokens, kind, seed=0):
    rng = np.random.default_rng(seed)
    return [random_routing(rng, count, slots, ranks * experts, kind) for count in tokens]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "experts", "slots"), [(1, 48, 8), (2, 7, 3), (4, 16, 8), (8, 4, 16), (64, 2, 6)]
)
def test_tables_are_the_models(backend, ranks, experts, slots, kind):
    sizes = Sizes(300, slots, experts, 320, 192, 64, ranks)
    first = routing_of(ranks, experts, slots, unequal(ranks, 300), kind)
    second = routing_of(ranks, experts, slots, unequal(ranks, 77), "random", seed=1)
    check(backend, sizes, Segments(2, 5), [first, second, first])


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129])
def test_any_number_of_tokens(backend, tokens):
    sizes = Sizes(tokens, 4, 8, 64, 64, 0, 1)
    check(backend, sizes, Segments(1, 2), [routing_of(1, 8, 4, [tokens], "random")])


def test_a_group_without_any_token(backend):
    sizes = Sizes(5, 4, 8, 64, 64, 64, 3)
    check(backend, sizes, Segments(1, 2), [routing_of(3, 8, 4, [0, 0, 0], "random")])


@pytest.mark.parametrize("most_ctas", [1, 3])
def test_tables_do_not_depend_on_the_grid(backend, most_ctas):
    for ranks in (1, 4):
        sizes = Sizes(700, 8, 20, 320, 192, 64, ranks)
        topk = routing_of(ranks, 20, 8, unequal(ranks, 700), "skewed")
        check(backend, sizes, Segments(2, 5), [topk, topk], most_ctas)


@pytest.mark.parametrize(
    ("experts", "slots", "tokens", "segments", "kind"),
    [
        (16, 16, 20000, Segments(1, 1), "random"),  # more segments than shared memory keeps
        (1024, 16, 7000, Segments(3, 3), "random"),  # the most experts
        (1024, 8, 3000, Segments(10, 24), "skewed"),
        (48, 8, 7168, Segments(15, 18), "random"),  # two experts fit in no segment
        (48, 8, 7168, Segments(10, 24), "skewed"),  # large experts are cut
    ],
)
def test_large_tables(backend, experts, slots, tokens, segments, kind):
    sizes = Sizes(tokens, slots, experts, 512, 192, 192, 1)
    check(backend, sizes, segments, [routing_of(1, experts, slots, [tokens], kind)])


def test_more_chunks_than_a_turn_of_the_scan(backend):
    sizes = Sizes(128 * 140, 3, 2, 64, 64, 0, 8)  # 1120 of them, most of them empty
    topk = routing_of(8, 2, 3, [300, 0, 128 * 140, 5, 129, 1000, 17, 4000], "unused")
    check(backend, sizes, Segments(10, 24), [topk])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_recorded_schedule_follows_new_ids(backend, ranks):
    sizes = Sizes(300, 8, 12, 64, 64, 0, ranks)
    group = make_group(sizes, Segments(2, 5), "cuda")
    tokens = unequal(ranks, 300)
    inputs = make_inputs(group, routing_of(ranks, 12, 8, tokens, "random"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_kernels(group, inputs, backend)
    for epoch, kind in enumerate(("skewed", "bad", "random"), 1):
        topk = routing_of(ranks, 12, 8, tokens, kind, seed=epoch)
        for there, given in zip(inputs.ids, topk, strict=True):
            there.copy_(torch.from_numpy(given))
        make_dirty(group)
        graph.replay()
        assert find_differences(group, inputs, topk, epoch) == []


def test_a_peer_that_never_publishes_ends_the_wait_and_harms_no_memory(backend):
    sizes = Sizes(300, 4, 6, 64, 64, 0, 2)
    group = make_group(sizes, Segments(2, 5), "cuda")
    topk = routing_of(2, 6, 4, [300, 300], "random")
    both = make_inputs(group, topk)
    failure = torch.zeros(8, dtype=torch.int32).pin_memory()
    alone = group.record(0, 300, both.x[0])
    alone.failure = failure.data_ptr()
    alone.timeout_enter = alone.timeout = 20_000_000
    inputs = Inputs((both.ids[0],), (both.x[0],), alone, None, None)
    # Stale ids of the peer, as a schedule before may have left them.
    group.tables[1]["ids"][: group.lengths["ids"]] = 3
    for name in KERNELS:
        launch(name, group, inputs, backend, ranks_here=1)
    torch.cuda.synchronize()
    found = records.Failure.from_buffer_copy(failure.numpy().tobytes())
    assert (found.state, found.what, found.index, found.rank) == (1, 1, 1, 0)
    assert (found.seen, found.wanted) == (0, 1)
    assert int(group.tables[0]["counters"][records.COUNT_FAILED]) == 1
    for mine in group.tables:
        for name, table in mine.items():
            assert table[group.lengths[name] :].eq(DIRT).all(), name
