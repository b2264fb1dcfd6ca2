"""The pytest plugin and goldens: checked like any claim, made with --verify-update."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nested_pytest import run_here

import _mok_verify_pytest as plugin
from verify import results
from verify.goldens import store

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os
import torch, verify

X = {{"x": verify.normal(8, 4)}}

@verify.case(inputs=X, claims=("repeat", "golden"), golden="exact", name="a")
def first(x):
    return x * {factor}

@verify.case(inputs=X, claims=("repeat", "golden"), golden="exact", name="a/b")
def below(x):
    return x + {noise}

@verify.case(inputs=X, claims=("repeat",))
def plain(x):
    return x

def test_other(bitwise):
    bitwise.equal(torch.ones(2), torch.ones(2))

def test_promised(bitwise):
    bitwise.check(first{claims})
"""


class Project:
    """A folder with one test file, and what one pytest run said; `code` is its exit status."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ini = "[pytest]\naddopts = -p no:cacheprovider\nverify_golden = stored\n"
        (folder / "pytest.ini").write_text(ini)
        (folder / "sub").mkdir()
        self.golden = folder / "stored"

    def write(self, factor: int, noise: str = "1", claims: str = "") -> None:
        text = TESTS.format(factor=factor, noise=noise, claims=claims)
        (self.folder / "test_it.py").write_text(text)

    def run(self, *words: str, cwd: str = ".", **variables: str) -> str:
        plugins = ["-p", "xdist.plugin", "-p", "_mok_verify_pytest"]
        away = ("CI", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, *words],
            cwd=self.folder / cwd,
            env={
                **{name: value for name, value in os.environ.items() if name not in away},
                "PYTHONPATH": str(ROOT),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        self.code = done.returncode
        return done.stdout

    def here(self, *words: str, cwd: str = ".", **variables: str) -> str:
        """The same in this process, without xdist."""
        self.code, said = run_here(self.folder, words, cwd, **variables)
        return said

    def reasons(self) -> dict[str, str]:
        return {entry.case: entry.reason for entry in store.read(self.golden).entries}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.slow
def test_goldens_are_made_checked_and_refused(project: Project) -> None:
    """One story, since every run starts processes."""
    # made under xdist, from another directory, while other tests run as usual
    project.write(factor=2, claims=", claims=('repeat',)")
    made = project.run("-v", "-n", "2", "--verify-update", "the first", "..", cwd="sub")
    assert "5 passed" in made, made
    assert "verify: 2 of 2 goldens changed in ../stored" in made
    assert "verify: verdict=VERIFIED 3 cases" in made, "what was made was not checked"
    assert project.reasons() == {"a": "the first", "a/b": "the first"}
    targets = [entry.target for entry in store.read(project.golden).entries]
    assert targets == ["test_it.py::a", "test_it.py::a/b"], "from above the folder"
    assert not (project.folder / "sub" / "golden").exists()

    # without the option they are checked like any other claim
    project.write(factor=3)
    shown = project.here("-k", "not plain", "--verify-report=out", "..", cwd="sub")
    assert project.code == 1
    assert "2 failed, 2 passed" in shown, shown
    document = results.read(project.folder / "sub" / "out")
    found = {
        (case["target"].rpartition("::")[2], claim["claim"]): (
            claim["verdict"],
            [finding["reason"] for finding in claim["findings"]],
        )
        for case in document["cases"]
        for claim in case["claims"]
    }
    assert found["a", "golden"] == ("MISMATCH", ["golden-differs"])
    assert found["test_promised", "golden"] == ("MISMATCH", ["golden-differs"])
    assert found["a/b", "golden"] == ("VERIFIED", [])
    assert "goldens changed" not in shown

    # a refused update fails its test and no other
    project.write(factor=3, noise='int.from_bytes(os.urandom(4), "little")')
    shown = project.here("--verify-update", "times three", "-k", "first or below")
    assert project.code == 1
    assert "1 failed, 1 passed" in shown, "a failure, not an error"
    assert "no golden was written: a/b is not VERIFIED: repeat: verdict=MISMATCH" in shown
    assert "Traceback" not in shown
    assert "verify: 1 of 1 goldens changed in stored" in shown
    assert project.reasons() == {"a": "times three", "a/b": "the first"}


@pytest.mark.slow
def test_ci_makes_no_goldens(project: Project) -> None:
    project.write(factor=4)
    shown = project.here("-k", "first", "--verify-update", "r", CI="true")
    assert project.code == 1
    assert "goldens are not written in CI" in shown
    assert "verify: 0 of 0 goldens changed" in shown
    assert not project.golden.exists()


@pytest.mark.parametrize("reason", ["", "  ", "pytest.ini", "sub"])
def test_an_update_needs_a_reason(project: Project, reason: str) -> None:
    """A forgotten one would take the first path of the command line for it."""
    shown = project.here("--verify-update", reason)
    assert project.code == 4
    assert "give the reason why goldens change" in shown


def test_where_goldens_lie(tmp_path: Path) -> None:
    def folder(option: str | None, ini: str) -> Path:
        config: Any = SimpleNamespace(
            rootpath=tmp_path, getoption=lambda name: option, getini=lambda name: ini
        )
        return plugin._golden(config)

    assert folder(None, "golden") == tmp_path / "golden"
    assert folder(None, "/elsewhere") == Path("/elsewhere")
    assert folder("here", "golden") == Path.cwd() / "here"
