"""What starts, watches, kills and stops ranks of several GPUs, with ranks that need no GPU."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import several_gpus
from gpu_ranks import Job, borders, counts, experts_of, gathers_first
from several_gpus import (
    all_end_well,
    end_well,
    one_is_killed,
    one_is_killed_anywhere,
    one_is_stopped,
    several_ranks,
    wait_for,
)

WORKER = """
import sys, time
from pathlib import Path

name, rank, ranks, port, folder = sys.argv[1:]
rank, last, folder = int(rank), int(ranks) - 1, Path(folder)

def tell(signal):
    (folder / signal).touch()

def wait(signal):
    while not (folder / signal).exists():
        time.sleep(0.001)

if name == "told":
    tell(f"{rank} of {ranks} at {port}")
elif name == "one fails":
    print("said before", flush=True)
    tell(f"said-{rank}")
    if rank != 1:
        time.sleep(60)
    for other in range(last + 1):
        wait(f"said-{other}")
    raise ValueError("what was wrong")
elif name == "one is silent" and rank == 1:
    sys.exit(0)
elif name == "nobody ends":
    time.sleep(60)
elif name == "killed":
    if rank == last:
        tell("ready")
        time.sleep(60)
    wait("done")
elif name == "killed_anywhere":
    tell(f"ready-{rank}")
    wait("killing")
    if rank == last:
        time.sleep(60)
    tell(f"survived-{rank}")
elif name == "stopped":
    if rank == last:
        tell("ready")
        while not (folder / "go on").exists():
            tell("runs")
            time.sleep(0.001)
    else:
        wait("done")
        time.sleep(0.1)  # the last rank has stopped
        (folder / "runs").unlink(missing_ok=True)
        time.sleep(0.1)
        assert not (folder / "runs").exists(), "the last rank runs"
        tell(f"waited-{rank}")
