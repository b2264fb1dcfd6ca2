"""The cache of compiled kernels: whole entries come back, and no fault of it breaks anything."""

from __future__ import annotations

import logging

import pytest

from mok import compile_cache
from mok.compile_cache import Entry, cache_folder, fetch, keep, open_cache

pytest.importorskip("cuda.core")

ENTRY = Entry(cubin=b"\x7fELF\0 and so on", log="ptxas info : said\n", seconds=0.25)
KEY = b"key of one"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "kernels"
    monkeypatch.setenv("MOK_CACHE_DIR", str(path))
    return path


def _files(folder):
    return [path for path in (folder / "entries").rglob("*") if path.is_file()]


def test_an_entry_comes_back_whole_and_another_key_has_none(folder, caplog):
    assert fetch(KEY) is None
    keep(KEY, ENTRY)
    assert fetch(KEY) == ENTRY
    assert fetch(KEY + b"x") is None
    assert len(_files(folder)) == 2
    assert caplog.records == []


@pytest.mark.parametrize("damage", [b"", b"\x7fELF\0 and so om", b"\xff\xfe{", b"{}", b"[1]"])
@pytest.mark.parametrize("which", ["cubin", "log"])
def test_a_damaged_entry_is_none_and_is_replaced(folder, caplog, which, damage):
    keep(KEY, ENTRY)
    (path,) = [
        one for one in _files(folder) if (one.read_bytes() == ENTRY.cubin) == (which[0] == "c")
    ]
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING, logger="mok"):
        compile_cache._complain.cache_clear()
        assert fetch(KEY) is None
        assert fetch(KEY) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged and is compiled again" in caplog.text
    keep(KEY, ENTRY)
    assert fetch(KEY) == ENTRY


@pytest.mark.parametrize("which", ["cubin", "log"])
def test_half_an_entry_is_none(folder, which):
    keep(KEY, ENTRY)
    for path in _files(folder):
        if (path.read_bytes() == ENTRY.cubin) == (which == "cubin"):
            path.unlink()
    assert fetch(KEY) is None


def test_a_folder_that_cannot_be_made_costs_one_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with caplog.at_level(logging.WARNING, logger="mok"):
        keep(KEY, ENTRY)
        assert fetch(KEY) is None
        assert not open_cache()
    (record,) = caplog.records
    assert "Set MOK_CACHE_DIR to a folder that can be written" in record.getMessage()


def test_a_full_disk_costs_one_line(folder, monkeypatch, caplog):
    def full(self, key, value):
        raise OSError(28, "No space left on device")

    assert open_cache()
    monkeypatch.setattr(type(compile_cache._open(str(folder))), "__setitem__", full)
    with caplog.at_level(logging.WARNING, logger="mok"):
        keep(KEY, ENTRY)
        keep(KEY, ENTRY)
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MOK_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home/.cache/mok/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/mok/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")  # relative: it would be another one everywhere
    assert cache_folder() == tmp_path / "home/.cache/mok/kernels"
    monkeypatch.setenv("MOK_CACHE_DIR", "~/mine")
    assert cache_folder() == tmp_path / "home/mine"
    assert list(tmp_path.iterdir()) == []
