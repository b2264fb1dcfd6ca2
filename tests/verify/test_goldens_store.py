"""The folder of goldens: what a kill or another writer leaves, what is read and what is removed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import golden_writers
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.errors import InputFileError
from verify.goldens import PARTS, store
from verify.goldens.store import INDEX, Entry

ROOT = Path(__file__).resolve().parents[2]
NASTY = 'a"b\\\n\u2028\x00\x85\u202e{"entries": [\U0001f600'


def entry(case: str = "c", **fields: Any) -> Entry:
    given = {
        "kind": "exact",
        "key": None,
        "reason": "r",
        "target": f"f.py::{case}",
        "file": "c.exact.0123456789ab.safetensors",
        "inputs": "0",
        "source_digest": "1",
        "made": {"torch": "2", "num_threads": 2, "dirty": None},
        "outputs": {"out": "float32"},
        "tensors": {"out": "float32[2]:00"},
    }
    return Entry(case=case, **{**given, **fields})


def put(folder: Path, entries: list[Entry], files: dict[str, bytes] | None = None) -> list[str]:
    with store.locked(folder):
        return store.write(folder, entries, files or {})


# --- kills and other writers


def told(mode: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, golden_writers.__file__, mode, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.slow
def test_two_hundred_kills_leave_the_old_state_or_the_new_one(
    tmp_path: Path, record_property: Any
) -> None:
    seen = told("kills", tmp_path / "golden")
    record_property("kills", json.dumps(seen))
    assert seen["kills"] == 200
    assert seen["inside"] == seen["old"] + seen["new"] >= 50
    # the kills were spread over the write, not all before or after its one decisive moment
    assert seen["old"] >= 20
    assert seen["new"] >= 5
    assert seen["partial"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "least"), [("steps", 5), ("first", 2)])
def test_a_kill_at_every_step_leaves_the_old_state_until_the_index_is_renamed(
    tmp_path: Path, mode: str, least: int
) -> None:
    """Three or four new files and the index: each opened, written, synced, renamed."""
    seen = told(mode, tmp_path / "golden")
    assert seen["steps"] >= 40
    assert re.fullmatch(f"o{{20,}}n{{{least},}}", seen["outcomes"]), seen["outcomes"]


@pytest.mark.slow
def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    seen = told("writers", tmp_path / "new" / "golden")
    assert seen["codes"] == [0] * golden_writers.WRITERS
    assert seen["entries"] == [
        f"w{writer}-{number:02}"
        for writer in range(golden_writers.WRITERS)
        for number in range(golden_writers.EACH)
    ]
    assert not seen["wrong"]


def test_a_lock_is_released_when_its_holder_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), store.locked(tmp_path):
        raise ZeroDivisionError
    with store.locked(tmp_path):
        pass  # would wait for ever


def _takes(folder: Path, mode: int) -> bool:
    """Whether somebody else could lock the folder so, now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_who_reads_keeps_writers_out_and_no_readers(tmp_path: Path) -> None:
    with store.reading(tmp_path):
        assert not _takes(tmp_path, fcntl.LOCK_EX)
        assert _takes(tmp_path, fcntl.LOCK_SH)
    assert _takes(tmp_path, fcntl.LOCK_EX)
    with store.locked(tmp_path):
        assert not _takes(tmp_path, fcntl.LOCK_SH)


def test_reading_needs_no_folder_and_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe", "a\0b"):
        with store.reading(tmp_path / name):
            pass
    assert not (tmp_path / "none").exists()

    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with store.reading(tmp_path):
        pass


