"""Under torchrun: the group that is there is joined, rank 0 writes, nobody is forgotten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verify import results

pytestmark = pytest.mark.slow

CASES = """
import os
import torch, verify
import torch.distributed as dist

@verify.case(
    inputs={
        "x": verify.normal(9, 4, requires_grad=True),
        "w": verify.normal(4, requires_grad=True),
    },
    claims=("repeat", "process", "ep"),
    placement={
        "x": verify.sharded(0),
        "w": verify.replicated,
        "out": verify.sharded(0),
        "grad.w": verify.local,
        "total": verify.replicated,
    },
    batch={"x": 0, "out": 0},
    ep=(1, 2),
)
def good(x, w, group=None):
    total = torch.tensor(float(len(x)))
    if group is not None:
        dist.all_reduce(total, group=group)
    return {"out": x * w, "total": total}

@verify.case(inputs={"x": verify.normal(5)}, claims=("repeat",), placement={"*": verify.replicated})
def bad(x):
    return x + (int(os.environ["RANK"]) == 1) * 0.5

@verify.case(inputs={"x": verify.normal(5)}, claims=("repeat",), placement={"*": verify.replicated})
def alone(x, calls=[]):
    calls.append(1)
    if int(os.environ["RANK"]) == 1 and len(calls) == 3:
        raise ValueError("on rank 1 alone")
    return x * 2
"""


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, *launcher.split(), "-m", "verify", "run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_two_ranks_of_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    arguments = [
        "cases.py",
        "--processes",
        "1",
        "--runs",
        "3",
        "--report",
        "report",
        "--format",
        "json",
    ]
    done = torchrun(tmp_path, *arguments)
    document = json.loads(done.stdout), results.read(tmp_path / "report")
    assert document[0] == document[1], "one document, printed and written once"
    assert document[0]["ranks"] == 2
    claims = {(c["case"], k["claim"]): k for c in document[0]["cases"] for k in c["claims"]}
    found = {name: {f["reason"] for f in claim["findings"]} for name, claim in claims.items()}
    assert found == {
        ("good", "repeat"): set(),
        ("good", "process"): set(),
        ("good", "ep"): set(),
        ("good", "rank"): set(),
        ("bad", "repeat"): set(),
        ("bad", "rank"): {"ranks-differ"},
        ("alone", "repeat"): {"raises-sometimes"},
        ("alone", "rank"): set(),
    }, done.stderr[-3000:]
    for claim in claims.values():
        assert [rank["rank"] for rank in claim["ranks"]] == [0, 1]
        assert all(rank["executions"] >= 1 for rank in claim["ranks"])
    assert {effect["ep"] for effect in claims["good", "ep"]["effective"]} == {1}
    assert done.returncode == 1, "a launcher makes 1 of any code; here it is the right one"
    assert results.exit_code(document[0]) == 1


def test_all_is_well_ends_with_zero(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = torchrun(tmp_path, "cases.py::good", "--claims", "repeat,rank", "--report", "out")
    assert done.returncode == 0, done.stderr[-3000:]
    assert results.exit_code(results.read(tmp_path / "out")) == 0
    assert done.stdout.count("verdict=VERIFIED") >= 2
