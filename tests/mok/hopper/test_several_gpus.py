"""Ranks on GPUs of their own: bits, no waiting, order of launches, peers that die; see the worker.

`-k 4gpus` chooses a number of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from several_gpus import (
    all_end_well,
    one_is_killed,
    one_is_killed_anywhere,
    one_is_stopped,
)

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("several_gpus_worker.py")
COUNTS = [
    pytest.param(count, id=f"{count}gpus", marks=pytest.mark.gpus(count)) for count in (2, 4, 8)
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("scenario", ["without_waiting", "gather_order"])
def test_all_ranks_check_everything(scenario: str, count: int, tmp_path: Path) -> None:
    all_end_well(WORKER, scenario, count, tmp_path)


@pytest.mark.parametrize("count", COUNTS[1:])  # of two: test_symmetric.py
def test_exact_bits_with_the_portable_backward(count: int, tmp_path: Path) -> None:
    all_end_well(WORKER, "exact_bits", count, tmp_path)


@pytest.mark.parametrize("count", COUNTS)
def test_a_peer_that_was_killed_before_a_launch_is_missed_by_name(
    count: int, tmp_path: Path
) -> None:
    one_is_killed(WORKER, "killed_before", count, tmp_path, 0.0)


@pytest.mark.parametrize("count", COUNTS)
def test_a_peer_that_is_killed_inside_a_launch_is_missed_by_name(
    count: int, tmp_path: Path
) -> None:
    one_is_killed(WORKER, "killed_inside", count, tmp_path, 0.5)  # the others wait in their launch


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("after", [0.5, 0.87, 1.31])
def test_a_peer_that_is_killed_at_any_moment_is_missed(
    after: float, count: int, tmp_path: Path
) -> None:
    one_is_killed_anywhere(WORKER, after, count, tmp_path)


@pytest.mark.parametrize("count", COUNTS)
def test_a_peer_that_is_stopped_counts_like_a_dead_one_and_may_come_back(
    count: int, tmp_path: Path
) -> None:
    one_is_stopped(WORKER, count, tmp_path)
