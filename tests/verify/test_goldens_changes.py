"""What changed between two states of the goldens: the rows, and git revisions."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import commit, entry, git, put
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verify import git as asked_git
from verify import goldens
from verify.budgets import Reference
from verify.errors import InputFileError
from verify.goldens import changes, packing, store
from verify.rendering.goldens import page

Made = tuple[store.Entry, dict[str, Tensor]]


def rows(old: Made | None, new: Made | None) -> list[dict[str, Any]]:
    return changes.rows(*(old or (None, None)), *(new or (None, None)))


def bits(*values: float, name: str = "out", **fields: Any) -> Made:
    return entry("c", {name: torch.tensor(values)}, **fields)


def float64(values: list[float], budget: float = 1e-6, dtype: str = "float32") -> Made:
    value = torch.tensor(values, dtype=torch.float64)
    size = torch.full_like(value, budget)
    packed = packing.pack_reference({"out": Reference(value, size, value, size)})
    return entry("c", packed, "float64", outputs={"out": dtype})


# --- rows


def test_a_changed_tensor_says_how_far_and_why() -> None:
    old, new = bits(1.0, 2.0, 3.0), bits(1.0, 2.0 + 2**-21, -0.0, reason="fused")
    (row,) = rows(old, new)
    assert row == {
        "case": "c",
        "kind": "exact",
        "tensor": "out",
        "old": old[0].tensors["out"],
        "new": new[0].tensors["out"],
        "max_ulp": 0x40400000,  # 3.0 to -0.0
        "differing": 2,
        "reason": "fused",
    }
    (row,) = rows(bits(2.0), bits(2.0 + 2**-21))
    assert (row["max_ulp"], row["differing"]) == (2, 1)


def test_added_and_removed_tensors_and_entries() -> None:
    both = entry("c", {"a": torch.ones(2), "b": torch.ones(2)})
    one = entry("c", {"a": torch.ones(2), "z": torch.ones(1)}, reason="other names")
    found = [(r["tensor"], r["old"] is None, r["new"] is None) for r in rows(both, one)]
    # `a` is as it was, but beside other outputs
    assert found == [("a", False, False), ("b", False, True), ("z", True, False)]
    added = rows(None, both)
    assert [(r["tensor"], r["old"], r["reason"]) for r in added] == [
        ("a", None, "because"),
        ("b", None, "because"),
    ]
    removed = rows(both, None)
    assert [(r["new"], r["reason"], r["max_ulp"]) for r in removed] == [(None, "removed", None)] * 2


def test_nothing_changed_and_content_that_cannot_be_read() -> None:
    same = bits(1.0)
    assert rows(same, (replace(same[0], reason="other"), same[1])) == []
    (row,) = changes.rows(same[0], None, *bits(2.0))
    assert (row["max_ulp"], row["differing"]) == (None, None)


def test_another_dtype_or_shape_has_no_distance() -> None:
    for other in (torch.ones(1, dtype=torch.float64), torch.ones(2)):
        (row,) = rows(bits(1.0), entry("c", {"out": other}))
        assert (row["max_ulp"], row["differing"]) == (None, None)
        assert row["old"].partition(":")[0] != row["new"].partition(":")[0]


def test_integers_and_infinities_have_no_distance_but_are_counted() -> None:
    (row,) = rows(entry("c", {"out": torch.arange(3)}), entry("c", {"out": torch.arange(3) + 1}))
    assert (row["max_ulp"], row["differing"]) == (None, 3)
    (row,) = rows(bits(1.0, 2.0), bits(1.0, torch.inf))
    assert (row["max_ulp"], row["differing"]) == (None, 1)


@pytest.mark.parametrize(
    ("old", "new", "dtype", "ulp", "differing"),
    [
        ([1.0, 2.0], [1.0 + 2**-23, 2.0], "float32", 1.0, 1),
        ([1.0, 2.0], [1.0 + 2**-7, 2.0], "bfloat16", 1.0, 1),
        ([1.0, 2.0], [1.0, 2.0 + 2**-8], "bfloat16", 0.25, 1),
        ([1.0, torch.inf], [1.5, torch.inf], "float32", float(2**22), 1),
        ([1.0, torch.nan], [1.0, torch.inf], "float32", None, 1),
        ([1.0, torch.nan], [1.0, torch.nan], "float32", 0.0, 0),
        ([1.0, 3.0], [1.0, 4.0], "int64", None, 1),
        ([1.0, 3.0], [1.0, 4.0], "no dtype", None, 1),
        ([1.0, 3.0], [1.0, 4.0], "float", 2.0**21, 1),
        ([1.0, 3.0], [1.0, 4.0], "load", None, 1),
    ],
)
def test_float64_goldens_are_told_in_ulp_of_the_output(
    old: list[float], new: list[float], dtype: str, ulp: float | None, differing: int
) -> None:
    (row,) = rows(float64(old, 1e-6, dtype), float64(new, 2e-6, dtype))
    assert (row["max_ulp"], row["differing"]) == (ulp, differing)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_a_float64_golden_names_the_parts_that_changed() -> None:
    (row,) = rows(float64([1.0], 1e-6), float64([1.0], 2e-6))
    parts = [text.split(" ")[0] for text in row["old"].split(", ")]
    assert parts == ["budget", "margin"]
    assert row["old"] != row["new"]
    assert (row["max_ulp"], row["differing"]) == (0.0, 0)
    (row,) = rows(float64([1.0]), float64([2.0]))
    assert [text.split(" ")[0] for text in row["new"].split(", ")] == ["exact", "unrounded"]
    (row,) = rows(None, float64([1.0]))
    assert row["old"] is None
    assert len(row["new"].split(", ")) == 4


# --- noise


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
    st.floats(1e-9, 1.0),
    st.floats(-2.0, 2.0),
)
def test_a_reference_is_the_same_within_a_thousandth_of_its_budget(
    values: list[float], budget: float, share: float
) -> None:
    old = float64(values, budget)[1]
    moved = [value + share * 2.0**-10 * budget for value in values]
    new = float64(moved, budget)[1]
    # the comparison's own rounding, of values and of budgets kept as float32
    far = max(abs(a - b) for a, b in zip(values, moved, strict=True)) / (2.0**-10 * budget)
    if abs(far - 1) > 1e-3:
        assert changes.same_reference(old, new) == (far < 1)


def test_other_names_shapes_and_what_is_no_number_are_other_references() -> None:
    old = float64([1.0, 2.0])[1]
    assert changes.same_reference(old, dict(old))
    assert not changes.same_reference(old, float64([1.0])[1])
    assert not changes.same_reference(old, {f"x{name}": value for name, value in old.items()})
    assert not changes.same_reference(old, float64([1.0, torch.nan])[1])
    assert not changes.same_reference(old, float64([1.0, 2.0], 1.01e-6)[1])
    assert not changes.same_reference(old, float64([1.0, 2.0], 0.99e-6)[1])


# --- the table


def test_the_rows_make_the_table_for_a_pull_request() -> None:
    changed = [
        *rows(bits(1.0, 2.0), bits(1.0, 2.0 + 2**-12, reason="one|two\n<b>@all</b>")),
        *rows(None, bits(1.0, name="a|b`")),
        *rows(bits(1.0), entry("c", {"out": torch.ones(3)})),
        *rows(float64([1.0]), float64([1.5], 2e-6)),
    ]
    lines = page(changed).splitlines()
    assert len(lines) == 2 + 4, "one line per row whatever is in it"
    assert len({line.count("|") for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0][5:7] == ["`1,024`", "`1`"]
    assert cells[1][3] == "-"
    assert [cell.split(":")[0] for cell in cells[2][3:5]] == ["`float32[1]", "`float32[3]"]
    assert cells[3][3].startswith("`exact ")
    assert cells[3][5:7] == ["`4,194,304.0`", "`1`"]


# --- since a revision


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    return tmp_path


def named(name: str, value: float, **fields: Any) -> Made:
    return entry(name, {"out": torch.tensor([value, 1.0])}, **fields)


def test_since_a_revision(repository: Path) -> None:
    folder = repository / "golden"
    put(folder, named("gone", 1.0), named("moved", 1.0), named("same", 1.0))
    first = commit(repository)
    put(folder, named("moved", 1.5, reason="why"), named("new", 1.0), named("same", 1.0))
    expected = [
        ("gone", False, True, None, "removed"),
        ("moved", False, False, 2**22, "why"),
        ("new", True, False, None, "because"),
    ]

    def told(revision: str) -> list[tuple[Any, ...]]:
        return [
            (r["case"], r["old"] is None, r["new"] is None, r["max_ulp"], r["reason"])
            for r in goldens.changes_since(folder, revision)
        ]

    assert told(first) == expected, "what is not committed counts"
    commit(repository)
    assert told(first) == told("HEAD~1") == expected
    assert told("HEAD") == []
    git(repository, "tag", "v1", first)
    assert told("v1") == expected


def test_the_same_bits_of_other_inputs_are_a_row(repository: Path) -> None:
    put(repository / "golden", named("a", 1.0))
    commit(repository)
    put(repository / "golden", named("a", 1.0, inputs="other"))
    (row,) = changes.since(repository / "golden", "HEAD")
    assert row["old"] == row["new"]
    put(repository / "golden", named("a", 1.0, reason="other", target="g.py::a"))
    assert changes.since(repository / "golden", "HEAD") == []


def test_before_the_first_golden_and_after_the_last(repository: Path) -> None:
    before = commit(repository)
    assert changes.since(repository / "golden", "HEAD") == []
    put(repository / "golden", named("a", 1.0))
    assert [row["old"] for row in changes.since(repository / "golden", before)] == [None]
    commit(repository)
    for path in (repository / "golden").iterdir():
        path.unlink()
    (repository / "golden").rmdir()
    assert [row["new"] for row in changes.since(repository / "golden", "HEAD")] == [None]


def test_a_folder_in_a_folder_from_another_directory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository / "deep" / "er" / "golden"
    put(folder, named("a", 1.0))
    commit(repository)
    put(folder, named("a", 1.5))
    assert len(changes.since(folder, "HEAD")) == 1
    monkeypatch.chdir(repository / "deep")
    assert len(changes.since(Path("er/golden"), "HEAD")) == 1
    assert changes.since(Path("er/none"), "HEAD") == []
    monkeypatch.chdir(folder)
    assert len(changes.since(Path("."), "HEAD")) == 1


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 72\n", b"", b"x" * 99],
)
def test_old_content_that_cannot_be_had_leaves_the_digests(
    repository: Path, content: bytes
) -> None:
    folder = repository / "golden"
    old = named("a", 1.0)
    put(folder, old)
    (folder / old[0].file).write_bytes(content)
    commit(repository)
    put(folder, named("a", 1.5))
    (row,) = changes.since(folder, "HEAD")
    assert row["old"] == old[0].tensors["out"]
    assert (row["max_ulp"], row["differing"]) == (None, None)


@pytest.mark.parametrize(
    "revision", ["no-such-branch", "0" * 40, "", "--output=leak", "-h", "a\0b"]
)
def test_a_revision_that_is_none(repository: Path, revision: str) -> None:
    put(repository / "golden", named("a", 1.0))
    commit(repository)
    with pytest.raises(InputFileError, match=r"is no git revision|git does not know"):
        changes.since(repository / "golden", revision)
    assert not list(repository.rglob("*leak*"))


def test_words_of_git_in_another_language(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What git says is read, so it has to say it in English."""
    asked: list[str | None] = []
    run = asked_git.subprocess.run

    def seen(*words: Any, **given: Any) -> Any:
        asked.append(given.get("env", os.environ).get("LC_ALL"))
        return run(*words, **given)

    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setattr(asked_git.subprocess, "run", seen)
    commit(repository)
    assert changes.since(repository / "golden", "HEAD") == []
    assert set(asked) == {"de_DE.UTF-8", "C"}, "the test's own, and those of `since`"


