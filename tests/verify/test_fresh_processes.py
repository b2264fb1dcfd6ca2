"""Several groups of workers at once: each once, never too many, and every end is its own.

The workers here are shell scripts that leave what a worker leaves, so that nothing imports torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from struck_starts import strike_start

from verify import ranks, running
from verify.cases import Case
from verify.evidence import Finished, Plan, Trouble, to_line
from verify.ranks import Outcome
from verify.running import RunOptions
from verify.targets import Found
from verify.workers import DONE, WorkerSpec

# what a worker does is in PROCESS.do; when it began and ended, in `times`
SCRIPT = """
stem=${0%-rank*}; echo $$ > "$stem.pid"; echo begin >> "${stem%/*}/times"
trap 'echo end >> "${stem%/*}/times"' EXIT
. "$stem.do"
cat "$stem.lines" >> "${0%.spec.json}.jsonl"
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what the workers of each process do, as shell code."""
    monkeypatch.setattr(ranks, "worker_command", lambda spec: ["sh", "-c", SCRIPT, str(spec)])
    monkeypatch.setattr(ranks, "POLL", 0.005)

    def script(*codes: str, first: int = 1) -> None:
        for process, code in enumerate(codes, start=first):
            stem = tmp_path / f"process{process}"
            stem.with_suffix(".do").write_text(code + "\n")
            line = to_line(Trouble("c", "unsupported", f"from {process}", "process", 0, process))
            ended = to_line(Finished("c", 0, process, USED if not process else {}))
            stem.with_suffix(".lines").write_text(f"{line}\n{ended}\n{DONE}\n")

    return script


USED = {name: {"needed": 10, "room": 60} for name in ("cpu", "cuda:0")}  # room for three


def specs(folder: Path, process: int) -> list[WorkerSpec]:
    return [
        WorkerSpec([], 0, 1, process=process, folder=str(folder), threads=1, timeout=60, parent=0)
    ]


def groups(folder: Path, count: int) -> list[list[WorkerSpec]]:
    return [specs(folder, process) for process in range(1, count + 1)]


def details(outcome: Outcome) -> list[str]:
    return [one.detail for one in outcome.records if isinstance(one, Trouble)]


def most_at_once(folder: Path) -> int:
    level, most = 0, 0
    for word in (folder / "times").read_text().split():
        level += 1 if word == "begin" else -1
        most = max(most, level)
    return most


def test_outcomes_keep_the_order_of_the_groups_whichever_ends_first(
    tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted("sleep 0.6", "sleep 0.3", "true", "true", "true")
    told: list[int] = []
    found = ranks.run_groups(groups(tmp_path, 5), 30, lambda text: None, 3, told.append)
    assert [details(one) for one in found] == [[f"from {process}"] for process in range(1, 6)]
    assert not any(one.deaths or one.timed_out for one in found)
    assert told == [0, 1, 2, 3, 4]
    assert 2 <= most_at_once(tmp_path) <= 3


def test_one_after_another_unless_more_are_allowed(
    tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted("sleep 0.1", "true", "true")
    ranks.run_groups(groups(tmp_path, 3), 30, lambda text: None)
    assert most_at_once(tmp_path) == 1


def test_a_death_and_a_silence_are_those_of_their_own_process(
    tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted("sleep 0.3", "exit 7", "sleep 60", "kill -9 $$", "true")
    found = ranks.run_groups(groups(tmp_path, 5), 1.0, lambda text: None, 5)
    assert [one.timed_out for one in found] == [False, False, True, False, False]
    assert [one.deaths for one in found] == [
        {},
        {0: "exited with 7"},
        {},
        {0: "was killed by SIGKILL"},
        {},
    ]
    assert [bool(details(one)) for one in found] == [True, False, False, False, True]


def test_what_moves_beside_a_slow_one_is_no_silence(
    tmp_path: Path, scripted: Callable[..., None]
) -> None:
    """Each that runs slows the others, so that one of them may be silent for longer."""
    scripted("sleep 1.6", "sleep 0.5", "sleep 0.5", "sleep 0.5")
    found = ranks.run_groups(groups(tmp_path, 4), 1.2, lambda text: None, 2)
    assert not any(one.timed_out for one in found)


def test_an_interrupt_leaves_no_worker(tmp_path: Path, scripted: Callable[..., None]) -> None:
    scripted(*["sleep 60"] * 3)
    pids = [tmp_path / f"process{process}.pid" for process in (1, 2, 3)]

    def interrupt() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until and not all(p.exists() and p.read_text() for p in pids):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run_groups(groups(tmp_path, 3), 60, lambda text: None, 3)
    thread.join()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("struck", [1, 2])
def test_an_interrupt_in_the_middle_of_a_start_leaves_no_worker(
    tmp_path: Path, scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch, struck: int
) -> None:
    scripted(*["sleep 60"] * 2)
    started = strike_start(monkeypatch, struck)
    with pytest.raises(KeyboardInterrupt):
        ranks.run_groups(groups(tmp_path, 2), 60, lambda text: None, 2)
    assert [one.returncode for one in started] == [-signal.SIGKILL] * struck


def test_a_second_interrupt_finds_no_worker_that_runs(
    tmp_path: Path, scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the first worker's end is struck; the second one has been killed before."""
    scripted(*["sleep 60"] * 2)
    started = strike_start(monkeypatch, 2, waits=True)
    with pytest.raises(KeyboardInterrupt):
        ranks.run_groups(groups(tmp_path, 2), 60, lambda text: None, 2)
    assert [one.wait(20) for one in started] == [-signal.SIGKILL] * 2


