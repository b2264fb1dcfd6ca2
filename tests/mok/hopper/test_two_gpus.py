"""Two ranks on two GPUs: no waiting, order of launches, peers that die or stop; see the worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sync_debug

import mok

pytestmark = [pytest.mark.gpus(2), pytest.mark.slow]

WORKER = Path(__file__).with_name("two_gpus_worker.py")
SECONDS = 180.0


def _port() -> int:
    """Free, as the next one is with luck: a scenario may meet a second time."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def _ranks(scenario: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Both ranks, killed at the end whatever happens."""
    folders = (Path(mok.__file__).parent.parent, Path(sync_debug.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment.pop("MOK_CHECK", None)
    port = _port()
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(rank), str(port), str(folder)],
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.wait()
        for log in logs:
            log.close()


def _told(folder: Path, rank: int) -> str:
    return f"rank {rank}:\n{(folder / f'log-{rank}').read_text()}"


def _wait(folder: Path, name: str, ranks: list[subprocess.Popen[str]]) -> None:
    """Until a rank has told so; AssertionError if one ended instead."""
    until = time.monotonic() + SECONDS
    while not (folder / name).exists():
        ended = [rank for rank, one in enumerate(ranks) if one.poll() is not None]
        assert not ended, f"no {name}: {_told(folder, ended[0])}"
        assert time.monotonic() < until, f"no {name}: {_told(folder, 0)}{_told(folder, 1)}"
        time.sleep(0.01)


def _ends_well(folder: Path, rank: int, ranks: list[subprocess.Popen[str]]) -> None:
    try:
        code = ranks[rank].wait(SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"does not end: {_told(folder, 0)}{_told(folder, 1)}")
    assert code == 0, _told(folder, rank)
    assert f"rank {rank} checked everything" in _told(folder, rank)


@pytest.mark.parametrize("scenario", ["without_waiting", "gather_order"])
def test_both_ranks_check_everything(scenario: str, tmp_path: Path) -> None:
    with _ranks(scenario, tmp_path) as ranks:
        for rank in range(2):
            _ends_well(tmp_path, rank, ranks)


def test_a_peer_that_was_killed_before_a_launch_is_missed_by_name(tmp_path: Path) -> None:
    with _ranks("killed_before", tmp_path) as ranks:
        _wait(tmp_path, "ready", ranks)
        ranks[1].kill()
        ranks[1].wait()
        (tmp_path / "done").touch()
        _ends_well(tmp_path, 0, ranks)


def test_a_peer_that_is_killed_inside_a_launch_is_missed_by_name(tmp_path: Path) -> None:
    with _ranks("killed_inside", tmp_path) as ranks:
        _wait(tmp_path, "ready", ranks)
        time.sleep(0.5)  # rank 0 waits in its launch
        ranks[1].kill()
        ranks[1].wait()
        (tmp_path / "done").touch()
        _ends_well(tmp_path, 0, ranks)
        assert (tmp_path / "waited").exists()


@pytest.mark.parametrize("after", [0.5, 0.87, 1.31])
def test_a_peer_that_is_killed_at_any_moment_is_missed(after: float, tmp_path: Path) -> None:
    with _ranks("killed_anywhere", tmp_path) as ranks:
        for rank in range(2):
            _wait(tmp_path, f"ready-{rank}", ranks)
        time.sleep(after)
        (tmp_path / "killing").touch()
        time.sleep(0.2)  # rank 0 sees it
        ranks[1].kill()
        ranks[1].wait()
        _ends_well(tmp_path, 0, ranks)


def test_a_peer_that_is_stopped_counts_like_a_dead_one_and_may_come_back(tmp_path: Path) -> None:
    with _ranks("stopped", tmp_path) as ranks:
        _wait(tmp_path, "ready", ranks)
        ranks[1].send_signal(signal.SIGSTOP)
        (tmp_path / "done").touch()
        _wait(tmp_path, "waited", ranks)
        (tmp_path / "go on").touch()
        ranks[1].send_signal(signal.SIGCONT)
        for rank in range(2):
            _ends_well(tmp_path, rank, ranks)