def test_outside_of_a_checkout(tmp_path: Path) -> None:
    put(tmp_path / "golden", named("a", 1.0))
    for folder in (tmp_path / "golden", tmp_path / "not" / "yet"):
        with pytest.raises(InputFileError, match="lies outside of the repository"):
            changes.since(folder, "HEAD")


def test_a_folder_that_is_not_there_yet_is_no_change(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository)
    folder = repository / "not" / "yet" / "there"
    assert changes.since(folder, "HEAD") == []
    monkeypatch.chdir(repository)
    assert changes.since(Path("not/yet/there"), "HEAD") == []
    put(folder, named("a", 1.0))
    commit(repository)
    shutil.rmtree(repository / "not")
    assert [row["reason"] for row in changes.since(folder, "HEAD")] == ["removed"]


def test_an_index_that_cannot_be_read_on_either_side(repository: Path) -> None:
    folder = repository / "golden"
    put(folder, named("a", 1.0))
    good = (folder / store.INDEX).read_bytes()
    for broken in (b"{}", b"\xff", b"version https://git-lfs.github.com/spec/v1\n"):
        (folder / store.INDEX).write_bytes(broken)
        commit(repository)
        with pytest.raises(InputFileError, match=store.INDEX):
            changes.since(folder, "HEAD")
        (folder / store.INDEX).write_bytes(good)
        (row,) = changes.since(folder, "HEAD")  # the change that repairs it must get through
        assert (row["case"], row["old"], row["new"]) == ("(index)", None, None)
        assert row["reason"] == "the index of HEAD cannot be read"
        assert "the index of HEAD cannot be read" in page([row])
        commit(repository)
        assert changes.since(folder, "HEAD") == []
