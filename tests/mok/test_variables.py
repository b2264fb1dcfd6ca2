"""mok.variables: set inside, and afterwards what they were, also when the block raises."""

from __future__ import annotations

import os

import pytest

from mok.variables import variables_set


def test_they_are_set_inside_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_THERE", "before")
    monkeypatch.delenv("MOK_ABSENT", raising=False)
    with pytest.raises(RuntimeError, match="ends it"):
        _end_inside()
    assert os.environ["MOK_THERE"] == "before"
    assert "MOK_ABSENT" not in os.environ


def _end_inside() -> None:
    with variables_set({"MOK_THERE": "inside", "MOK_ABSENT": "1"}):
        assert (os.environ["MOK_THERE"], os.environ["MOK_ABSENT"]) == ("inside", "1")
        del os.environ["MOK_ABSENT"]
        raise RuntimeError("ends it")
