"""`verify golden update`: what is written, what is left as it was, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import X, commit, entry, found, git, put, run_here
from torch import Tensor

import verify
from verify.environment import environment
from verify.errors import CaseError, InputFileError, VerifyError
from verify.goldens import keys, packing, recording, store
from verify.goldens.recording import RefusedError, update
from verify.goldens.store import INDEX, Entry
from verify.inputs import materialise

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which goldens may be made: no CI, no launcher, no checkout; and no workers."""
    for name in ("CI", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recording, "run_here", run_here)
    return tmp_path / "golden"


def double(x: Tensor) -> Tensor:
    return x * 2


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, inode and time of every file: a file that was written again is another."""
    if not folder.exists():
        return {}
    return {
        path.name: (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


def entry_of(folder: Path, case: str) -> Entry:
    (one,) = (entry for entry in store.read(folder).entries if entry.case == case)
    return one


# --- what is written


def test_a_new_golden_holds_what_a_reviewer_needs(folder: Path) -> None:
    rows = update([found("a", double), found("b", double, "bits")], folder)
    assert [(r["case"], r["kind"], r["tensor"], r["old"]) for r in rows] == [
        ("a", "exact", "out", None),
        ("b", "bits", "out", None),
    ]
    one, other = store.read(folder).entries
    assert (one.key, other.key) == (None, keys.key_of(environment()))
    assert one.target == "cases.py::a"
    assert one.outputs == {"out": "float32"}
    assert one.made["torch"] == torch.__version__
    assert one.made["num_threads"] == torch.get_num_threads()
    assert len(one.source_digest) == len(one.inputs) == 64
    assert one.nonfinite == 0
    value = packing.load(folder, one)["out"]
    assert torch.equal(value, materialise(X["x"], "x", 0) * 2)


def test_the_second_time_nothing_is_written(folder: Path) -> None:
    cases = [found("a", double), found("b", lambda x: x + 1, "bits")]
    update(cases, folder)
    before = snapshot(folder)
    assert update(cases, folder, reason="again") == []
    assert update(cases, folder) == []
    assert snapshot(folder) == before


def test_only_what_changed_is_written_and_other_lines_stay_byte_for_byte(folder: Path) -> None:
    names = ("a", "b", "c")
    update([found(name, double) for name in names], folder, reason="first")
    before = snapshot(folder)
    lines = (folder / INDEX).read_text().split("\n")
    changed = [found("a", double), found("b", lambda x: x * 3), found("c", double)]
    rows = update(changed, folder, reason="  times\n three\t now ")
    assert [(r["case"], r["reason"]) for r in rows] == [("b", "times three now")]
    after = (folder / INDEX).read_text().split("\n")
    assert [i for i, (x, y) in enumerate(zip(lines, after, strict=True)) if x != y] == [2]
    assert entry_of(folder, "a").reason == "first"
    same = [entry_of(folder, name).file for name in ("a", "c")]
    assert all(snapshot(folder)[name] == before[name] for name in same)
    assert len(snapshot(folder)) == 4, "the old file of b is gone"


def test_other_goldens_in_the_folder_stay(folder: Path) -> None:
    update([found("a", double)], folder)
    update([found("b", double)], folder)
    assert [one.case for one in store.read(folder).entries] == ["a", "b"]


def test_goldens_of_other_environments_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update([found("a", double, "bits")], folder)
    key = keys.key_of
    monkeypatch.setattr(keys, "key_of", lambda *given: {**key(*given), "isa": "other"})
    rows = update([found("a", lambda x: x * 3, "bits")], folder)
    assert [row["old"] for row in rows] == [None], "a new one beside it needs no reason"
    assert len(store.read(folder).of("a", "bits")) == 2


def test_the_same_bits_from_other_inputs_are_a_change(folder: Path) -> None:
    def positive(low: int) -> Any:
        inputs = {**X, "unused": verify.uniform(4, low=low, high=5)}
        return found("a", lambda x, unused: x * 2, inputs=inputs)

    update([positive(1)], folder)
    with pytest.raises(RefusedError, match="that of a would change"):
        update([positive(2)], folder)
    (row,) = update([positive(2)], folder, reason="larger inputs")
    assert row["old"] == row["new"]
    assert row["differing"] == 0


def test_a_moved_case_is_named_where_it_is_now(folder: Path) -> None:
    update([found("a", double), found("b", double)], folder, reason="r")
    before = entry_of(folder, "a")
    assert update([found("a", double, file="moved/to.py")], folder) == []
    assert entry_of(folder, "a") == replace(before, target="moved/to.py::a")
    assert entry_of(folder, "b").target == "cases.py::b"


def test_targets_are_named_from_above_the_folder_whatever_the_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update([found("a", double, file=str(tmp_path / "sub" / "cases.py"))], folder)
    assert entry_of(folder, "a").target == "sub/cases.py::a"
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    before = snapshot(folder)
    assert update([found("a", double)], Path("../golden")) == []
    assert snapshot(folder) == before


def test_a_lost_tensor_file_is_made_again_without_a_reason(folder: Path) -> None:
    update([found("a", double), found("b", double)], folder, reason="first")
    lost = folder / entry_of(folder, "a").file
    index, content = (folder / INDEX).read_bytes(), lost.read_bytes()
    for damage in (lost.unlink, lambda: lost.write_bytes(b"version https://git-lfs.github.com")):
        damage()
        (row,) = update([found("a", double)], folder)
        assert (row["case"], row["tensor"], row["old"]) == ("a", "(its file)", None)
        assert "lost" in row["reason"]
        assert lost.read_bytes() == content
        assert (folder / INDEX).read_bytes() == index
    lost.unlink()
    with pytest.raises(RefusedError, match="would change"):
        update([found("a", lambda x: x * 3)], folder)
    (row,) = update([found("a", lambda x: x * 3)], folder, reason="r")
    assert row["max_ulp"] is None, "nothing is there to compare with"


# --- float64


def reference(scale: float = 1.0, budget: float = 1.0) -> Callable[..., Any]:
    def function(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
        x = inputs["x"].double()
        exact = x.sum(1) * scale
        made = verify.reduction(exact, x.abs().sum(1), 4, torch.float32)
        return {"out": replace(made, budget=made.budget * budget)}

    return function


def total(**given: float) -> Any:
    return found("t", lambda x: x.sum(1), "float64", reference=reference(**given))


def test_noise_of_the_reference_is_no_change_and_a_change_is(folder: Path) -> None:
    update([total()], folder)
    before = snapshot(folder)
    for noise in (1e-15, -1e-15, 3e-14):
        assert update([total(scale=1 + noise)], folder) == []
    assert snapshot(folder) == before
    with pytest.raises(RefusedError, match="that of t would change"):
        update([total(scale=1 + 1e-7)], folder)
    (row,) = update([total(scale=1 + 1e-7)], folder, reason="scaled")
    assert 0 < row["max_ulp"] < 4
    assert row["differing"] == 8


def test_a_budget_that_grew_is_a_change_and_is_named(folder: Path) -> None:
    update([total()], folder)
    with pytest.raises(RefusedError, match="would change"):
        update([total(budget=2.0)], folder)
    (row,) = update([total(budget=2.0)], folder, reason="wider")
    assert row["old"].startswith("budget ")
    assert row["old"] != row["new"]
    assert row["max_ulp"] == 0.0


def test_what_the_reference_does_not_give_is_not_stored_but_known(folder: Path) -> None:
    both = found("t", lambda x: {"out": x.sum(1), "x": x}, "float64", reference=reference())
    update([both], folder)
    assert set(entry_of(folder, "t").outputs) == {"out", "x"}
    assert {name.partition("/")[0] for name in entry_of(folder, "t").tensors} == {"out"}


# --- refusals


def wrong_exact(inputs: Any, upstream: Any, view: Any) -> dict[str, Tensor]:
    return {"out": inputs["x"] * 3}


REFUSED: dict[str, tuple[Any, str]] = {
    "repeat": (
        found("r", lambda x: x + int.from_bytes(os.urandom(4), "little")),
        r"r is not VERIFIED: repeat: verdict=MISMATCH \(bits-differ\)",
    ),
    "reference": (
        found("r", lambda x: x[:, :3].sum(1), "float64", reference=reference()),
        r"reference: verdict=MISMATCH \(over-budget\)",
    ),
    "exact": (
        found("r", double, exact=wrong_exact),
        r"exact: verdict=MISMATCH \(bits-differ\)",
    ),
    "raises": (found("r", lambda x: 1 / 0), r"\(case-error\) ZeroDivisionError"),
    "nothing": (found("r", lambda x: None), r"verdict=UNVERIFIED \(nothing-compared\)"),
    "nan": (
        found("r", lambda x: {"a": x, "b": x.masked_fill(x > 0, torch.nan)}),
        r"r holds \d+ NaN or infinity, first in b; .*--allow-nonfinite",
    ),
    "infinity": (
        found("r", lambda x: x.masked_fill(x > 1, -torch.inf).bfloat16()),
        r"NaN or infinity, first in out",
    ),
    "complex": (
        found("r", lambda x: torch.complex(x, x.masked_fill(x > 0, torch.nan))),
        r"NaN or infinity, first in out",
    ),
    "changed": (found("old", lambda x: x * 3), "that of old would change; say why: --reason"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_one_refused_case_leaves_nothing_written_for_any(folder: Path, name: str) -> None:
    case, said = REFUSED[name]
    update([found("old", double)], folder)
    before = snapshot(folder)
    with pytest.raises(RefusedError, match=said) as caught:
        update([found("fine", double), case], folder)
    assert isinstance(caught.value, VerifyError)
    assert "no golden was written" in str(caught.value)
    assert snapshot(folder) == before
    update([found("fine", double)], folder)
    assert len(store.read(folder).entries) == 2


def test_a_golden_that_is_too_large_is_refused_with_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = found("large", lambda x: {"small": x[:1], "wide": x.double()})
    size = 8 * 4 * 8 + 4 * 4
    monkeypatch.setattr(packing, "LARGEST", size - 1)
    said = rf"that of 'large' would have {size} bytes, most of them in wide; at most {size - 1}"
    with pytest.raises(RefusedError, match=f"no golden was written: {said}.*smaller inputs"):
        update([found("fine", double), case], folder)
    assert not folder.exists()
    monkeypatch.setattr(packing, "LARGEST", size)
    assert len(update([case], folder)) == 2


def test_the_size_counts_what_a_float64_golden_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LARGEST", 8 * 24 - 1)  # 8 elements of 24 bytes
    with pytest.raises(RefusedError, match="would have 192 bytes"):
        update([total()], folder)


def test_every_case_is_held_and_looked_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    load, pack = torch.load, packing.to_bytes

    def loaded(path: Any, **given: Any) -> Any:
        made.append("load")
        return load(path, **given)

    def packed(*words: Any) -> bytes:
        made.append("pack")
        return pack(*words)

    monkeypatch.setattr(recording.torch, "load", loaded)
    monkeypatch.setattr(packing, "to_bytes", packed)
    update([found("a", double), found("b", double)], folder)
    assert made == ["load", "pack"] * 2, "one after the other, not all of them first"


def test_a_refusal_leaves_no_folder_behind(folder: Path) -> None:
    with pytest.raises(RefusedError, match="NaN or infinity"):
        update([found("a", lambda x: x.masked_fill(x > 0, torch.nan))], folder)
    assert not folder.exists()


def test_values_that_are_not_finite_can_be_meant(folder: Path) -> None:
    case = found("a", lambda x: x.masked_fill(x > 0, torch.inf))
    update([case], folder, allow_nonfinite=True)
    count = int((materialise(X["x"], "x", 0) > 0).sum())
    assert entry_of(folder, "a").nonfinite == count > 0
    assert update([case], folder) == [], "what is there is not refused again"


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_ci_writes_no_goldens(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    with pytest.raises(RefusedError, match="not written in CI"):
        update([found("a", double)], folder, reason="r")
    assert not folder.exists()


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_what_is_no_ci(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    assert len(update([found("a", double)], folder)) == 1


def test_a_launcher_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError, match="start without torchrun"):
        update([found("a", double)], folder, reason="r")


def test_a_dirty_tree_needs_a_reason(folder: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    revision = commit(tmp_path)
    assert len(update([found("a", double)], folder)) == 1
    made = entry_of(folder, "a").made
    assert (made["commit"], made["dirty"]) == (revision, False)
    for reason in ("", "  \n"):  # the new golden is not committed
        with pytest.raises(RefusedError, match=r"uncommitted changes.*--reason"):
            update([found("b", double)], folder, reason=reason)
    update([found("b", double)], folder, reason="while it lies there")
    assert entry_of(folder, "b").made["dirty"] is True
    commit(tmp_path)
    assert len(update([found("c", double)], folder)) == 1


def test_an_unreadable_folder_is_an_error_before_anything_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / INDEX).write_text("{}")
    monkeypatch.setattr(recording, "run_here", lambda *_: pytest.fail("it ran"))
    with pytest.raises(InputFileError, match=INDEX):
        update([found("a", double)], folder)


def test_cases_without_a_golden_and_two_of_one_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"no case of f\.py::a declares a golden"):
        update([found("a", double, "", file="f.py")], folder)
    with pytest.raises(CaseError, match="two cases called 'a' declare goldens"):
        update([found("a", double, file="f.py"), found("a", double, file="g.py")], folder)
    assert len(update([found("b", double)] * 2, folder)) == 1, "asked for twice is made once"


CASE_FILE = """
import verify
@verify.case(inputs={{"x": verify.normal(4)}}, claims=("repeat",), golden="exact")
def shared(x):
    return x * {factor}
