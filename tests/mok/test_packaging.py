"""A wheel brings the CUDA sources, an sdist everything that a wheel is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import mok
from mok import kernel_sources

TOP = Path(mok.__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (TOP / "pyproject.toml").exists(), reason="the package is installed, not a checkout"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A wheel and an sdist, built without network from a copy of what they are made of."""
    work = tmp_path_factory.mktemp("tree")
    for name in ("mok", "csrc"):
        shutil.copytree(TOP / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "_mok_verify_pytest.py"):
        shutil.copy(TOP / name, work / name)
    code = (
        "from setuptools import build_meta as b\n"
        "print('built', b.build_wheel('out'), b.build_sdist('out'))"
    )
    (work / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=work, check=True, capture_output=True, text=True
    )
    wheel, sdist = done.stdout.splitlines()[-1].split()[1:]
    return work / "out" / wheel, work / "out" / sdist


def _sources():
    """What compiles. Notes on what was tried are for who works on a checkout, and stay there."""
    root = kernel_sources.source_root()
    files = [p for p in root.rglob("*") if p.is_file() and p.suffix != ".md"]
    return {f"csrc/{p.relative_to(root).as_posix()}" for p in files}


def test_a_wheel_holds_every_source_inside_the_package(packages):
    names = zipfile.ZipFile(packages[0]).namelist()
    found = {name.removeprefix("mok/") for name in names if name.startswith("mok/csrc/")}
    assert found == _sources()
    assert [name for name in names if name.startswith("csrc/")] == []


def test_an_installed_package_finds_its_sources(packages, tmp_path):
    zipfile.ZipFile(packages[0]).extractall(tmp_path)
    code = "from mok import kernel_sources as k; print(k.source_root(), *k.list_sources())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    root, *sources = done.stdout.split()
    assert Path(root) == (tmp_path / "mok/csrc").resolve()
    assert tuple(sources) == kernel_sources.list_sources()


def test_an_sdist_holds_every_source_and_what_maps_it(packages):
    with tarfile.open(packages[1]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert _sources() | {"setup.py", "pyproject.toml"} <= names


def test_a_package_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_sources, "__file__", str(tmp_path / "mok" / "kernel_sources.py"))
    with pytest.raises(kernel_sources.SourceMissing, match="the CUDA sources are missing"):
        kernel_sources.source_root()


def test_ci_compiles_with_the_versions_that_the_extra_allows():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (TOP / "ci/constraints.txt").read_text(), re.M))
    extra = project["optional-dependencies"]["cuda"]
    names = [re.match(r"[\w-]+", one).group() for one in extra]
    assert names == ["cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"]
    for name in names[1:]:
        assert pins[name].startswith("13.0.")
        assert f"{name}>=13.0,<13.1" in extra
    assert pins["cuda-core"].startswith("1.")
