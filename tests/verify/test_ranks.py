"""Four ranks: a dead or stopped one is missing, soon, and never a pass; and what only ranks show.

The clock of the first tests is the promise itself: a verdict within 60 seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verify import ranks, results
from verify.evidence import Trouble, to_line
from verify.running import RunOptions, run
from verify.workers import DONE, WorkerSpec

pytestmark = pytest.mark.slow

PROMISE = 60.0  # seconds

FAULT = """
import atexit, os, signal
import torch, verify
import torch.distributed as dist

HIT = os.environ.get("RANK") == "2"
PLACE, SIGNAL = {place!r}, signal.{signal}

def hit():
    os.kill(os.getpid(), SIGNAL)

if HIT and PLACE == "import":
    hit()
if HIT and PLACE == "exit":
    atexit.register(hit)
CALLS = []

@verify.case(
    inputs={{"x": verify.normal(64)}},
    claims=("repeat",),
    placement={{"*": verify.replicated}},
    ranks=4,
)
def summed(x, group=None):
    CALLS.append(1)
    if HIT and PLACE == "collective" and len(CALLS) == 4:
        hit()
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out
"""


def measured(path: Path, place: str, signal: str) -> tuple[dict[str, Any], float]:
    path.write_text(FAULT.format(place=place, signal=signal))
    started = time.monotonic()
    result = run([str(path)], RunOptions(claims=("repeat",)))
    return result, time.monotonic() - started


@pytest.mark.parametrize("place", ["import", "collective", "exit"])
def test_one_of_four_ranks_is_killed_and_separately_stopped(tmp_path: Path, place: str) -> None:
    signals = {"SIGKILL": "killed by SIGKILL", "SIGSTOP": "no heartbeat"}
    with ThreadPoolExecutor(2) as pool:
        running = {
            name: pool.submit(measured, tmp_path / f"{place}_{name}.py", place, name)
            for name in signals
        }
    for name, text in signals.items():
        result, seconds = running[name].result()
        (claim,) = result["cases"][0]["claims"]
        assert seconds < PROMISE, name
        assert claim["verdict"] == "UNVERIFIED", name
        assert {f["reason"] for f in claim["findings"]} == {"missing-rank"}, name
        assert any(f["rank"] == 2 and text in f["detail"] for f in claim["findings"]), name
        assert results.exit_code(result) == 3
        kept = {r["rank"]: r["executions"] for r in claim["ranks"]}
        if place == "import":
            assert not any(kept.values())
        elif place == "exit":
            assert all(count >= 5 for count in kept.values()), "all had reported everything"
        else:
            assert 2 <= kept[2] < 5, "what was reported before the death is kept"


CASES = """
import os
import torch, verify
import torch.distributed as dist
from torch import Tensor

RANK = int(os.environ.get("RANK", "0"))
X = {"x": verify.normal(13, 4, requires_grad=True)}
WHOLE = {"x": verify.replicated, "grad.x": verify.replicated, "out": verify.replicated}
LAST = verify.sharded(0, lambda total, parts: [0] * (parts - 1) + [total])
PARTS = {"x": LAST, "out": verify.sharded(0)}
promise = dict(claims=("repeat", "rank"), ranks=4)

def setup_by_rank():
    return {"t": torch.full((3,), float(RANK)) + torch.arange(3.0)}

clean = verify.case(inputs=X, placement=WHOLE, name="clean", **promise)(
    lambda x: x * 2
)
differs = verify.case(inputs=X, placement=WHOLE, name="differs", **promise)(
    lambda x: x * 2 + (0.5 if RANK == 3 else 0.0)
)
unplaced = verify.case(
    inputs=X, placement={"x": verify.replicated}, name="unplaced", **promise
)(lambda x: {"y": x * 2})
other_inputs = verify.case(
    setup=setup_by_rank,
    claims=("repeat", "rank"),
    placement={"*": verify.replicated},
    ranks=4,
    name="other_inputs",
)(lambda t: t * 2)
own_inputs = verify.case(
    setup=setup_by_rank, claims=("rank",), placement={"*": verify.local}, ranks=4, name="own_inputs"
)(lambda t: t * 2)

def by_degree(x: Tensor, group=None, wrong=False):
    size = dist.get_world_size(group) if group is not None else 1
    out = x * 2
    if wrong and size == 2 and len(x):
        out = out.clone()
        with torch.no_grad():
            out[5, 3] += 0.25
    return out

ep = dict(
    inputs=X, placement=PARTS, batch={"x": 0, "out": 0}, ep=(1, 2, 4),
    claims=("ep", "rank"),
    ranks=4,
)
ep_clean = verify.case(name="ep_clean", **ep)(by_degree)
ep_wrong = verify.case(name="ep_wrong", **ep)(lambda x, group=None: by_degree(x, group, True))

@verify.case(inputs=X, claims=("repeat",), placement=WHOLE, ranks=4, name="all_fail")
def all_fail(x):
    raise ValueError("everywhere")

@verify.case(inputs=X, claims=("repeat",), placement=WHOLE, ranks=4, name="one_fails_late")
def one_fails_late(x, calls=[]):
    calls.append(1)
    if RANK == 1 and len(calls) == 3:
        raise ValueError("on rank 1 alone, outside collectives")
    return x * 2
"""

ALONE = """
import os
import verify
import torch.distributed as dist

CALLS = []