@verify.case(inputs={{"x": verify.normal(4)}}, claims=("repeat",))
def plain(x):
    return x
"""


def test_a_golden_is_not_taken_from_another_case_of_the_same_name(
    folder: Path, tmp_path: Path
) -> None:
    for name, factor in (("one", 2), ("two", 3)):
        (tmp_path / f"{name}.py").write_text(CASE_FILE.format(factor=factor))
    assert len(update(["one.py"], folder)) == 1
    with pytest.raises(RefusedError, match=r"that of 'shared' belongs to one\.py::shared"):
        update(["two.py"], folder, reason="r")
    assert update([str(tmp_path / "one.py")], folder) == [], "the same file under another name"
    (tmp_path / "one.py").unlink()
    assert len(update(["two.py"], folder, reason="the first is gone")) == 1
    assert entry_of(folder, "shared").target == "two.py::shared"


def test_an_owner_that_cannot_be_imported_keeps_its_golden(folder: Path, tmp_path: Path) -> None:
    text = CASE_FILE.format(factor=2)
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "copy.py").write_text(text)
    (tmp_path / "other.py").write_text(text.replace("shared", "another"))
    owner = entry("shared", {"out": torch.ones(4)}, target="broken.py::shared")
    put(folder, owner)
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    before = snapshot(folder)
    said = r"that of 'shared' belongs to broken\.py::shared, and whether .*no_such_module_at_all"
    with pytest.raises(RefusedError, match=said):
        update(["copy.py"], folder, reason="r")
    assert snapshot(folder) == before
    assert len(update(["other.py"], folder)) == 1, "a golden of another name is no matter of it"
    put(folder, entry("shared", {"out": torch.ones(4)}, target="own.py::shared"))
    assert len(update(["own.py"], folder, reason="r")) == 1, "nobody else is asked"
