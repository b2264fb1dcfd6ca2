"""Where digests of a recording come from: threads, repeated tensors, shards, nested values."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.digests import Digest
from verify.hashing import digest_tensor
from verify.tracing.definitions import Whole
from verify.tracing.host_lanes import HostLanes, added
from verify.tracing.queues import DigestQueue
from verify.tracing.repeats import RepeatedDigests
from verify.tracing.tensors import located, tensors_in, tensors_of_call


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.arange(200_001, dtype=torch.int32),
        lambda: torch.arange(400_003, dtype=torch.int64).to(torch.bfloat16),
        lambda: torch.randn(300, 400).t(),
        lambda: torch.randn(70_000, dtype=torch.complex64).conj(),
        lambda: torch.arange(300_001, dtype=torch.int64).to(torch.uint8)[1:],
        lambda: torch.ones(()),
        lambda: torch.empty(0, 3),
    ],
)
def test_threads_give_the_digest_of_one(threads: int, made: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lanes = HostLanes()
        t = made()
        assert lanes.of(t, None) == digest_tensor(t).lanes
        lanes.close()
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes), st.tuples(*(st.lists(st.integers(0, n), max_size=2) for n in sizes))
        )
    )
)
def test_shards_along_any_dimensions_add_up(
    given_: tuple[list[int], tuple[list[int], ...]],
) -> None:
    sizes, borders = given_
    whole = torch.arange(100, 100 + int(np.prod(sizes)), dtype=torch.int16).view(sizes)
    lanes, found = HostLanes(), []
    cuts = [
        itertools.pairwise([0, *sorted(some), size])
        for size, some in zip(sizes, borders, strict=True)
    ]
    for ranges in itertools.product(*map(list, cuts)):
        part = whole[tuple(slice(start, stop) for start, stop in ranges)]
        found.append(lanes.of(part, Whole(tuple(sizes), tuple(ranges))))
    total = Digest("int16", tuple(sizes), whole.numel(), added(found))
    assert total == digest_tensor(whole)


def test_repeats_are_digested_once_and_changes_are_seen() -> None:
    met, calls = RepeatedDigests(), []

    def of(t: torch.Tensor) -> object:
        def digest() -> Any:
            calls.append(1)
            return digest_tensor(t).lanes

        lanes = met.of(t, t, digest)
        assert lanes == digest_tensor(t).lanes
        return lanes

    t = torch.randn(3, 5001)[:, :5000].contiguous()
    of(t)
    of(t)
    assert len(calls) == 1  # once for both
    changes = (
        lambda: t.add_(1),  # the version counter sees it
        lambda: t.data.neg_(),  # and does not see these
        lambda: t.numpy().sort(axis=1),
        lambda: t.numpy().__setitem__((2, 4999), 5.0),
        lambda: t.data.copy_(t.data.flip(0)),
    )
    for number, change in enumerate(changes, start=2):
        change()
        of(t)
        assert len(calls) == number
    of(t.clone())  # another tensor, and the same bits
    met.forget()
    of(t)
    assert len(calls) == number + 2
    of(torch.ones(4096, 4).t())  # not contiguous, and not kept
    of(torch.ones(3)[1:])
    assert len(met._met) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=80))
def test_small_tensors_are_digested_together(sizes: list[tuple[int, bool]]) -> None:
    """As they were when they were met, in any order and of any size."""
    queue, expected = DigestQueue(), []
    for size, wide in sizes:
        t = torch.arange(size, dtype=torch.int64).to(torch.float32 if wide else torch.int8)
        expected.append(digest_tensor(t).lanes)
        queue.put(t, None, again=wide)
        t.zero_()
    for t in (torch.ones(3, 4).t(), torch.ones(5, dtype=torch.complex64).conj(), torch.ones(())):
        expected.append(digest_tensor(t).lanes)
        queue.put(t, None)
    found = np.frombuffer(queue.drain()[1](), "<u8").reshape(-1, 4).tolist()
    assert [tuple(one) for one in found] == expected
    queue.close()


def test_a_queue_keeps_the_order_and_starts_anew() -> None:
    queue = DigestQueue()
    tensors = [torch.randn(n) for n in (3, 0, 70_000)]
    for _ in range(2):
        for t in tensors:
            queue.put(t, None, again=True)
        queue.launch()
        takes_time, finish = queue.drain()
        assert not takes_time
        found = np.frombuffer(finish(), "<u8").reshape(-1, 4).tolist()
        assert [tuple(one) for one in found] == [digest_tensor(t).lanes for t in tensors]
    queue.close()


def test_paths_of_nested_values() -> None:
    Pair = collections.namedtuple("Pair", "a b")

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        cache: Any = None

    one = torch.ones(1)
    value = [one, {"x": (one, 3, "text"), 5: None}, Pair(one, [one]), Output(one, [one]), Output]
    assert [path for path, _ in tensors_in(value)] == [
        *("0", "1.x.0", "2.0", "2.1.0", "3.logits", "3.cache.0"),
    ]
    assert [path for path, _ in tensors_in(one)] == [""]
    array = np.arange(3)
    array.flags.writeable = False
    ((path, t),) = tensors_in({"a": array, "b": np.array(["text"])})
    assert (path, t.tolist()) == ("a", [0, 1, 2])
    assert [path for path, _ in tensors_of_call((one, [one]), {"mask": one})] == [
        *("0", "1.0", "kwargs.mask"),
    ]
    endless: list[Any] = [one]
    endless.append(endless)
    assert [path for path, _ in tensors_in(endless)] == ["0"]
    assert located(one) == (one, None)


def test_containers_that_hold_each_other_and_odd_keys() -> None:
    @dataclasses.dataclass
    class Branch:
        value: torch.Tensor
        parent: Any = None
        children: list[Any] = dataclasses.field(default_factory=list)

    class Key:
        """Its text has an address, another in each run."""

    class Lazy(Branch):
        def __getattribute__(self, name: str) -> Any:
            if name == "value":
                raise RuntimeError("not there yet")
            return super().__getattribute__(name)

    one = torch.ones(1)
    top = Branch(one)
    top.children = [Branch(one, top) for _ in range(30)]
    assert len(list(tensors_in(top))) == 31
    keys = {Key(): one, one: one, ("a", 1): one, None: one}
    assert [path for path, _ in tensors_in(keys)] == ["Key-0", "Tensor-1", "('a', 1)", "None"]
    assert list(tensors_in(Lazy(one))) == []
