"""`verify golden status` and `prune`: what is stored, for whom, and what nothing asks for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import entry, held_while, put, run_here

from verify.errors import CaseError, InputFileError
from verify.goldens import keys, packing, recording, status, store
from verify.goldens.store import INDEX
from verify.targets import find

CASES = """
import verify
X = {"x": verify.normal(4)}
@verify.case(inputs=X, claims=("repeat",), golden="exact")
def kept(x):
    return x * 2
@verify.case(inputs=X, claims=("repeat",), golden="bits")
def keyed(x):
    return x * 2
@verify.case(inputs=X, claims=("repeat",))
def plain(x):
    return x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CI", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recording, "run_here", run_here)
    (tmp_path / "cases.py").write_text(CASES)
    return tmp_path / "golden"


def made(folder: Path) -> None:
    recording.update(["cases.py"], folder, reason="first")


def states(folder: Path, *targets: str) -> list[tuple[str, str, str]]:
    rows = status.status(targets, folder)
    return [(row["case"], row["kind"], row["state"]) for row in rows]


def code(folder: Path, *targets: str) -> int:
    return status.exit_code(status.status(targets, folder))


def amend(folder: Path, case: str, **fields: Any) -> None:
    with store.locked(folder):
        index = store.read(folder)
        store.write(
            folder, [replace(e, **fields) if e.case == case else e for e in index.entries], {}
        )


def test_everything_is_there(folder: Path) -> None:
    made(folder)
    assert states(folder) == [("kept", "exact", "stored"), ("keyed", "bits", "stored")]
    assert states(folder, "cases.py") == states(folder)
    assert code(folder, "cases.py") == 0
    row = status.status([], folder)[0]
    assert row["made"] == f"torch {torch.__version__}"
    assert row["reason"] == "first"
    assert row["key"] is None


def test_missing_goldens_and_no_folder(folder: Path) -> None:
    expected = [("kept", "exact", "missing"), ("keyed", "bits", "missing")]
    assert states(folder, "cases.py") == expected
    assert code(folder, "cases.py") == 3
    assert states(folder) == []
    assert code(folder) == 3, "nothing is no pass"
    assert "no goldens" in status.text([], folder)
    assert not folder.exists()
    with pytest.raises(CaseError, match="no such file"):
        status.status(["none.py"], folder)


def test_code_that_changed_is_told_and_not_judged(folder: Path) -> None:
    made(folder)
    amend(folder, "kept", source_digest="other")
    assert ("kept", "exact", "stored, code changed since") in states(folder)
    assert code(folder) == 0


def test_bits_for_other_environments_only(folder: Path) -> None:
    made(folder)
    (keyed,) = store.read(folder).of("keyed", "bits")
    amend(folder, "keyed", key={**(keyed.key or {}), "isa": "other"})
    assert code(folder) == 0, "nobody asked for this environment's"
    found = states(folder, "cases.py")
    isa = (keyed.key or {})["isa"]
    assert ("keyed", "bits", f"none for this environment: isa other -> {isa}") in found
    assert code(folder, "cases.py") == 3


def test_a_damaged_file_is_unreadable(folder: Path) -> None:
    made(folder)
    (one,) = store.read(folder).of("kept", "exact")
    (folder / one.file).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    state = {case: state for case, _, state in states(folder)}["kept"]
    assert state.startswith("unreadable: ")
    assert "Git LFS pointer" in state
    assert code(folder) == 2
    (folder / INDEX).write_text("{}")
    with pytest.raises(InputFileError, match=INDEX):
        status.status([], folder)


def test_what_the_table_shows_cannot_do_anything(folder: Path) -> None:
    hostile = "a\x1b[2J\n##[group]\u202e"
    put(folder, entry(hostile, {"out": torch.ones(1)}, target="a::b", reason=hostile))
    text = status.text(status.status([], folder), folder)
    assert len(text.splitlines()) == 4
    assert text.isprintable() or set(text) - set("\n") == {c for c in text if c.isprintable()}
    told = status.prune(folder, dry_run=True)
    assert len(told) == 1
    assert told[0].isprintable()
    assert "##[" not in text + told[0]
    one, tensors = entry("a", {"##[group]": torch.ones(1)})
    put(folder, (one, tensors))
    (folder / one.file).write_bytes(packing.to_bytes({"other": torch.ones(1)}, "a", "exact"))
    rows = status.status([], folder)
    assert "##[group]" in rows[0]["state"]
    assert "##[" not in status.text(rows, folder)


# --- prune


