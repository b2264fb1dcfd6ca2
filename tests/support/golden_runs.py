"""What tests of goldens share: `verify golden update` in one process, and git repositories."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import verify
from verify.cases import Case
from verify.conduct import conduct
from verify.decision import decide
from verify.evidence import Execution, Plan, Record
from verify.goldens import packing, store
from verify.plans import RunOptions, plans_of
from verify.sessions import Session
from verify.staging import prepare
from verify.targets import Found
from verify.verdicts import CaseVerdict
from verify.workers import golden_path

X = {"x": verify.normal(8, 4)}


def run_here(
    found: Sequence[Found], options: RunOptions, progress: Callable[[str], None]
) -> tuple[list[Plan], list[CaseVerdict], list[Execution]]:
    """`running.run_here` on one rank, without starting processes."""
    plans = plans_of(found, options)
    assert options.keep is not None
    place = options.keep / "ranks1"
    place.mkdir()
    verdicts = []
    for index, (one, plan) in enumerate(zip(found, plans, strict=True)):
        records: list[Record] = []
        session = Session(prepare(one.case), plan, records.append)
        session.keep_golden = golden_path(place, index)
        conduct(session)
        verdicts.append(decide(plan, records))
    return plans, verdicts, []


def found(name: str, function: Callable[..., Any], golden: str = "exact", **options: Any) -> Found:
    """A case as a target gives it."""
    file = options.pop("file", "cases.py")
    given = {"inputs": X, "claims": ("repeat",), "golden": golden, **options}
    return Found(Case(name=name, execute=function, **given), f"{file}::{name}")


def entry(
    case: str, tensors: dict[str, torch.Tensor], kind: str = "exact", **fields: Any
) -> tuple[store.Entry, dict[str, torch.Tensor]]:
    """An entry of these tensors, and the tensors; those of float64 goldens are packed already."""
    digests = packing.digests_of(tensors)
    outputs = {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items()}
    given: dict[str, Any] = {
        "key": {"cpu": "x"} if kind == "bits" else None,
        "reason": "because",
        "target": f"cases.py::{case}",
        "file": packing.file_name(case, kind, digests),
        "inputs": "0",
        "source_digest": "",
        "made": {},
        "outputs": outputs,
        "tensors": digests,
    }
    return store.Entry(case=case, kind=kind, **{**given, **fields}), tensors


def put(folder: Path, *made: tuple[store.Entry, dict[str, torch.Tensor]]) -> None:
    """Makes these entries the state of a folder."""
    files = {one.file: packing.to_bytes(tensors, one.case, one.kind) for one, tensors in made}
    with store.locked(folder):
        store.write(folder, [one for one, _ in made], files)


def held_while(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *functions: tuple[Any, str]
) -> dict[str, list[bool]]:
    """Whether a writer would have had to wait, at every later call of a module's function."""
    seen: dict[str, list[bool]] = {name: [] for _, name in functions}

    def held() -> bool:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            seen[name].append(held())
            return function(*given, **named)

        return call

    for module, name in functions:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return seen


def git(folder: Path, *words: str) -> str:
    """A git command in a folder, whatever the user's configuration."""
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, "-C", str(folder), *words],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(folder: Path) -> str:
    """Everything in the folder as a commit; its name."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "state")
    return git(folder, "rev-parse", "HEAD")
