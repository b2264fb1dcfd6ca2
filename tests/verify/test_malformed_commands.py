"""Every command that reads a file, given one that cannot be judged: exit code 2, and nothing else.

No verdict, no traceback, nothing written or removed; the message names the file and the reason. An
unreadable golden is never a missing one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from mutations import tree
from safetensors.torch import save_file

from verify.cli import main
from verify.conditions.goldens import inputs_digest
from verify.goldens import packing, store
from verify.staging import prepare
from verify.targets import find

CASE = """
import torch, verify

@verify.case(inputs={"x": verify.normal(64, 8)}, claims=("repeat", "golden"), golden="exact")
def total(x):
    return x.sum(1)
"""
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a case and its golden, made without running anything."""
    place = tmp_path_factory.mktemp("stored")
    (place / "case.py").write_text(CASE)
    case = find(str(place / "case.py"))[0].case
    stage = prepare(case)
    tensors = {"out": stage.tensors["x"].sum(1)}
    digests = packing.digests_of(tensors)
    entry = store.Entry(
        case=case.name,
        kind="exact",
        key=None,
        reason="",
        target="case.py::total",
        file=packing.file_name(case.name, "exact", digests),
        inputs=inputs_digest(stage),
        source_digest="",
        made={},
        outputs={"out": "float32"},
        tensors=digests,
    )
    with store.locked(place / "golden"):
        store.write(
            place / "golden", [entry], {entry.file: packing.to_bytes(tensors, "total", "exact")}
        )
    return place


