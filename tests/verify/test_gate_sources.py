"""The files of a case: files and patterns, where they are looked for, and what a change does."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import verify
from mok import kernel_sources
from verify.builtin import covered
from verify.cases import Case
from verify.errors import CaseError
from verify.sources import shown, source_digest, source_files, sources_of
from verify.targets import builtin, find

HERE = Path(__file__).resolve()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def case(*sources: str, **more: Any) -> Case:
    """A case; not one in a variable here, which the plugin would run as a test."""
    return Case(
        **{"name": "double", "execute": double, "inputs": {"x": verify.normal(4)}, **more},
        sources=sources,
    )


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("csrc/a.cu", "csrc/deep/b.cu", "csrc/deep/c.h", "odd [name].cu"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (("csrc/a.cu",), ["csrc/a.cu"]),
        (("csrc/**/*.cu",), ["csrc/a.cu", "csrc/deep/b.cu"]),
        (("csrc/**",), ["csrc/a.cu", "csrc/deep/b.cu", "csrc/deep/c.h"]),
        (("csrc/deep/?.h", "csrc/*.cu", "csrc/a.cu"), ["csrc/a.cu", "csrc/deep/c.h"]),
        (("odd [name].cu",), ["odd [name].cu"]),  # a file by that name is no pattern
    ],
)
def test_files_and_patterns(tree: Path, sources: tuple[str, ...], names: list[str]) -> None:
    own = case(*sources)
    assert source_files(own) == [HERE, *(tree / name for name in names)]
    assert sources_of(own) == [shown(HERE), *names]


@pytest.mark.parametrize("entry", ["csrc/gone.cu", "csrc/*.py", "csrc", "[", ""])
def test_a_source_that_is_not_there_is_an_error(tree: Path, entry: str) -> None:
    with pytest.raises(CaseError, match="no file, and as a pattern it matches none") as caught:
        source_files(case(entry))
    assert str(tree) in str(caught.value)
    assert str(HERE.parent) in str(caught.value)
    assert repr(entry) in str(caught.value)


def test_text_is_no_tuple() -> None:
    with pytest.raises(CaseError, match="must be a tuple"):
        source_files(replace(case(), sources="csrc/a.cu"))


def test_the_file_of_the_case_comes_before_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("cases", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel.cu").write_text(folder)
    (tmp_path / "elsewhere" / "other.cu").write_text("")
    (tmp_path / "cases" / "near.py").write_text(
        "import verify\n"
        "@verify.case(sources=('kernel.cu', 'other.cu'))\n"
        "def near():\n    return None\n"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    (found,) = find("../cases/near.py")
    assert source_files(found.case)[1:] == [
        tmp_path / "cases" / "kernel.cu",
        tmp_path / "elsewhere" / "other.cu",
    ]


def test_the_digest_follows_every_matched_file_and_not_the_place(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = case("csrc/**")
    before = source_digest(own)
    assert source_digest(case("csrc/**", "csrc/a.cu")) == before
    for change in ("csrc/deep/c.h", "csrc/a.cu"):
        content = (tree / change).read_text()
        (tree / change).write_text("changed")
        assert source_digest(own) != before
        (tree / change).write_text(content)
        assert source_digest(own) == before
    (tree / "csrc/new.cu").write_text("new")
    assert source_digest(own) != before
    (tree / "csrc/new.cu").unlink()
    moved = tmp_path_factory.mktemp("moved")
    (tree / "csrc").rename(moved / "csrc")
    monkeypatch.chdir(moved)
    assert source_digest(own) == before


class Callable:
    def __call__(self) -> None:
        return None


@pytest.mark.parametrize(
    "execute", [functools.partial(double, x=1), Callable(), Callable().__call__, Callable]
)
def test_the_function_behind_other_callables(execute: object) -> None:
    assert source_files(case(execute=execute)) == [HERE]


def test_a_function_without_a_file_has_none() -> None:
    names: dict[str, object] = {}
    exec("def made():\n    return 1", names)
    for execute in (torch.relu, names["made"]):
        assert source_files(case(execute=execute)) == []


def test_an_installed_package_is_shown_from_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "venv" / "site-packages" / "kernels" / "deep"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)  # it lies below the current directory, and still
    assert shown(package / "x.py") == "kernels/deep/x.py"
    monkeypatch.chdir(package)
    assert shown(package / "x.py") == "x.py"
    monkeypatch.chdir("/")
    assert shown(tmp_path / "alone.py") in ("alone.py", str(tmp_path / "alone.py")[1:])


LOADED = """
import sys
from pathlib import Path
from verify.builtin import covered
from verify.conditions import CONDITIONS
from verify.conduct import set_up
from verify.plans import RunOptions, plan_of, with_options
from verify.sessions import Session, first
from verify.sources import source_files
from verify.targets import find_exact

# moe-1024 is the layer alone, as moe without its reference, and takes longer
for name, claim, like in (
    ("moe", "repeat", "moe-1024"),
    ("moe", "reference", "moe"),
    ("moe/float64-clamped", "reference", "moe/float64-clamped"),
    ("moe/exact-skewed", "exact", "moe/exact-skewed"),
):
    options = RunOptions(runs=1, claims=(claim,))
    found = with_options(find_exact(name), options)
    stage = set_up(found, 0, 1, None, lambda failure: failure)
    session = Session(stage, plan_of(found, options, 1), lambda record: None)
    assert first(session).failure is None
    CONDITIONS[claim](session, 1)
    mok = {m.__file__ for n, m in sys.modules.items() if n == "mok" or n.startswith("mok.")}
    # the compiler of kernels is loaded by verify itself, for its digests, and so is what ends its
    # workers; no case executes them
    jit = ("jit", "toolchain", "compilation", "compile_cache", "kernel_sources", "kernels")
    jit += ("ptxas_log", "loading", "launching", "endings")
    mok -= {m.__file__ for n, m in sys.modules.items() if n.removeprefix("mok.") in jit}
    files = source_files(find_exact(like).case)
    elsewhere = {str(Path(name).resolve()) for name in covered.ON_GPU}
    python = {str(p) for p in files if p.suffix == ".py" and "mok" in p.parts[-3:-1]}
    print(like, sorted(mok ^ (python - elsewhere)), elsewhere <= set(map(str, files)))
"""


def test_built_in_cases_name_the_files_of_mok_that_they_execute() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    names = ("moe-1024", "moe", "moe/float64-clamped", "moe/exact-skewed")
    # only the first has widths that the Hopper kernel takes
    told = [f"{name} [] {name == 'moe-1024'}" for name in names]
    assert done.stdout.splitlines() == told, done.stderr


def test_kernels_that_a_case_runs_on_a_gpu_are_named_with_all_that_they_include() -> None:
    named = {Path(name).resolve() for name in covered.ON_GPU}
    root = kernel_sources.source_root()
    used = {
        name
        for source in kernel_sources.list_sources()
        if source.startswith("moe/")
        for name in (source, *kernel_sources.included_files(source))
    }
    assert {root / name for name in used} == {path for path in named if path.suffix != ".py"}


def test_every_built_in_case_covers_the_arithmetic() -> None:
    for found in [*builtin(), *find("moe/float64-*")]:
        assert "mok/portable.py" in [
            path.relative_to(path.parents[1]).as_posix() for path in source_files(found.case)
        ]