@verify.case(
    inputs={"x": verify.normal(64)}, claims=("repeat",), placement={"*": verify.replicated}, ranks=4
)
def alone(x, group=None):
    CALLS.append(1)
    if os.environ.get("RANK") == "1" and len(CALLS) == 2:
        raise KeyError("alone, while the others wait")
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out
"""


def test_what_only_ranks_show(tmp_path: Path) -> None:
    path = tmp_path / "cases.py"
    path.write_text(CASES)
    result = run([str(path)], RunOptions())
    claims = {(c["case"], k["claim"]): k for c in result["cases"] for k in c["claims"]}
    found = {name: {f["reason"] for f in claim["findings"]} for name, claim in claims.items()}
    assert found == {
        ("clean", "repeat"): set(),
        ("clean", "rank"): set(),
        ("differs", "repeat"): set(),
        ("differs", "rank"): {"ranks-differ"},
        ("unplaced", "repeat"): set(),
        ("unplaced", "rank"): {"no-placement"},
        ("other_inputs", "repeat"): {"input-mismatch"},
        ("other_inputs", "rank"): {"input-mismatch"},
        ("own_inputs", "rank"): set(),
        ("ep_clean", "ep"): set(),
        ("ep_clean", "rank"): set(),
        ("ep_wrong", "ep"): {"bits-differ"},
        ("ep_wrong", "rank"): set(),
        ("all_fail", "repeat"): {"case-error"},
        ("all_fail", "rank"): {"case-error"},
        ("one_fails_late", "repeat"): {"raises-sometimes"},
        ("one_fails_late", "rank"): set(),
    }
    details = [f["detail"] for f in claims["differs", "rank"]["findings"]]
    assert all("[3] of 4" in detail for detail in details)
    assert {f["rank"] for f in claims["differs", "rank"]["findings"]} == {3}
    assert "grad.y" not in str(claims["unplaced", "rank"]["findings"])
    assert "y" in claims["unplaced", "rank"]["findings"][0]["detail"]

    wrong = claims["ep_wrong", "ep"]
    assert {f["variant"] for f in wrong["findings"]} == {"ep=2"}
    assert {f["tensor"] for f in wrong["findings"]} == {"out"}
    assert "out[5,3]" in "\n".join(wrong["findings"][0]["difference"]["lines"])
    assert {e["ep"] for e in claims["ep_clean", "ep"]["effective"]} == {1, 2}
    assert set(claims["ep_clean", "ep"]["compared"]) == {"out", "grad.x"}

    late = claims["one_fails_late", "repeat"]
    assert {(f["rank"], f["run"]) for f in late["findings"]} == {(1, 1)}
    for claim in claims.values():
        assert [r["rank"] for r in claim["ranks"]] == [0, 1, 2, 3]
    assert results.exit_code(result) == 1


def test_a_rank_that_raises_alone_inside_a_collective(tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    started = time.monotonic()
    result = run([str(path)], RunOptions(claims=("repeat",)))
    assert time.monotonic() - started < PROMISE
    (claim,) = result["cases"][0]["claims"]
    assert claim["verdict"] == "MISMATCH"
    assert "raises-sometimes" in {f["reason"] for f in claim["findings"]}
    raised = [f for f in claim["findings"] if f["reason"] == "raises-sometimes"]
    assert {(f["rank"], f["run"]) for f in raised} == {(1, 0)}
    assert "alone, while the others wait" in raised[0]["detail"]


def test_workers_see_their_rank_and_not_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    spec = WorkerSpec(plans=[], rank=2, world=4, process=3, folder="", threads=1, timeout=1)
    environment = ranks.worker_environment(spec)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("2", "4")
    assert environment["PYTHONHASHSEED"] == "3", "the order of sets must not matter"
    assert not any(name.startswith("TORCHELASTIC") for name in environment)
    assert "" not in environment["PYTHONPATH"].split(":")
    assert "-P" in ranks.worker_command(Path("spec"))


def watched_sleeper(tmp_path: Path) -> ranks.Watched:
    spec = WorkerSpec(
        plans=[], rank=0, world=1, process=0, folder=str(tmp_path), threads=1, timeout=1
    )
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    return ranks.Watched(spec, process)


def test_a_silent_heart_is_no_death_but_a_stop_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watched_sleeper(tmp_path)
    try:
        (tmp_path / "process0-rank0.beat").write_text("1")
        for now in (0.0, 1000.0, 2000.0):
            ranks._look(one, time.monotonic() + now)
        assert one.death == "", "it runs, whoever holds its lock"
        os.kill(one.process.pid, signal.SIGSTOP)
        while ranks.process_state(one.process.pid) != "T":
            time.sleep(0.01)
        for later, death in ((0.0, ""), (11.0, ""), (12.5, "stopped: no heartbeat for 12 s")):
            ranks._look(one, 5000.0 + later)
            assert one.death == death
        assert one.process.returncode == -signal.SIGKILL
    finally:
        ranks._kill(one)
        one.process.wait()


def test_without_proc_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "process_state", lambda pid: "")
    one = watched_sleeper(tmp_path)
    try:
        (tmp_path / "process0-rank0.beat").write_text("1")
        ranks._look(one, 100.0)
        ranks._look(one, 111.0)
        assert one.death == ""
        ranks._look(one, 113.0)
        assert one.death.startswith("stopped: no heartbeat")
    finally:
        ranks._kill(one)
        one.process.wait()


def test_the_last_record_is_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    assert ranks._last_record(path) is None
    path.write_text("")
    assert ranks._last_record(path) is None
    long = Trouble("c", "crashed", "x" * 500)
    path.write_text("not json\n" + to_line(long) + "\n" + to_line(Trouble("d", "crashed", ""))[:-3])
    assert ranks._last_record(path, 7) == long, "a line that is still being written is not read"
    path.write_text("not json\n" + to_line(long) + "\n" + DONE + "\n")
    assert ranks._last_record(path, 7) == long
    path.write_text(DONE + "\n")
    assert ranks._last_record(path) is None
