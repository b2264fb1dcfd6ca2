"""Two ranks on two GPUs: no waiting, order of launches, peers that die or stop; see the worker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from two_gpus import (
    both_end_well,
    ends_well,
    one_is_killed_anywhere,
    one_is_stopped,
    two_ranks,
    wait_for,
)

pytestmark = [pytest.mark.gpus(2), pytest.mark.slow]

WORKER = Path(__file__).with_name("two_gpus_worker.py")


@pytest.mark.parametrize("scenario", ["without_waiting", "gather_order"])
def test_both_ranks_check_everything(scenario: str, tmp_path: Path) -> None:
    both_end_well(WORKER, scenario, tmp_path)


def test_a_peer_that_was_killed_before_a_launch_is_missed_by_name(tmp_path: Path) -> None:
    with two_ranks(WORKER, "killed_before", tmp_path) as ranks:
        wait_for(tmp_path, "ready", ranks)
        ranks[1].kill()
        ranks[1].wait()
        (tmp_path / "done").touch()
        ends_well(tmp_path, 0, ranks)


def test_a_peer_that_is_killed_inside_a_launch_is_missed_by_name(tmp_path: Path) -> None:
    with two_ranks(WORKER, "killed_inside", tmp_path) as ranks:
        wait_for(tmp_path, "ready", ranks)
        time.sleep(0.5)  # rank 0 waits in its launch
        ranks[1].kill()
        ranks[1].wait()
        (tmp_path / "done").touch()
        ends_well(tmp_path, 0, ranks)
        assert (tmp_path / "waited").exists()


@pytest.mark.parametrize("after", [0.5, 0.87, 1.31])
def test_a_peer_that_is_killed_at_any_moment_is_missed(after: float, tmp_path: Path) -> None:
    one_is_killed_anywhere(WORKER, after, tmp_path)


def test_a_peer_that_is_stopped_counts_like_a_dead_one_and_may_come_back(tmp_path: Path) -> None:
    one_is_stopped(WORKER, tmp_path)
