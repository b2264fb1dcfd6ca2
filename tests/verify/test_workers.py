"""One worker: agreement of ranks through a store, heartbeat, kept tensors, what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from verify import workers
from verify.cases import Case
from verify.errors import CaseError, UnsupportedError, VerifyError
from verify.evidence import Failure, Finished, Plan, Trouble, to_line
from verify.targets import Found
from verify.workers import Agreement, WorkerSpec, read_evidence, write_spec

FAILURE = Failure("ValueError", "boom", "...")


def agree_all(failures: list[Failure | None], late: dict[int, float] | None = None) -> list[Any]:
    """The answer of every rank, each in a thread of its own."""
    store = dist.HashStore()
    world = len(failures)
    agreements = [Agreement(store, rank, world, "p0/c0") for rank in range(world)]
    answers: list[Any] = [None] * world

    def one(rank: int) -> None:
        time.sleep((late or {}).get(rank, 0))
        answers[rank] = agreements[rank](failures[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return [*answers, agreements]


def test_all_agree_that_all_went_well() -> None:
    *answers, agreements = agree_all([None, None, None], {1: 0.2})
    assert answers == [None, None, None]
    assert not any(a.abandoned for a in agreements)


def test_one_failure_is_everybody_s_but_only_its_own_is_a_cause() -> None:
    *answers, agreements = agree_all([None, FAILURE, None])
    assert answers[1] is FAILURE
    for other in (answers[0], answers[2]):
        assert other.after_peer
        assert "rank 1" in other.message
    assert not any(a.abandoned for a in agreements)


def test_a_rank_that_failed_alone_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PEER_GRACE", 0.3)
    store = dist.HashStore()
    alone = Agreement(store, 0, 2, "p0/c0")
    started = time.monotonic()
    assert alone(FAILURE) is FAILURE
    assert 0.3 <= time.monotonic() - started < 5
    assert alone.abandoned
    # the peer's collective breaks afterwards: a consequence, not a cause
    peer = Agreement(store, 1, 2, "p0/c0")
    answer = peer(Failure("RuntimeError", "connection closed by peer", ""))
    assert answer is not None
    assert peer.abandoned
    assert answer.after_peer


def test_one_rank_needs_no_store() -> None:
    agree = Agreement(None, 0, 1, "x")
    assert agree(None) is None
    assert agree(FAILURE) is FAILURE


def test_agreements_do_not_mix_executions() -> None:
    store = dist.HashStore()
    a, b = (Agreement(store, rank, 2, "p0/c0") for rank in range(2))
    store.set("p0/c0/1/1", "error")
    store.set("p0/c0/2/1", "ok")
    assert a(None) is not None
    assert a(None) is None
    assert b.count == 0


def test_heartbeat_counts_without_anything_heavy(tmp_path: Path) -> None:
    """In a process of its own, since a heart does not stop before its process does."""
    lines = [
        "import sys, time, pathlib",
        "from verify import workers",
        "workers.BEAT = 0.02",
        f"workers.start_heartbeat(pathlib.Path({str(tmp_path / 'beat')!r}))",
        "time.sleep(1)",
        "assert 'torch' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
    assert int((tmp_path / "beat").read_text() or "9") >= 3


def spec_of(folder: Path, **more: Any) -> WorkerSpec:
    given = {"plans": [], "rank": 1, "world": 2, "process": 3, "folder": str(folder), "threads": 1}
    return WorkerSpec(**{**given, "timeout": 9.0, **more})


def test_a_spec_travels_as_json(tmp_path: Path) -> None:
    plan = Plan("c", "a file.py::c", ["repeat"], 2, {"repeat": 5}, constants=[], sources=["a b"])
    spec = spec_of(tmp_path, plans=[asdict(plan)], degrees=[1, 2])
    path = write_spec(spec)
    assert path.name == "process3-rank1.spec.json"
    again = WorkerSpec(**json.loads(path.read_text()))
    assert again == spec
    assert Plan(**again.plans[0]) == plan
    assert "" not in again.paths


def test_base_outputs_are_kept_with_every_bit_and_not_when_they_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = torch.tensor([0x7FC00001, -(2**31)], dtype=torch.int32).view(torch.float32)
    path = tmp_path / "base.pt"
    workers._keep(path, {"out": payload})
    kept = workers._load(path, "out")
    assert kept is not None
    assert torch.equal(kept.view(torch.int32), payload.view(torch.int32))
    assert workers._load(path, "other") is None
    assert workers._load(tmp_path / "none.pt", "out") is None
    monkeypatch.setattr(workers, "MAX_KEPT_BYTES", 7)
    workers._keep(tmp_path / "large.pt", {"out": payload})
    assert not (tmp_path / "large.pt").exists()


def test_evidence_of_before_a_death_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    lines = [to_line(Trouble("c", "crashed", str(i))) for i in range(3)]
    path.write_text("\n".join(lines)[:-5])
    records, done = read_evidence(path)
    assert [r.detail for r in records if isinstance(r, Trouble)] == ["0", "1"]
    assert not done


def test_a_rank_that_succeeded_does_not_wait_for_ever_either() -> None:
    store = dist.HashStore()
    lonely = Agreement(store, 0, 2, "p0/c0", limit=0.05)
    failure = lonely(None)
    assert failure is not None
    assert failure.type == "PeerLost"
    assert "[1]" in failure.message
    assert failure.after_peer
    assert lonely.abandoned


ORPHAN = """
import os, pathlib, subprocess, sys, time
from verify import workers
workers.BEAT = 0.02
if len(sys.argv) > 2:
    workers.start_heartbeat(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
    time.sleep(60)
words = [sys.executable, "-c", os.environ["SCRIPT"], sys.argv[1], str(os.getpid())]
child = subprocess.Popen(words, start_new_session=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(child.pid, flush=True)
os._exit(0)  # as if killed: the child is left alone
"""


def test_a_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(tmp_path / "beat")],
        env={**os.environ, "SCRIPT": ORPHAN},
        stdout=subprocess.PIPE,  # ends only when the child, which has it too, does
        check=True,
        timeout=30,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < deadline:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            break  # a zombie: it has ended
        time.sleep(0.02)
    else:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CaseError("wrong"), "case-error"),
        (UnsupportedError("cannot"), "unsupported"),
    ],
)
def test_a_refusal_while_a_case_runs_is_told_and_the_next_case_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: VerifyError, reason: str
) -> None:
    from verify import conduct

    def refuse(session: Any) -> None:
        raise error

    monkeypatch.setattr(conduct, "conduct", refuse)
    case = Case(name="c", execute=lambda: torch.ones(2))
    plan = Plan("c", "c", ["repeat"], 1, {"repeat": 2})
    told: list[Any] = []
    spec = spec_of(tmp_path, rank=0, world=1, process=0)
    workers.run_cases(spec, [(Found(case, "c"), plan)] * 2, None, {}, None, told.append)
    troubles = [one for one in told if isinstance(one, Trouble)]
    assert [(one.reason, one.detail) for one in troubles] == [(reason, str(error))] * 2
    assert sum(isinstance(one, Finished) for one in told) == 2
