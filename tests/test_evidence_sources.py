"""Digests of what was measured: those of a tree are its commit's; what git cannot tell is told."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "ci" / "gpu" / "sources.py"


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_sources", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _repository(folder: Path) -> str:
    """A checkout with a source in each folder; returns its commit."""
    texts = {"csrc/a/b.cu": "1", "csrc/a.cuh": "2\n", "verify/x.py": "3", "tests/test_x.py": "4"}
    texts |= {"mok/note.txt": "5", "ci/gpu/tables.py": "6", "_mok_verify_pytest.py": "7"}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "verify" / "link.py").symlink_to("x.py")
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_digests_of_a_tree_are_those_of_its_commit_until_something_changes(
    sources: ModuleType, tmp_path: Path
) -> None:
    commit = _repository(tmp_path)
    known = sources.of_commit(commit, tmp_path)
    assert set(known) == set(sources.FOLDERS)
    assert sources.of_tree(tmp_path) == known
    lines = "".join(
        f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n"
        for name, text in (("csrc/a.cuh", "2\n"), ("csrc/a/b.cu", "1"))
    )
    assert known["csrc"] == hashlib.sha256(lines.encode()).hexdigest()

    def since() -> list[str]:
        return sources.changed(known, sources.of_tree(tmp_path))

    for name in ("mok/note.txt", "ci/gpu/tables.py"):  # no source; and one that measures nothing
        (tmp_path / name).write_text("other")
    assert since() == []
    (tmp_path / "csrc" / "a" / "b.cu").write_text("other")
    (tmp_path / "mok" / "untracked.py").write_text("")
    (tmp_path / "_mok_verify_pytest.py").unlink()
    assert since() == ["csrc", "mok", "_mok_verify_pytest.py"]
    assert sources.changed({"verify": known["verify"]}, sources.of_tree(tmp_path)) == []


def test_what_git_cannot_tell_is_no_answer(
    sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shallow, inner = tmp_path / "whole", tmp_path / "shallow", tmp_path / "whole" / "copy"
    commit = _repository(whole)
    assert sources.of_commit("f" * 40, whole) is None
    inner.mkdir()
    clone = ["git", "clone", "-q", "--depth", "1", whole.as_uri(), str(shallow)]
    subprocess.run(clone, check=True, capture_output=True)
    assert sources.of_commit(commit, shallow) == sources.of_commit(commit, whole)
    with pytest.raises(sources.NoHistory, match="shallow"):
        sources.of_commit("f" * 40, shallow)
    with pytest.raises(sources.NoHistory, match="history of its own"):
        sources.of_commit(commit, inner)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(sources.NoHistory, match="history of its own"):
        sources.of_commit(commit, tmp_path)