print(f"rank {rank} checked everything", flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A script that is a rank, without torch."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """All processes that the test starts; none may be left at its end."""
    found: list[subprocess.Popen[str]] = []
    plain = subprocess.Popen

    def noted(*args: object, **options: object) -> subprocess.Popen[str]:
        found.append(plain(*args, **options))  # type: ignore[call-overload]
        return found[-1]

    monkeypatch.setattr(several_gpus.subprocess, "Popen", noted)
    yield found
    assert found
    assert all(one.returncode is not None for one in found)


def test_ranks_are_told_who_they_are_and_meet_at_a_free_port(
    worker: Path, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    all_end_well(worker, "told", 4, tmp_path)
    told = sorted(path.name for path in tmp_path.glob("* of *"))
    ports = {name.rpartition(" ")[2] for name in told}
    assert len(ports) == 1
    port = ports.pop()
    assert told == [f"{rank} of 4 at {port}" for rank in range(4)]
    assert 0 < int(port) < 65535  # the next one is a port as well
    assert [one.returncode for one in started] == [0] * 4


def test_a_rank_that_fails_is_shown_at_once_though_others_go_on(
    worker: Path, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        all_end_well(worker, "one fails", 4, tmp_path)
    told = str(failure.value)
    assert told.index("rank 1: 1: rank 1:") < told.index("ValueError: what was wrong")
    assert told.index("what was wrong") < told.index("(the end of rank 0) rank 0:\nsaid before")
    assert "(the end of rank 3)" in told
    assert time.monotonic() - began < 30.0


def test_a_rank_that_ends_without_having_checked_is_no_good_end(
    worker: Path, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="rank 1:\n"):
        all_end_well(worker, "one is silent", 2, tmp_path)


def test_waiting_ends_when_a_rank_ended_or_nobody_tells(
    worker: Path,
    started: list[subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with several_ranks(worker, "one fails", 2, tmp_path) as ranks:
        ranks[1].wait(30)
        with pytest.raises(AssertionError, match=r"no ready, and ended: rank 1:\n(?s:.*)was wrong"):
            wait_for(tmp_path, "ready", ranks)
    with several_ranks(worker, "nobody ends", 3, tmp_path) as ranks:
        monkeypatch.setattr(several_gpus, "SECONDS", 0.1)
        with pytest.raises(AssertionError, match="no ready: "):
            wait_for(tmp_path, "ready", ranks)
        with pytest.raises(AssertionError, match=r"\[0, 2\] do not end: rank 0:\n"):
            end_well(tmp_path, [0, 2], ranks)


@pytest.mark.parametrize("count", [2, 4])
def test_the_last_rank_is_killed_and_all_others_have_to_end_well(
    count: int, worker: Path, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    one_is_killed(worker, "killed", count, tmp_path, 0.0)
    assert [one.returncode for one in started] == [0] * (count - 1) + [-9]
    started.clear()
    one_is_killed_anywhere(worker, 0.01, count, tmp_path)
    assert [one.returncode for one in started] == [0] * (count - 1) + [-9]
    assert len(list(tmp_path.glob("survived-*"))) == count - 1


def test_the_last_rank_is_stopped_until_all_others_have_waited(
    worker: Path, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    one_is_stopped(worker, 3, tmp_path)
    assert [one.returncode for one in started] == [0] * 3


# ---- what the workers share ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("first", [37, 0, 149, 150])
def test_every_token_has_a_rank(ranks: int, first: int) -> None:
    found = borders(150, ranks, first)
    assert len(found) == ranks + 1
    assert (found[0], found[-1], found) == (0, 150, sorted(found))
    if ranks > 1:
        assert found[1] == first
    if first == 37:  # nobody has nothing, who misses a peer in every launch
        assert len(set(found)) == ranks + 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_numbers_of_tokens_begin_with_none_and_end_with_all(ranks: int) -> None:
    found = counts(150, ranks)
    assert all(len(some) == ranks for some in found)
    assert found[0][0] == 0
    assert found[-1] == [150 - sum(found[-1][1:]), *found[-1][1:]]
    assert [0] * ranks in found
    assert all(few <= whole for some in found for few, whole in zip(some, found[-1], strict=True))
    if ranks == 2:
        assert found == [[0, 113], [37, 0], [0, 0], [1, 64], [37, 113]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_gathers_first_and_last(ranks: int, tmp_path: Path) -> None:
    jobs = [Job(rank, ranks, 0, tmp_path) for rank in range(ranks)]
    turns = [[gathers_first(job, turn) for job in jobs] for turn in range(40)]
    assert all(any(turn) and not all(turn) for turn in turns)
    if ranks == 2:
        assert turns[:2] == [[True, False], [False, True]]
    for rank in range(ranks):
        assert any(turn[rank] and sum(turn) == 1 for turn in turns)
        assert any(not turn[rank] and sum(turn) == ranks - 1 for turn in turns)


def test_experts_are_shared_out_evenly_or_not_at_all(tmp_path: Path) -> None:
    assert experts_of(Job(3, 4, 0, tmp_path), 8) == slice(6, 8)
    with pytest.raises(AssertionError, match="8 experts on 3 ranks"):
        experts_of(Job(0, 3, 0, tmp_path), 8)


def test_a_survivor_blames_the_last_rank_alone(tmp_path: Path) -> None:
    job = Job(0, 4, 0, tmp_path)
    pattern = job.blamed("the expert ids of rank 3")
    told = "rank 0 waited in vain for the expert ids of rank 3 (wanted 5).{} rank 3 has not given"
    assert re.search(pattern, told.format(""))
    assert not re.search(pattern, told.format(" rank 1 has not given its expert ids."))
    assert not re.search(pattern, told.replace("ids of rank 3", "ids of rank 2"))
    late = [f"rank {rank} has not entered the launch." for rank in range(3)]
    assert re.search(job.all_blamed(), " ".join(late))
    assert not re.search(job.all_blamed(), " ".join(late[:2]))