@pytest.mark.parametrize("step", range(4))
def test_a_write_that_fails_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A full disk, at the first or second file, or at the index."""
    names = [f"x{i}.exact.{i:012}.safetensors" for i in range(5)]
    old = [entry("a", file=names[0])]
    put(tmp_path, old, {names[0]: b"old"})
    new = [entry("a", file=names[1]), entry("b", file=names[2])]
    renamed: list[str] = []
    rename = os.replace

    def full(source: Any, target: Any) -> None:
        if len(renamed) == step:
            raise OSError(28, "No space left on device", str(target))
        renamed.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "replace", full)
    files = {names[1]: b"1", names[2]: b"2"}
    if step == 3:
        assert put(tmp_path, new, files) == [names[0]]
        return
    with pytest.raises(InputFileError, match=r"cannot write .*: No space left on device"):
        put(tmp_path, new, files)
    monkeypatch.undo()
    assert list(store.read(tmp_path).entries) == old
    assert (tmp_path / names[0]).read_bytes() == b"old"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial-")]
    put(tmp_path, new, files)
    assert {p.name for p in tmp_path.iterdir()} == {INDEX, names[1], names[2]}


def test_files_that_cannot_be_removed_do_not_undo_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "c.exact.0123456789ab.safetensors"
    put(tmp_path, [entry("a", file=name)], {name: b"1"})

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    assert put(tmp_path, []) == []
    monkeypatch.undo()
    assert not store.read(tmp_path).entries
    assert store.unnamed(store.read(tmp_path)) == [name]


# --- what belongs to a folder of goldens


def test_only_files_of_our_making_are_removed(tmp_path: Path) -> None:
    """A folder of weights, given by mistake, keeps its weights."""
    foreign = ["model.safetensors", "exact.safetensors", "a.exact.xyz.safetensors", ".partial-mine"]
    ours = ["a.exact.0123456789ab.safetensors", ".partial-12-index.json"]
    put(tmp_path, [])
    for name in [*foreign, *ours]:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "d.exact.0123456789ab.safetensors").mkdir()
    assert store.unnamed(store.read(tmp_path)) == sorted(ours)
    assert put(tmp_path, []) == [ours[0]]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, INDEX, "d.exact.0123456789ab.safetensors"}


def test_without_folder_or_index_there_are_no_entries(tmp_path: Path) -> None:
    assert store.read(tmp_path / "none").entries == ()
    assert store.read(tmp_path).entries == ()
    assert store.unnamed(store.read(tmp_path / "none")) == []


def test_entries_are_found_by_case_and_kind(tmp_path: Path) -> None:
    keyed = [entry("a", kind="bits", key={"cpu": name}) for name in ("x", "y")]
    put(tmp_path, [entry("a"), *keyed, entry("b")])
    index = store.read(tmp_path)
    assert index.of("a", "exact") == [entry("a")]
    assert index.of("a", "bits") == keyed
    assert index.of("a", "float64") == []


def test_links_are_not_written_through(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(InputFileError, match=r"symbolic link to .*Give the real folder"):
        put(tmp_path / "link", [])
    (tmp_path / "elsewhere").write_text("{}")
    (real / INDEX).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputFileError, match="symbolic link"):
        put(real, [])
    assert (tmp_path / "elsewhere").read_text() == "{}"


# --- the text of the index

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.one_of(words, st.just(NASTY))
maps = st.dictionaries(names, names, max_size=3)
entries = st.lists(
    st.one_of(
        st.builds(entry, names, reason=names, target=names, tensors=maps, outputs=maps),
        st.builds(entry, names, kind=st.just("bits"), key=maps, reason=names, made=maps),
    ),
    max_size=6,
    unique_by=lambda one: one.identity,
)


@settings(max_examples=50)
@given(entries)
def test_what_is_written_is_read_again_one_line_each(made: list[Entry]) -> None:
    text = store.text_of(made)
    assert text.isascii()
    assert len(text.splitlines()) == len(made) + 2 + (not made)
    ordered = sorted(made, key=lambda one: one.identity)
    assert list(store.parse(text, "i")) == ordered
    assert store.text_of(store.parse(text, "i")) == text
    assert store.text_of(made[::-1]) == text
    jsonschema.validate(json.loads(text), store._schema())


@settings(max_examples=30)
@given(entries, st.data())
def test_one_changed_entry_changes_one_line(made: list[Entry], data: st.DataObject) -> None:
    if not made:
        return
    at = data.draw(st.integers(0, len(made) - 1))
    changed = [*made[:at], replace(made[at], reason=made[at].reason + "!"), *made[at + 1 :]]
    before, after = (store.text_of(one).split("\n") for one in (made, changed))
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


def test_names_of_half_characters_survive(tmp_path: Path) -> None:
    put(tmp_path, [entry("\ud800")])
    assert store.read(tmp_path).entries[0].case == "\ud800"


def _broken(**fields: Any) -> str:
    return json.dumps({"version": 1, "entries": [{**asdict(entry()), **fields}]})


FLOAT64 = {"kind": "float64", "tensors": {f"a/b/{part}": "float64[1]:00" for part in PARTS}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ('{"version": 2, "entries": []}', "version 2, this version reads 1"),
        ('{"version": 1, "entries": [], "more": 1}', "unknown field 'more'"),
        (_broken(kind="other"), "kind 'other'; allowed are exact, float64, bits"),
        (_broken(file="../x.safetensors"), "is not a plain name"),
        (_broken(file="/x"), "is not a plain name"),
        (_broken(file="a\n"), "is not a plain name"),
        (_broken(key={"a": "b"}), "a key belongs to kind bits"),
        (_broken(kind="bits"), "a key belongs to kind bits"),
        (_broken(tensors={"out": 3}), "it should be string"),
        (_broken(kind="float64"), "wrong or missing: '/budget'"),
        (
            _broken(**{**FLOAT64, "tensors": {**FLOAT64["tensors"], "a/b/more": "x"}}),
            "wrong or missing: 'a/b/more'",
        ),
    ],
)
def test_what_is_no_index_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputFileError, match=re.escape(said)) as caught:
        store.read(tmp_path)
    assert str(tmp_path / INDEX) in str(caught.value)


def test_a_float64_entry_needs_all_four_parts_and_bits_may_differ_by_key() -> None:
    assert len(store.parse(_broken(**FLOAT64), "i")) == 1
    both = [entry(kind="bits", key={"cpu": "a"}), entry(kind="bits", key={"cpu": "b"})]
    assert len(store.parse(store.text_of(both), "i")) == 2
    with pytest.raises(InputFileError, match="two entries for 'c' of kind bits"):
        store.parse(store.text_of([both[0], replace(both[0], reason="again")]), "i")
