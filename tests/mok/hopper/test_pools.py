"""How much room a group's memory gets, when it is made anew, and who is told of too little."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_fakes import Fakes
from hypothesis import given
from hypothesis import strategies as st

from mok import checks
from mok.errors import InputError
from mok.hopper import pools, support, symmetric
from mok.hopper.layout import Segments, Sizes
from mok.hopper.pools import WorkspacePool, room_of_group

CPU = torch.device("cpu")
SIZES = Sizes(0, 2, 4, 64, 64, 0, 2)
SEGMENTS = Segments(1, 4)
GROUP: Any = SimpleNamespace(group_name="g")


def test_room_is_a_setting_where_ranks_are_equal_and_has_a_margin_where_they_differ():
    assert room_of_group(SIZES, 8192, 8192, 0) == 8192
    assert room_of_group(SIZES, 8191, 8191, 0) == 8192
    assert room_of_group(SIZES, 8000, 8192, 0) == 10240
    assert room_of_group(SIZES, 0, 0, 0) == 1024
    assert room_of_group(SIZES, 0, 0, 300) == 384
    assert room_of_group(SIZES, 100, 2000, 2000) == 2048
    assert room_of_group(SIZES, 100, 2000, 1999) == 3072
    assert room_of_group(SIZES, 2**24 - 5, 2**24 - 1, 0) == 2**24 - 1


@given(
    fewest=st.integers(0, 2**24 - 1),
    more=st.integers(0, 2**20),
    said=st.integers(0, 2**24 - 1),
)
def test_room_is_enough_for_every_rank_and_never_beyond_what_the_kernels_hold(fewest, more, said):
    most = min(fewest + more, 2**24 - 1)
    room = room_of_group(SIZES, fewest, most, said)
    assert room >= max(1, most)
    assert support_fits(room)
    if said >= most:
        assert room >= said


def support_fits(room: int) -> bool:
    return room * SIZES.slots < 2**25


@pytest.fixture
def pool(monkeypatch) -> SimpleNamespace:
    """A group's pool, the sizes it made memory for, and how often ranks agreed."""
    state = SimpleNamespace(pool=WorkspacePool(), made=[], agreements=0, others=50)

    def opened(sizes: Sizes, segments: Segments, *_: Any) -> Any:
        state.made.append(sizes.max_tokens)
        return Fakes().workspace(sizes, segments=segments)

    def agree(group: Any, device: torch.device, tokens: int) -> tuple[int, int]:
        state.agreements += 1
        return min(tokens, state.others), max(tokens, state.others)

    def checked(call: str, check: Any, group: Any, device: torch.device) -> None:
        state.agreements += 1
        check()

    monkeypatch.setattr(pools, "_open", opened)
    monkeypatch.setattr(symmetric, "agree_range", agree)
    monkeypatch.setattr(checks, "checked", checked)
    return state


def _get(state: SimpleNamespace, tokens: int) -> Any:
    sizes = dataclasses.replace(SIZES, max_tokens=tokens)
    return state.pool.get(sizes, SEGMENTS, GROUP, CPU)


def test_a_group_agrees_once_and_a_rank_with_too_many_tokens_is_told_alone(pool):
    first = _get(pool, 60)
    assert (pool.made, pool.agreements) == ([1024], 1)
    assert [_get(pool, tokens) is first for tokens in (0, 1024, 7)] == [True] * 3
    with pytest.raises(InputError, match=r"T = 1025; allowed: up to 1024.*max_tokens=N\) on all"):
        _get(pool, 1025)
    assert (pool.made, pool.agreements) == ([1024], 1)


def test_a_larger_max_tokens_makes_every_shape_anew_at_its_next_call(pool):
    first = _get(pool, 60)
    pool.pool.least_tokens = 3000
    second = _get(pool, 10)
    assert first.closed
    assert pool.made == [1024, 3072]
    assert pool.agreements == 3  # once, then what the old memory has to say, and the range
    assert _get(pool, 3072) is second
    first, second = second, None
    pool.others = 4000
    pool.pool.least_tokens = 3500
    assert _get(pool, 10).sizes.max_tokens == 5120


def test_memory_is_neither_made_nor_grown_in_a_capture(pool, monkeypatch):
    first = _get(pool, 60)
    monkeypatch.setattr(support, "capturing", lambda device: True)
    assert _get(pool, 100) is first
    pool.pool.least_tokens = 3000
    with pytest.raises(InputError, match="while a CUDA graph is captured"):
        _get(pool, 60)
    with pytest.raises(InputError, match="while a CUDA graph is captured"):
        pool.pool.group_problem(GROUP, CPU)
    assert not first.closed


def test_what_replayed_graphs_left_in_kept_memory_is_raised_too(pool):
    first = _get(pool, 60)
    first._use.captured = True
    pool.pool.least_tokens = 3000
    _get(pool, 10)
    assert not first.closed
    pool.pool.raise_pending()
    first.bad[1].fill_(2)
    pool.pool.raise_pending()  # bad ids of a group are for `check`, or for after a launch
    with pytest.raises(checks.RoutingError, match="2 bad expert id"):
        pool.pool.check()