def test_what_no_case_declares_is_removed_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    made(folder)
    old = entry("gone", {"out": torch.ones(1)}, target="cases.py::gone")
    lost = entry("lost", {"out": torch.ones(2)}, target="no_such_file.py::lost")
    other = entry("kept", {"out": torch.ones(3)}, "bits", target="cases.py::kept")
    with store.locked(folder):
        there = store.read(folder).entries
        files = {one.file: b"" for one, _ in (old, lost, other)}
        store.write(folder, [*there, old[0], lost[0], other[0]], files)
    stray = folder / "stray.exact.0123456789ab.safetensors"
    stray.write_bytes(b"")
    (folder / "weights.safetensors").write_bytes(b"mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = status.prune(folder, dry_run=True)
    assert said == [
        "gone (exact): no case cases.py::gone declares it",
        "kept (bits): no case cases.py::kept declares it",
        "lost (exact): no case no_such_file.py::lost declares it",
        f"{stray.name}: no entry names it",
    ]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert code(folder) == 2, "files that hold nothing"
    assert status.prune(folder) == said
    assert states(folder) == [("kept", "exact", "stored"), ("keyed", "bits", "stored")]
    assert (folder / "weights.safetensors").read_bytes() == b"mine"
    assert status.prune(folder) == []


def test_an_unused_golden_is_called_so(folder: Path) -> None:
    put(folder, entry("gone", {"out": torch.ones(1)}, target="cases.py::gone"))
    assert states(folder) == [("gone", "exact", "unused")]
    assert code(folder) == 3


def test_cases_are_found_from_every_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run somewhere else, prune must not take every golden for one that nobody declares."""
    made(folder)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert status.prune(Path("../golden")) == []
    monkeypatch.chdir(folder)
    assert status.prune(Path(".")) == []
    assert code(Path(".")) == 0
    # a checkout in another place
    monkeypatch.chdir("/")
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    (tmp_path / "cases.py").unlink()
    assert status.prune(tmp_path / "copy" / "golden") == []
    assert len(status.prune(folder, dry_run=True)) == 2


@pytest.mark.parametrize(
    "text", ["raise RuntimeError('no case here')", "import no_such_module", "def broken(:"]
)
def test_a_file_that_cannot_be_imported_is_no_reason_to_remove(
    folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    put(folder, entry("a", {"out": torch.ones(1)}, target="broken.py::a"))
    with pytest.raises(CaseError, match=r"importing .*broken\.py failed"):
        status.prune(folder)
    put(folder, entry("a", {"out": torch.ones(1)}, target="no_such_module_either:a"))
    with pytest.raises(CaseError, match="cannot import module"):
        status.prune(folder)
    assert len(store.read(folder).entries) == 1


def test_names_of_cases_are_no_patterns(folder: Path) -> None:
    """A golden of `k*` is not used because a case called `kept` is there."""
    put(folder, entry("k*", {"out": torch.ones(1)}, target="cases.py::k*"))
    assert states(folder) == [("k*", "exact", "unused")]


def test_targets_of_modules_and_built_in_names(folder: Path) -> None:
    control = "condition/golden/twin"
    put(
        folder,
        entry(control, {"out": torch.ones(1)}, target=f"verify.controls.stored:{control}"),
        entry("no such", {"out": torch.ones(2)}, target="no such"),
    )
    assert [one.case for one in status.unused(folder)[1]] == ["no such"]


def test_lasting_targets() -> None:
    assert status.lasting("a.py::x::y", Path("golden")) == "a.py::x::y"
    assert status.lasting("./b/../a.py::x", Path("golden")) == "a.py::x"
    assert status.lasting("a.py::x", Path("deep/golden")) == "../a.py::x"
    assert status.lasting(str(Path.cwd() / "a.py::x"), Path("golden")) == "a.py::x"
    assert status.lasting("pkg.mod:x", Path("golden")) == "pkg.mod:x"
    assert status.lasting("moe/exact", Path("golden")) == "moe/exact"


def test_without_an_environment_of_a_gpu_the_cpu_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(folder)
    (keyed,) = store.read(folder).of("keyed", "bits")
    assert set(keyed.key or {}) >= {"isa", "blas", "torch", "machine"}
    monkeypatch.setattr(keys, "cpu_vendor", lambda: "Other")
    assert code(folder, "cases.py") == 3


def test_a_golden_of_another_file_is_none_of_the_case(folder: Path, tmp_path: Path) -> None:
    made(folder)
    shutil.copy(tmp_path / "cases.py", tmp_path / "copy.py")
    said = "belongs to cases.py::{}, which declares it, too; rename one of the two cases"
    stored = [("kept", "exact", "stored"), ("keyed", "bits", "stored")]
    foreign = [("kept", "exact", said.format("kept")), ("keyed", "bits", said.format("keyed"))]
    assert sorted(states(folder, "copy.py")) == sorted(stored + foreign)
    assert sorted(states(folder, "copy.py", "cases.py")) == sorted(stored + foreign)
    assert code(folder, "copy.py") == 3
    # the same file under another name, and one that has moved
    assert states(folder, str(tmp_path / "cases.py"), "./cases.py") == stored
    (tmp_path / "cases.py").unlink()
    assert states(folder, "copy.py") == stored
    assert code(folder, "copy.py") == 0


def test_whose_a_golden_is(folder: Path, tmp_path: Path) -> None:
    made(folder)
    (kept,) = store.read(folder).of("kept", "exact")
    shutil.copy(tmp_path / "cases.py", tmp_path / "copy.py")
    (copy,) = find("copy.py::kept")
    assert "rename one" in status.elsewhere(kept, copy, folder)
    assert status.elsewhere(kept, find("cases.py::kept")[0], folder) == ""
    assert status.elsewhere(replace(kept, target="gone.py::kept"), copy, folder) == ""
    assert (
        status.elsewhere(replace(kept, target="cases.py::plain", case="plain"), copy, folder) == ""
    )
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    told = status.elsewhere(replace(kept, target="broken.py::kept"), copy, folder)
    assert told.startswith("belongs to broken.py::kept, and whether that still declares it cannot")
    assert "no_such_module_at_all" in told


def test_a_file_that_goes_elsewhere_takes_nobody_with_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text(f"import os\nos.chdir('/')\n{CASES}")
    put(folder, entry("kept", {"out": torch.ones(1)}, target="moves.py::kept"))
    assert len(states(Path("golden"))) == 1
    assert Path.cwd() == tmp_path


def test_files_are_read_under_a_lock_and_cases_are_found_outside_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(folder)
    seen = held_while(monkeypatch, folder, (packing, "load"), (store, "unnamed"))
    seen |= held_while(monkeypatch, folder, (status, "cases_of_file"))
    states(folder)
    assert seen["load"] == [True, True]
    assert seen["unnamed"] == [True]
    assert set(seen["cases_of_file"]) == {False}
