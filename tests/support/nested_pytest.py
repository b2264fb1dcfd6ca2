"""A run of pytest in a folder, inside of this process: torch and verify are here already.

A process of its own costs two seconds, most of them for importing torch. What asks for one all the
same: what is imported when, workers of xdist, and who dies.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import _mok_verify_pytest

AWAY = ("CI", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")


def run_here(
    folder: Path, words: tuple[str, ...], cwd: str = ".", **variables: str
) -> tuple[int, str]:
    """Exit status, and both output streams; with the plugin and no other one.

    cwd: where it starts, from the folder that all of its tests lie in.
    """
    said = io.StringIO()
    environment = {name: value for name, value in os.environ.items() if name not in AWAY}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    known, path = dict(sys.modules), list(sys.path)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        patch.chdir(folder / cwd)
        _replace(patch, environment)
        # The outer run has the handler of crashes, and its file.
        given = ["-p", "no:faulthandler", "--capture=sys", *words]
        try:
            code = int(pytest.main(given, plugins=[_mok_verify_pytest]))
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - set(known):
                if _lies_in(sys.modules[name], folder):  # the next folder has other ones
                    del sys.modules[name]
    return code, said.getvalue()


def _replace(patch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)


def _lies_in(module: object, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and folder.resolve() in Path(file).resolve().parents
