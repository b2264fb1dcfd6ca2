"""From what a user types to cases: `file.py::case`, `file.py`, `package.module:case`, or a name.

Importing a user's file runs it, as pytest would. Its folder goes to the end of the path, so that
its neighbours can be imported.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

from verify.cases import Case
from verify.errors import CaseError

BUILTIN_MODULE = "verify.builtin"


@dataclass(frozen=True)
class Found:
    """A case and the target that finds exactly it again, in any process."""

    case: Case
    target: str


def find(target: str) -> list[Found]:
    """The cases of a target, in the order of definition.

    Raises CaseError when there is no such file, module or case; it names close ones.
    """
    if "::" in target:
        path, _, name = target.partition("::")
        return _select(_of_file(path), name, target)
    if target.endswith(".py") or Path(target).is_file():
        return _select(_of_file(target), "*", target)
    if ":" in target:
        module, _, name = target.partition(":")
        return _select(_of_module(module), name, target)
    return _select(builtin(), target, target)


def find_exact(target: str) -> Found:
    """The one case that a full target names, as `Found.target` gives it."""
    for one in find(target):
        if one.target == target:
            return one
    raise CaseError(f"{target!r} names no single case; give file.py::case or package.module:case")


def builtin() -> list[Found]:
    """The cases that ship with the package."""
    module = importlib.import_module(BUILTIN_MODULE)
    return [Found(case, case.name) for case in module.CASES]


def _select(found: list[Found], name: str, target: str) -> list[Found]:
    """Those called `name`, matching it as a pattern, or lying below it (`name/...`)."""
    chosen = [
        one
        for one in found
        if one.case.name == name
        or one.case.name.startswith(f"{name}/")
        or fnmatchcase(one.case.name, name)
    ]
    if chosen:
        return chosen
    names = [one.case.name for one in found]
    close = difflib.get_close_matches(name, names, n=3) or names[:10]
    hint = f"did you mean {', '.join(close)}?" if close else "it holds no cases (@verify.case)"
    raise CaseError(
        f"no case {name!r} in {target!r}; {hint} "
        "A target is file.py::case, file.py, package.module:case or a built-in name"
    )


def cases_in(module: ModuleType) -> list[Case]:
    cases: list[Case] = []
    for value in vars(module).values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Case) and not any(one is other for other in cases):
                cases.append(one)
    names = [case.name for case in cases]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise CaseError(f"{module.__name__} holds two cases called {double!r}; rename one")
    return cases


def _of_module(name: str) -> list[Found]:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise CaseError(f"cannot import module {name!r}: {error}") from error
    return [Found(case, f"{name}:{case.name}") for case in cases_in(module)]


def _of_file(path: str) -> list[Found]:
    module = import_file(Path(path))
    return [Found(case, f"{path}::{case.name}") for case in cases_in(module)]


def import_file(path: Path) -> ModuleType:
    """The module of a file, imported once per process under a name of its own.

    A module that is already imported from that file (by pytest, say) is used as it is.
    """
    resolved = path.resolve()
    if not resolved.is_file():
        raise CaseError(f"no such file: {path}")
    loaded = loaded_from(path)
    if loaded is not None:
        return loaded
    name = f"{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise CaseError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(resolved.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file there cannot shadow an installed package
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def loaded_from(path: Path) -> ModuleType | None:
    """The module that this process has already loaded from a file; never runs it."""
    resolved = path.resolve()
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if origin and module.__name__ != "__mp_main__" and Path(origin).resolve() == resolved:
            return module
    return None
