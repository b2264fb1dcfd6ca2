"""Two processes, each a rank with a GPU of its own, that a test may kill or stop.

They run `WORKER SCENARIO RANK PORT FOLDER`, and tell one another and the test by empty files in
FOLDER, where their output is as well.
"""

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

import mok

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
def two_ranks(worker: Path, scenario: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Both ranks, killed at the end whatever happens."""
    folders = (Path(mok.__file__).parent.parent, Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment.pop("MOK_CHECK", None)
    port = _port()
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, str(worker), scenario, str(rank), str(port), str(folder)],
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


def wait_for(folder: Path, name: str, ranks: list[subprocess.Popen[str]]) -> None:
    """Until a rank has told so; AssertionError if one ended instead."""
    until = time.monotonic() + SECONDS
    while not (folder / name).exists():
        ended = [rank for rank, one in enumerate(ranks) if one.poll() is not None]
        assert not ended, f"no {name}: {_told(folder, ended[0])}"
        assert time.monotonic() < until, f"no {name}: {_told(folder, 0)}{_told(folder, 1)}"
        time.sleep(0.01)


def ends_well(folder: Path, rank: int, ranks: list[subprocess.Popen[str]]) -> None:
    """The rank ends by itself and says that it checked everything."""
    try:
        code = ranks[rank].wait(SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"does not end: {_told(folder, 0)}{_told(folder, 1)}")
    assert code == 0, _told(folder, rank)
    assert f"rank {rank} checked everything" in _told(folder, rank)


# ---- scenarios that both directions have; worker and folder as of `two_ranks` --------------------


def both_end_well(worker: Path, scenario: str, folder: Path) -> None:
    """Nobody is missing."""
    with two_ranks(worker, scenario, folder) as ranks:
        for rank in range(2):
            ends_well(folder, rank, ranks)


def one_is_killed_anywhere(worker: Path, after: float, folder: Path) -> None:
    """Rank 1 is killed so many seconds after both began to launch without pause."""
    with two_ranks(worker, "killed_anywhere", folder) as ranks:
        for rank in range(2):
            wait_for(folder, f"ready-{rank}", ranks)
        time.sleep(after)
        (folder / "killing").touch()
        time.sleep(0.2)  # rank 0 sees it
        ranks[1].kill()
        ranks[1].wait()
        ends_well(folder, 0, ranks)


def one_is_stopped(worker: Path, folder: Path) -> None:
    """Rank 1 is stopped, and goes on when rank 0 has given up."""
    with two_ranks(worker, "stopped", folder) as ranks:
        wait_for(folder, "ready", ranks)
        ranks[1].send_signal(signal.SIGSTOP)
        (folder / "done").touch()
        wait_for(folder, "waited", ranks)
        (folder / "go on").touch()
        ranks[1].send_signal(signal.SIGCONT)
        for rank in range(2):
            ends_well(folder, rank, ranks)
