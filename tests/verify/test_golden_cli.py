"""`verify golden status | update | prune` and `verify run --golden`, as commands of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from golden_runs import run_here

from verify.cli import main
from verify.goldens import recording, store

ROOT = Path(__file__).resolve().parents[2]
CASES = """
import os
import torch, verify
X = {{"x": verify.normal(8, 4)}}

def reference(inputs, upstream, view):
    x = inputs["x"].double()
    return {{"out": verify.reduction(x.sum(1), x.abs().sum(1), 4, torch.float32)}}

@verify.case(inputs=X, claims=("repeat", "golden"), golden="exact")
def doubled(x):
    return x * {factor}

@verify.case(inputs=X, claims=("repeat", "golden"), golden="bits")
def keyed(x):
    return torch.tanh(x)

@verify.case(inputs=X, claims=("repeat", "golden"), golden="float64", reference=reference)
def total(x):
    return {total}

@verify.case(inputs=X, claims=("repeat",))
def plain(x):
    return x
"""
UNSTABLE = """
import os
import verify
@verify.case(inputs={"x": verify.normal(8)}, claims=("repeat", "golden"), golden="exact")
def unstable(x):
    return x + int.from_bytes(os.urandom(4), "little")
"""


ODD = """
import torch, verify
@verify.case(inputs={"x": verify.normal(8)}, claims=("repeat", "golden"), golden="exact")
def odd(x):
    return torch.log(x)
"""


class Project:
    """A folder with case files, and what one command in it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("1", "x.sum(1)")
        (folder / "unstable.py").write_text(UNSTABLE)
        (folder / "odd.py").write_text(ODD)

    def write(self, factor: str, total: str) -> None:
        (self.folder / "cases.py").write_text(CASES.format(factor=factor, total=total))

    def run(self, *words: str) -> str:
        """A process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "verify", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.code, self.error = done.returncode, done.stderr
        return done.stdout

    def call(self, *words: str) -> str:
        """The same in this process, where updates start no workers."""
        done = CliRunner().invoke(main, words)
        self.code, self.error = done.exit_code, done.stderr
        return done.stdout

    def state(self) -> dict[str, bytes]:
        folder = self.folder / "golden"
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in ("CI", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recording, "run_here", run_here)
    return Project(tmp_path)


def test_from_the_first_golden_to_the_last(project: Project) -> None:
    shown = project.call("golden", "status", "cases.py")
    assert project.code == 3
    assert shown.count("missing") == 3
    table = project.call("golden", "update", "cases.py", "--reason", "first")
    assert project.code == 0, project.error
    assert table.count("| - | - | - |") == 0
    assert table.count("| - |") == 3 + 3, "no old digest; no distance and no count"
    assert "| `doubled` |" in table
    first = project.state()
    shown = project.call("golden", "status", "cases.py")
    assert project.code == 0
    assert shown.count("stored") == 3
    assert shown.splitlines()[-1].endswith(f"{sum(map(len, first.values())):,} bytes")
    rows = json.loads(project.call("golden", "status", "--format", "json"))
    assert [row["case"] for row in rows] == ["doubled", "keyed", "total"]

    assert project.call("golden", "update", "cases.py") == "No golden changed.\n"
    assert json.loads(project.call("golden", "update", "cases.py", "--format", "json")) == []
    assert project.state() == first

    (project.folder / "cases.py").unlink()
    gone = project.call("golden", "prune", "--dry-run")
    assert gone.splitlines()[-1] == "3 would be removed"
    assert project.state() == first
    assert project.call("golden", "prune").splitlines()[-1] == "3 removed"
    assert set(project.state()) == {store.INDEX}


@pytest.mark.slow
def test_processes_make_find_and_replace_a_golden(project: Project) -> None:
    project.run("golden", "update", "cases.py", "--reason", "first")
    assert project.code == 0, project.error
    project.write("3", "x[:, [1, 0, 2, 3]].sum(1)")
    broken = project.run("run", "cases.py")
    assert project.code == 1
    assert "verdict=MISMATCH doubled / golden: golden-differs" in broken
    assert "the code has changed since the golden was made" in broken
    cases = re.findall(r"verdict=MISMATCH (\S+) / (\S+):", broken)
    assert cases == [("doubled", "golden")], "other bits inside the budget are no difference"
    told = project.run("golden", "update", "cases.py", "--reason", "x3", "--format", "json")
    assert [(row["case"], row["reason"]) for row in json.loads(told)] == [("doubled", "x3")]
    assert {e.case: e.reason for e in store.read(project.folder / "golden").entries} == {
        "doubled": "x3",
        "keyed": "first",
        "total": "first",
    }


@pytest.mark.parametrize(
    ("words", "variable", "said"),
    [
        (["update", "cases.py", "--reason", "r"], "CI", "not written in CI"),
        (["update", "cases.py::plain"], "", "no case of cases.py::plain declares a golden"),
        (["update", "cases.py", "unstable.py"], "", "unstable is not VERIFIED: repeat"),
        (["update", "odd.py"], "", "a broken run must not become a golden"),
        (["update"], "", "Missing argument"),
        (["prune"], "", "golden: no such folder of goldens"),
        (["status", "none.py"], "", "no such file: none.py"),
    ],
    ids=["ci", "undeclared", "unstable", "nonfinite", "no-target", "no-folder", "no-file"],
)
def test_what_cannot_be_done_says_why_and_writes_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch, words: list[str], variable: str, said: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, "true")
    assert project.call("golden", *words) == ""
    assert project.code == 2
    assert said in project.error
    assert not (project.folder / "golden").exists()


def test_values_that_are_not_finite_can_be_meant(project: Project) -> None:
    project.call("golden", "update", "odd.py", "--allow-nonfinite")
    assert project.code == 0, project.error
    assert store.read(project.folder / "golden").entries[0].nonfinite > 0


def test_a_damaged_index_ends_with_2_before_anything_runs(project: Project) -> None:
    (project.folder / "golden").mkdir()
    (project.folder / "golden" / store.INDEX).write_text("[]")
    for words in (
        ["run", "cases.py::doubled", "--claims", "golden"],
        ["golden", "status"],
        ["golden", "prune"],
        ["golden", "update", "cases.py"],
    ):
        assert project.call(*words) == ""
        assert project.code == 2
        assert store.INDEX in project.error


def test_another_folder(project: Project) -> None:
    project.call("golden", "update", "cases.py::doubled", "--golden", "deep/er")
    assert project.code == 0, project.error
    assert [e.target for e in store.read(project.folder / "deep/er").entries] == [
        "../cases.py::doubled"
    ]
    project.call("golden", "status", "--golden", "deep/er")
    assert project.code == 0
    assert project.call("golden", "prune", "--golden", "deep/er") == "0 removed\n"


def test_a_terminal_gets_a_plain_table_and_a_pipe_markdown(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def update(*words: str) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            main.main(["golden", "update", "cases.py::doubled", *words])
        return capsys.readouterr().out

    for terminal, first, later in ((True, "case ", ()), (False, "| case |", ("--format", "text"))):
        shutil.rmtree(project.folder / "golden", ignore_errors=True)
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        shown = update()
        assert shown.startswith(first)
        assert ("`" in shown) is not terminal
        assert update(*later) == "No golden changed.\n"
    shutil.rmtree(project.folder / "golden")
    assert update("--format", "text").startswith("case "), "asked for, it is the same anywhere"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shutil.rmtree(project.folder / "golden")
    assert update("--format", "markdown").startswith("| case |")
