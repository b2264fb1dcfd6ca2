"""git as the gate and the goldens ask it: no lock, no terminal, English, errors with a reason."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from verify import git
from verify.errors import InputFileError


def stand_in(folder: Path, script: str) -> None:
    """A program `git` that is this script."""
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_what_it_is_given(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("KEPT", "yes")
    stand_in(
        path,
        'echo "$LC_ALL $GIT_OPTIONAL_LOCKS $GIT_TERMINAL_PROMPT $KEPT"; cat; '
        'for word; do echo "[$word]"; done',
    )
    done = git.run("show", "a b", folder=Path("some where"))
    assert done.returncode == 0
    words = ["[-C]", "[some where]", "[show]", "[a b]"]
    assert done.stdout.decode().splitlines() == ["C 0 0 yes", *words]
    assert git.run("x").stdout.decode().splitlines()[1:] == ["[x]"]


def test_it_does_not_read_what_is_typed(path: Path) -> None:
    stand_in(path, "cat")
    reader, writer = os.pipe()
    os.write(writer, b"typed\n")
    os.close(writer)
    kept = os.dup(0)
    try:
        os.dup2(reader, 0)
        assert git.run("status").stdout == b""
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reader)


def test_what_it_says(path: Path) -> None:
    stand_in(path, "echo ' no: such thing ' >&2; exit 3")
    done = git.run("x")
    assert (done.returncode, git.said(done)) == (3, "no: such thing")
    stand_in(path, "printf '\\377' >&2; exit 3")
    assert git.said(git.run("x")) == "\ufffd"
    stand_in(path, "exit 4")
    assert git.said(git.run("x")) == "exit code 4"


def test_without_git_and_with_one_that_does_not_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(path, "exec sleep 60")
    monkeypatch.setattr(git, "_TIMEOUT", 0.2)
    with pytest.raises(InputFileError, match=r"git status failed: .*timed out"):
        git.run("status")
    (path / "git").write_text("no program")
    monkeypatch.setenv("PATH", str(path))
    with pytest.raises(InputFileError, match="git status failed"):
        git.run("status")
    monkeypatch.setenv("PATH", str(path / "none"))
    with pytest.raises(InputFileError, match="git is not installed, or not on PATH"):
        git.run("status")


@pytest.mark.parametrize("text", ["", "-h", "--output=x", "a\0b"])
def test_what_is_no_revision(text: str) -> None:
    assert not git.may_be_revision(text)


@pytest.mark.parametrize("text", ["HEAD", "HEAD~2", "v1", "a-b", "@{u}", "\u00e9", "0" * 40])
def test_what_git_may_be_asked(text: str, tmp_path: Path) -> None:
    assert git.may_be_revision(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    done = git.run("rev-parse", "--verify", f"{text}^{{commit}}", folder=tmp_path)
    assert done.returncode != 0
    assert "fatal" in git.said(done), "an answer, not a crash"