def test_a_start_that_fails_ends_those_that_have_started(
    tmp_path: Path, scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted("sleep 60", "true")
    command, started = ranks.worker_command, []

    def second_fails(spec: Path) -> list[str]:
        started.append(spec)
        return command(spec) if len(started) == 1 else [str(tmp_path / "absent")]

    monkeypatch.setattr(ranks, "worker_command", second_fails)
    seen: list[subprocess.Popen[bytes]] = []
    kill = ranks._kill
    monkeypatch.setattr(ranks, "_kill", lambda one: (seen.append(one.process), kill(one)))
    with pytest.raises(FileNotFoundError):
        ranks.run_groups(groups(tmp_path, 2), 60, lambda text: None, 2)
    assert [one.returncode for one in seen] == [-signal.SIGKILL]


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 5))
def test_every_group_runs_once_and_never_more_than_allowed(looks: list[int], at_once: int) -> None:
    """looks: how often each group is looked at before it is over."""
    left, now, killed = dict(enumerate(looks)), set[int](), []

    def begin(group: Any, place: Any) -> None:
        group.watched.append(place)
        now.add(place)
        assert len(now) <= at_once

    def is_over(group: Any, clock: float) -> bool:
        (place,) = group.watched
        assert place in now
        left[place] -= 1
        return left[place] < 0

    def end(groups: Any) -> None:
        for group in groups:
            now.remove(*group.watched)
            killed.extend(group.watched)

    begun: list[int] = []
    fakes: dict[str, Any] = {
        "_begin": begin,
        "_is_over": is_over,
        "_end_all": end,
        "_has_moved": lambda group: True,
        "_progress": lambda watched: "",
        "_outcome": lambda watched, silent: (watched[0], silent),
        "POLL": 0,
    }
    with mock.patch.multiple(ranks, **fakes):
        given_groups: Any = list(left)
        found: Any = ranks.run_groups(given_groups, 60, lambda text: None, at_once, begun.append)
    assert found == [(place, False) for place in range(len(looks))]
    assert begun == sorted(killed) == list(range(len(looks)))
    assert not now


def collected(folder: Path, processes: int) -> tuple[list[Any], list[str]]:
    plan = Plan("c", "f.py::c", ["process"], 1, {"process": processes})
    case = Case(name="c", execute=lambda: None, claims=("process",))
    told: list[str] = []
    records = running.collect(
        [(Found(case, "f.py::c"), plan)], 1, RunOptions(processes=processes), folder, told.append
    )
    return records, told


def test_the_claim_process_has_several_at_once_where_the_main_run_allows_it(
    tmp_path: Path, scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    scripted("true", "sleep 0.5", "exit 3", "sleep 0.2", "true", "true", first=0)
    records, told = collected(tmp_path, 5)
    troubles = [one for one in records if isinstance(one, Trouble)]
    assert [(one.process, one.reason) for one in troubles] == [
        (0, "unsupported"),
        (1, "unsupported"),
        (2, "crashed"),
        (3, "unsupported"),
        (4, "unsupported"),
        (5, "unsupported"),
    ]
    assert troubles[2].claim == "process"
    assert 2 <= most_at_once(tmp_path) <= 3
    started = [text for text in told if "fresh" in text]
    assert started == [f"c: fresh process {number} of 5" for number in range(1, 6)]


def test_a_main_run_that_used_no_gpu_has_one_after_another(
    tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted("true", "sleep 0.1", "true", "true", first=0)
    lines = tmp_path / "process0.lines"
    lines.write_text(f"{to_line(Finished('c', 0))}\n{DONE}\n")
    records, _ = collected(tmp_path, 3)
    assert [one.process for one in records if isinstance(one, Finished)] == [0, 1, 2, 3]
    assert most_at_once(tmp_path) == 1


def test_after_a_main_run_that_died_there_are_none(
    tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted("exit 4", first=0)
    records, told = collected(tmp_path, 3)
    assert [(one.reason, one.claim) for one in records] == [("crashed", None)]
    assert not any("fresh" in text for text in told)
    assert most_at_once(tmp_path) == 1


ON_A_GPU = """
import os, time
import torch, verify

def note():
    with open({times!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{time.monotonic_ns()}}\\n")

note()
if {device!r} == "cuda":
    time.sleep(3)  # far longer than starting the next one takes

@verify.case(inputs={{"x": verify.normal(64, 8)}}, claims=("process",), device={device!r})
def doubled(x):
    out = x * 2
    note()
    return out
"""


def lives(tmp_path: Path, device: str) -> dict[str, tuple[int, int]]:
    """By process of a real run, from its import of the case to its last execution, nanoseconds."""
    file, times = tmp_path / "cases.py", tmp_path / "times"
    file.write_text(ON_A_GPU.format(times=str(times), device=device))
    result = running.run([str(file)], RunOptions(processes=3, keep=tmp_path / "kept"))
    (claim,) = result["cases"][0]["claims"]
    assert (claim["verdict"], claim["executions"]) == ("VERIFIED", 3), claim["findings"]
    found: dict[str, list[int]] = {}
    for line in times.read_text().splitlines():
        pid, when = line.split()
        if int(pid) != os.getpid():  # which looks for the cases
            found.setdefault(pid, []).append(int(when))
    return {pid: (min(seen), max(seen)) for pid, seen in found.items()}


def together(lived: dict[str, tuple[int, int]]) -> int:
    return max(sum(a <= begun <= b for a, b in lived.values()) for begun, _ in lived.values())


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_fresh_processes_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    lived = lives(tmp_path, "cuda")
    assert len(lived) == 4
    assert together(lived) >= 2


@pytest.mark.slow
def test_real_workers_may_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "at_once", lambda finished, ranks, timeout: 3)
    lived = lives(tmp_path, "cpu")
    assert len(lived) == 4
