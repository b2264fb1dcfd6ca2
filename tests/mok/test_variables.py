"""mok.variables: set inside, and afterwards what they were, also when the block raises."""

from __future__ import annotations

import os

import pytest

from mok.variables import variables_set


def test_they_are_set_inside_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_THERE", "before")
    for name in ("MOK_ABSENT", "MOK_GONE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="ends it"):
        _end_inside()
    assert os.environ["MOK_THERE"] == "before"
    assert not {"MOK_ABSENT", "MOK_GONE"} & set(os.environ)


def _end_inside() -> None:
    with variables_set({"MOK_THERE": "inside", "MOK_ABSENT": "1", "MOK_GONE": "1"}):
        assert (os.environ["MOK_THERE"], os.environ["MOK_ABSENT"]) == ("inside", "1")
        del os.environ["MOK_GONE"]  # somebody else's doing
        raise RuntimeError("ends it")