@pytest.fixture
def here(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it as the current directory."""
    shutil.copytree(stored, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("CI", raising=False)
    path = list(sys.path)
    yield tmp_path / "here"
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def refused(place: Path, *arguments: str) -> str:
    """What a command says that must end with 2 and leave everything as it is."""
    before = tree(place)
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 2, (arguments, done.output)
    assert isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert "VERIFIED" not in done.stdout
    assert tree(place) == before, arguments
    return done.stderr + done.stdout


def tensor_file(place: Path) -> Path:
    return next((place / "golden").glob("*.safetensors"))


def lose(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def linked(path: Path, target: str) -> None:
    lose(path)
    path.symlink_to(target)


def folder(path: Path) -> None:
    lose(path)
    path.mkdir()


def edited(place: Path, **change: object) -> None:
    path = place / "golden" / "index.json"
    document = json.loads(path.read_text())
    document["entries"][0].update(change)
    path.write_text(json.dumps(document))


INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lost": (lambda p: lose(p / "golden/index.json"), "index.json: no such file, but the folder"),
    "empty": (lambda p: (p / "golden/index.json").write_bytes(b""), "is empty (0 bytes)"),
    "pointer": (lambda p: (p / "golden/index.json").write_bytes(POINTER), "Git LFS pointer"),
    "not utf-8": (lambda p: (p / "golden/index.json").write_bytes(b"\xff{}"), "not UTF-8 text"),
    "a folder": (lambda p: folder(p / "golden/index.json"), "is a folder, not a file"),
    "dangling": (lambda p: linked(p / "golden/index.json", "gone"), "symbolic link to 'gone'"),
    "loop": (lambda p: linked(p / "golden", "golden"), "lead in a circle"),
    "folder gone": (lambda p: linked(p / "golden", "gone"), "symbolic link to 'gone'"),
    "a file": (lambda p: (lose(p / "golden"), (p / "golden").write_text("")), "golden: is a file"),
    "leads out": (lambda p: edited(p, file="../x.safetensors"), "is not a plain name"),
    "absolute": (lambda p: edited(p, file="/x.safetensors"), "is not a plain name"),
    "other kind": (lambda p: edited(p, kind="float64"), "a float64 golden has exact, budget"),
}
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lost": (lambda p: lose(tensor_file(p)), "no such file"),
    "pointer": (lambda p: tensor_file(p).write_bytes(POINTER), "git lfs pull"),
    "empty": (lambda p: tensor_file(p).write_bytes(b""), "is empty (0 bytes)"),
    "cut": (lambda p: tensor_file(p).write_bytes(tensor_file(p).read_bytes()[:-8]), "truncated"),
    "longer": (
        lambda p: tensor_file(p).write_bytes(tensor_file(p).read_bytes() + bytes(8)),
        "8 bytes follow",
    ),
    "loop": (lambda p: linked(tensor_file(p), tensor_file(p).name), "lead in a circle"),
    "a pipe": (lambda p: (name := tensor_file(p), lose(name), os.mkfifo(name)), "not a regular"),
    "other name": (
        lambda p: save_file({"b": torch.ones(2)}, tensor_file(p)),
        "lacks tensor 'out', which the index of goldens names",
    ),
    "other dtype": (
        lambda p: save_file({"out": torch.ones(64, dtype=torch.bfloat16)}, tensor_file(p)),
        "is bfloat16[64], the index says float32[64]",
    ),
    "other shape": (
        lambda p: save_file({"out": torch.ones(8, 8)}, tensor_file(p)),
        "is float32[8,8], the index says float32[64]",
    ),
    "one bit": (
        lambda p: tensor_file(p).write_bytes(
            (c := tensor_file(p).read_bytes())[:-1] + bytes([c[-1] ^ 1])
        ),
        "tensor 'out' has other bits than when it was stored",
    ),
    "said otherwise": (
        lambda p: edited(p, outputs={"out": "float16"}),
        "it holds out in float16, says the index",
    ),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_cannot_be_read(here: Path, kind: str) -> None:
    damage, said = INDEXES[kind]
    damage(here)
    for command in (
        ("run", "case.py"),
        ("run", "case.py", "--golden", "golden"),
        ("golden", "status", "case.py"),
        ("golden", "update", "case.py", "--reason", "damage"),
        ("golden", "prune"),
    ):
        shown = refused(here, *command)
        assert "golden" in shown
        # a writer may say first that it does not write through links
        assert said in shown or "writing would replace the link" in shown, (command, shown)


@pytest.mark.parametrize("kind", FILES)
def test_a_golden_that_cannot_be_read(here: Path, kind: str) -> None:
    damage, said = FILES[kind]
    name = tensor_file(here).name
    damage(here)
    for command in (("run", "case.py"), ("golden", "status")):
        shown = refused(here, *command)
        assert name in shown
        assert said in shown, (command, shown)
        assert "no-golden" not in shown


def test_prune_leaves_files_of_others_and_cases_that_may_come_back(here: Path) -> None:
    save_file({"x": torch.ones(2)}, here / "golden" / "model.safetensors")
    before = tree(here)
    assert CliRunner().invoke(main, ["golden", "prune"]).exit_code == 0
    assert tree(here) == before
    linked(here / "case.py", "gone")
    assert "symbolic link to 'gone'" in refused(here, "golden", "prune")
    linked(here / "case.py", "case.py")
    assert "lead in a circle" in refused(here, "golden", "prune")
    (here / "other.py").write_text("")  # a file that was imported and is a circle now
    assert "other.py" in refused(here, "list", "other.py")


SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "syntax": (lambda p: p.write_text("def ("), "SyntaxError"),
    "NUL": (lambda p: p.write_bytes(b"import verify\0"), "null bytes"),
    "not utf-8": (lambda p: p.write_bytes(b"x = '\xff'"), "can't decode byte 0xff"),
    "utf-16": (lambda p: p.write_bytes("import verify".encode("utf-16")), "SyntaxError"),
    "deep": (lambda p: p.write_text("x = " + "(" * 5000 + ")" * 5000), "too many nested"),
    "empty": (lambda p: p.write_text(""), "it holds no cases"),
    "pointer": (lambda p: p.write_bytes(POINTER), "SyntaxError"),
    "exits": (lambda p: p.write_text("import sys; sys.exit(0)"), "SystemExit: 0"),
    "folder": (folder, "is a folder, not a file"),
    "dangling": (lambda p: linked(p, "gone"), "symbolic link to 'gone'"),
    "loop": (lambda p: linked(p, p.name), "lead in a circle"),
    "a pipe": (lambda p: (lose(p), os.mkfifo(p)), "not a regular file"),
    "lost": (lose, "no such file"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_case_file_that_cannot_be_imported(here: Path, kind: str) -> None:
    path = here / f"broken_{kind.replace(' ', '_').replace('-', '_')}.py"
    path.write_text("")
    damage, said = SOURCES[kind]
    damage(path)
    for command in (
        ("run", path.name),
        ("run", f"{path.name}::total"),
        ("list", path.name),
        ("golden", "status", path.name),
        ("golden", "update", path.name, "--reason", "damage"),
    ):
        shown = refused(here, *command)
        assert path.name in shown
        assert said in shown, (command, shown)


RESULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "is empty (0 bytes)"),
    "pointer": (lambda p: p.write_bytes(POINTER), "Git LFS pointer"),
    "cut": (lambda p: p.write_text('{"schema_version": 1, "cas'), "Unterminated string"),
    "deep": (lambda p: p.write_text("[" * 100_000), "recursion"),
    "not utf-8": (lambda p: p.write_bytes(b"\xff"), "not UTF-8 text"),
    "other version": (lambda p: p.write_text('{"schema_version": 9}'), "this version reads 1"),
    "a folder": (folder, "is a folder, not a file"),
    "dangling": (lambda p: linked(p, "gone"), "symbolic link to 'gone'"),
    "loop": (lambda p: linked(p, p.name), "lead in a circle"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_that_cannot_be_read(here: Path, kind: str) -> None:
    path = here / "report" / "result.json"
    path.parent.mkdir()
    path.write_text("")
    damage, said = RESULTS[kind]
    damage(path)
    for command in (
        ("report", "report"),
        ("report", "report", "--exit-code", "--format", "json"),
        ("diff", "report", "report"),
        ("diff", "report", "report", "--format", "json"),
    ):
        shown = refused(here, *command)
        assert "report/result.json" in shown
        assert said in shown, (command, shown)


GATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "is empty (0 bytes)"),
    "pointer": (lambda p: p.write_bytes(POINTER), "not TOML"),
    "cut": (lambda p: p.write_text('cases = ["case.py"'), "not TOML"),
    "not utf-8": (lambda p: p.write_bytes(b"\xff"), "not UTF-8 text"),
    "deep": (lambda p: p.write_text("a = " + "[" * 5000), "not TOML"),
    "twice": (lambda p: p.write_text('cases = ["a.py"]\ncases = ["b.py"]'), "not TOML"),
    "other type": (lambda p: p.write_text("cases = 1"), "cases is an integer, it must be a list"),
    "unknown": (lambda p: p.write_text('cases = ["a.py"]\nbudge = 1'), "unknown key 'budge'"),
    "a folder": (folder, "is a folder, not a file"),
    "dangling": (lambda p: linked(p, "gone"), "symbolic link to 'gone'"),
    "loop": (lambda p: linked(p, p.name), "lead in a circle"),
    "a pipe": (lambda p: (lose(p), os.mkfifo(p)), "not a regular file"),
    "lost": (lose, "no such file"),
}


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_that_cannot_be_read(here: Path, kind: str) -> None:
    path = here / "gate.toml"
    path.write_text("")
    damage, said = GATES[kind]
    damage(path)
    shown = refused(here, "gate", "--config", "gate.toml")
    assert "gate.toml" in shown
    assert said in shown, shown
