"""Several processes, each a rank with a GPU of its own, that a test may kill or stop.

They run `WORKER SCENARIO RANK RANKS PORT FOLDER`, and tell one another and the test by empty files
in FOLDER, where their output is as well. Whoever is killed or stopped is the last rank; all others
are survivors, and none of them is special: rank 0 has the store that the ranks meet in.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mok

SECONDS = 180.0
OTHERS = 1500
"""Characters of the output of ranks beside the one that failed, from its end."""

Ranks = Sequence["subprocess.Popen[str]"]


def _port() -> int:
    """Free, as the next one is with luck: a scenario may meet a second time."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def _environment(ranks: int) -> dict[str, str]:
    """Of a rank: this tree comes first, and the host's cores are shared out."""
    folders = [str(Path(mok.__file__).parent.parent), str(Path(__file__).parent)]
    inherited = os.environ.get("PYTHONPATH")  # where packages of the GPU may lie
    path = os.pathsep.join(folders + ([inherited] if inherited else []))
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    made = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": path}
    made.pop("MOK_CHECK", None)
    return made


@contextmanager
def several_ranks(
    worker: Path, scenario: str, ranks: int, folder: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """So many ranks, killed at the end whatever happens."""
    environment, port = _environment(ranks), str(_port())
    started: list[subprocess.Popen[str]] = []
    with ExitStack() as logs:
        try:
            for rank in range(ranks):
                log = logs.enter_context((folder / f"log-{rank}").open("w+"))
                words = [scenario, str(rank), str(ranks), port, str(folder)]
                started.append(
                    subprocess.Popen(
                        [sys.executable, str(worker), *words],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                        env=environment,
                    )
                )
            yield started
        finally:
            for one in started:
                one.kill()
            for one in started:
                one.wait()


def _told(folder: Path, rank: int) -> str:
    text = (folder / f"log-{rank}").read_text(errors="replace")
    return f"rank {rank}:\n{text}"


def _told_by_all(folder: Path, ranks: Ranks, first: Sequence[int] = ()) -> str:
    """What ranks printed: `first` of them whole, the ends of what the others did."""
    rest = [rank for rank in range(len(ranks)) if rank not in first]
    whole = [_told(folder, rank) for rank in first]
    ends = [f"(the end of rank {rank}) {_told(folder, rank)[-OTHERS:]}" for rank in rest]
    return "\n".join([*whole, *ends])


def wait_for(folder: Path, name: str, ranks: Ranks) -> None:
    """Until a rank has told so; AssertionError if one ended instead."""
    until = time.monotonic() + SECONDS
    while not (folder / name).exists():
        ended = [rank for rank, one in enumerate(ranks) if one.poll() is not None]
        assert not ended, f"no {name}, and ended: {_told_by_all(folder, ranks, ended)}"
        assert time.monotonic() < until, f"no {name}: {_told_by_all(folder, ranks)}"
        time.sleep(0.01)


def end_well(folder: Path, who: Sequence[int], ranks: Ranks) -> None:
    """These ranks end by themselves and say that they checked everything.

    AssertionError as soon as one of them did not: the others may wait for it for long.
    """
    until = time.monotonic() + SECONDS
    left = list(who)
    while left:
        for rank in tuple(left):
            code = ranks[rank].poll()
            if code is None:
                continue
            assert code == 0, f"rank {rank}: {code}: {_told_by_all(folder, ranks, [rank])}"
            assert f"rank {rank} checked everything" in _told(folder, rank), _told(folder, rank)
            left.remove(rank)
        assert time.monotonic() < until, f"{left} do not end: {_told_by_all(folder, ranks, left)}"
        time.sleep(0.01)


def kill_last(ranks: Ranks) -> list[int]:
    """Kills the last rank and waits until it is gone; the survivors."""
    ranks[-1].kill()
    ranks[-1].wait()
    return list(range(len(ranks) - 1))


# ---- scenarios that both directions have; worker and folder as of `several_ranks` ----------------


def all_end_well(worker: Path, scenario: str, count: int, folder: Path) -> None:
    """Nobody is missing."""
    with several_ranks(worker, scenario, count, folder) as ranks:
        end_well(folder, range(count), ranks)


def one_is_killed(worker: Path, scenario: str, count: int, folder: Path, after: float) -> None:
    """The last rank is killed so many seconds after it said that it is ready."""
    with several_ranks(worker, scenario, count, folder) as ranks:
        wait_for(folder, "ready", ranks)
        time.sleep(after)
        survivors = kill_last(ranks)
        (folder / "done").touch()
        end_well(folder, survivors, ranks)


def one_is_killed_anywhere(worker: Path, after: float, count: int, folder: Path) -> None:
    """The last rank is killed so many seconds after all began to launch without pause."""
    with several_ranks(worker, "killed_anywhere", count, folder) as ranks:
        for rank in range(count):
            wait_for(folder, f"ready-{rank}", ranks)
        time.sleep(after)
        (folder / "killing").touch()
        time.sleep(0.2)  # the others see it
        end_well(folder, kill_last(ranks), ranks)


def one_is_stopped(worker: Path, count: int, folder: Path) -> None:
    """The last rank is stopped, and goes on when all others have given up."""
    with several_ranks(worker, "stopped", count, folder) as ranks:
        wait_for(folder, "ready", ranks)
        ranks[-1].send_signal(signal.SIGSTOP)
        (folder / "done").touch()
        for rank in range(count - 1):
            wait_for(folder, f"waited-{rank}", ranks)
        (folder / "go on").touch()
        ranks[-1].send_signal(signal.SIGCONT)
        end_well(folder, range(count), ranks)
