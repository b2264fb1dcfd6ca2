"""From what a user types to cases: `file.py::case`, `file.py`, `package.module:case`, or a name.

Importing a user's file runs it, as pytest would. Its folder goes to the end of the path, so that
its neighbours can be imported; a file of a package is imported under its dotted name. Whatever goes
wrong in it is a CaseError, and what it prints goes to stderr: stdout belongs to the report.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from verify import input_files
from verify.cases import Case
from verify.errors import CaseError, VerifyError

BUILTIN_MODULE = "verify.builtin"


@dataclass(frozen=True)
class Found:
    """A case and the target that finds exactly it again, in any process.

    by_name: chosen by its name or a pattern only, not as one below a shorter name.
    """

    case: Case
    target: str
    by_name: bool = False


def find(target: str) -> list[Found]:
    """The cases of a target, in the order of definition.

    Raises CaseError when there is no such file, module or case; it names close ones.
    """
    if "::" in target:
        path, _, name = target.partition("::")
        return _select(cases_of_file(path), name, target)
    if target.endswith(".py") or Path(target).is_file():
        return _select(cases_of_file(target), "*", target)
    if ":" in target:
        module, _, name = target.partition(":")
        return _select(cases_of_module(module), name, target)
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
    return [
        *(Found(case, case.name) for case in module.CASES),
        *(Found(case, case.name, by_name=True) for case in module.BY_NAME),
    ]


def _select(found: list[Found], name: str, target: str) -> list[Found]:
    """Those called `name`, matching it as a pattern, or lying below it (`name/...`)."""
    chosen = [
        one
        for one in found
        if one.case.name == name
        or (one.case.name.startswith(f"{name}/") and not one.by_name)
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
    double = twice([case.name for case in cases])
    if double is not None:
        raise CaseError(f"{module.__name__} holds two cases called {double!r}; rename one")
    return cases


def twice(names: list[str]) -> str | None:
    """The first name that stands there more than once, or None."""
    return next((name for name in names if names.count(name) > 1), None)


def cases_of_module(name: str) -> list[Found]:
    """Every case of an importable module. Raises CaseError when importing it fails."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with _importing(name):
        module = importlib.import_module(name)
    return [Found(case, f"{name}:{case.name}") for case in cases_in(module)]


def cases_of_file(path: str) -> list[Found]:
    """Every case of a file. Raises CaseError for no such file, or when importing it fails."""
    module = import_file(Path(path))
    return [Found(case, f"{path}::{case.name}") for case in cases_in(module)]


def import_file(path: Path) -> ModuleType:
    """The module of a file, imported once per process under a name of its own.

    A module that is already imported from that file (by pytest, say) is used as it is.
    """
    problem = input_files.problem_of(path)
    if problem:
        given = f"no such file: {path}" if problem == "no such file" else f"{path}: {problem}"
        raise CaseError(given)
    resolved = path.resolve()
    loaded = loaded_from(path)
    if loaded is not None:
        return loaded
    folder = str(resolved.parent)
    package = _package_of(resolved)
    if package is not None:
        root, dotted = package
        _append(root)
        _append(folder)
        with _importing(path):
            return importlib.import_module(dotted)
    name = f"{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise CaseError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _append(folder)
    try:
        with _importing(path):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _append(folder: str) -> None:
    """To the end of the path, so that nothing there can shadow an installed package."""
    if folder not in sys.path:
        sys.path.append(folder)


def _package_of(file: Path) -> tuple[str, str] | None:
    """The folder above a file's outermost package and the file's dotted name.

    None outside of packages, and where another package has that name already.
    """
    top = file.parent
    if file.suffix != ".py" or not (top / "__init__.py").is_file():
        return None
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    parts = list(file.relative_to(top.parent).with_suffix("").parts)
    if any("." in part for part in parts):
        return None
    if parts[-1] == "__init__":
        parts.pop()
    loaded = sys.modules.get(top.name)
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
    else:
        spec = importlib.machinery.PathFinder.find_spec(top.name, [*sys.path, str(top.parent)])
        origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve() != top / "__init__.py":
        return None
    return str(top.parent), ".".join(parts)


@contextlib.contextmanager
def _importing(what: str | Path) -> Iterator[None]:
    """Sends what is printed to stderr and makes a CaseError of whatever is raised."""
    try:
        with contextlib.redirect_stdout(sys.stderr), _no_silent_end():
            yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except ModuleNotFoundError as error:
        if isinstance(what, str) and error.name and f"{what}.".startswith(f"{error.name}."):
            raise CaseError(f"cannot import module {what!r}: {error}") from error
        raise _failed(what, error) from error
    except BaseException as error:  # SystemExit too, and what pytest raises to skip a file
        raise _failed(what, error) from error


@contextlib.contextmanager
def _no_silent_end() -> Iterator[None]:
    """A file that ends the process while it is imported would end this tool with its own code, 0
    perhaps; children that it forked may still end so."""
    process, leave = os.getpid(), os._exit

    def refuse(code: int) -> NoReturn:
        if os.getpid() != process:
            leave(code)
        raise SystemExit(f"os._exit({code})")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


def _failed(what: str | Path, error: BaseException) -> CaseError:
    """What went wrong and where: in the file itself if it is a file and known."""
    file = str(what.resolve()) if isinstance(what, Path) else ""
    message = told(error)
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
        places = [(error.filename, error.lineno)]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(one.filename, one.lineno) for one in frames if one.filename == file][-1:]
        places = places or [(f.filename, f.lineno) for f in frames if f.name == "<module>"][:1]
    where = ""
    for name, line in places:
        if line is not None:
            where = f" (line {line})" if name == file else f" ({name}, line {line})"
    kind = "" if isinstance(error, VerifyError) else f"{type(error).__name__}: "
    return CaseError(f"importing {what} failed: {kind}{message}{where}")


def told(error: BaseException) -> str:
    """The message of an exception, whose own text may raise as well."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown: __str__ raises)"


def loaded_from(path: Path) -> ModuleType | None:
    """The module that this process has already loaded from a file; never runs it."""
    resolved = os.path.realpath(path)  # not Path.resolve, which raises for a circle of links
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if origin and module.__name__ != "__mp_main__" and os.path.realpath(origin) == resolved:
            return module
    return None
