"""A test that leaves the environment changed fails by name, and the next one finds it as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nested_pytest import run_here

TESTS = """
import os

def test_leaves(monkeypatch):
    os.environ["MOK_LEFT_BEHIND"] = "1"
    os.environ["MOK_KEPT"] = "other"
    monkeypatch.setenv("MOK_PUT_BACK", "1")
    os.environ["TORCHINDUCTOR_OF_A_COMPILER"] = "1"

def test_finds_it_as_it_was():
    assert os.environ["MOK_KEPT"] == "before"
    assert not {"MOK_LEFT_BEHIND", "MOK_PUT_BACK"} & set(os.environ)
"""


def test_what_a_test_leaves_in_the_environment_is_named(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "test_small.py").write_text(TESTS, encoding="utf-8")
    code, told = run_here(tmp_path, ("-q", "-p", "no:cacheprovider"), MOK_KEPT="before")
    assert os.environ.pop("TORCHINDUCTOR_OF_A_COMPILER") == "1"
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 passed, 1 error" in told
    assert "left in the environment: MOK_KEPT, MOK_LEFT_BEHIND; use monkeypatch.setenv" in told
