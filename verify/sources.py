"""Which files a case stands for: the one that holds its function, and what its `sources` name.

The result document shows their names and one digest over their content; the gate asks them whether
a changed file is covered. It refuses sources that are not there: a misspelt name would cover a file
that nobody checks.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from verify.cases import Case
from verify.errors import CaseError

_INSTALLED = {"site-packages", "dist-packages"}


def source_files(case: Case) -> list[Path]:
    """The files of a case, resolved: that of its function first, then the named ones, sorted.

    An entry of `sources` is a file or a pattern (`*`, `?`, `[...]`, and `**` for any number of
    folders). It is looked for from the folder of the function's file, then from the current
    directory. Raises CaseError for an entry that names no file in either.
    """
    own = _own(case.execute)
    named = {found for entry in _entries(case) for found in _matches(case, entry, own)}
    return [*([own] if own else []), *sorted(named - {own})]


def sources_of(case: Case) -> list[str]:
    """Their names for a reader, as `shown` gives them."""
    return list(dict.fromkeys(shown(path) for path in source_files(case)))


def source_digest(case: Case) -> str:
    """sha256 over the content of the case's files, in the order of `source_files`.

    The same content in the same folders has the same digest, wherever the tree lies.
    """
    total = hashlib.sha256()
    for path in source_files(case):
        try:
            content = path.read_bytes()
        except OSError as error:
            reason = error.strerror or error
            raise CaseError(
                f"case {case.name!r}: cannot read its source {path}: {reason}"
            ) from error
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


def shown(path: Path) -> str:
    """A resolved path from the current directory; of an installed package from above the package.

    A file that is neither is shown by its name alone, since folders above it say nothing elsewhere.
    """
    here = Path(os.path.realpath(Path.cwd()))
    if path.is_relative_to(here) and not _INSTALLED & set(path.relative_to(here).parts):
        return path.relative_to(here).as_posix()
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top).as_posix()


def _own(execute: Callable[..., Any]) -> Path | None:
    """The file that holds the function of a case; None for what was not read from a file."""
    while isinstance(execute, functools.partial):
        execute = execute.func
    execute = inspect.unwrap(execute)
    known = inspect.isroutine(execute) or inspect.isclass(execute)
    with suppress(TypeError, OSError):
        path = Path(inspect.getsourcefile(execute if known else type(execute)) or "")
        return Path(os.path.realpath(path)) if path.is_file() else None
    return None


def _entries(case: Case) -> list[str]:
    if isinstance(case.sources, str):
        raise CaseError(
            f"case {case.name!r}: sources must be a tuple of names: ({case.sources!r},)"
        )
    return [str(entry) for entry in case.sources]


def _matches(case: Case, entry: str, own: Path | None) -> list[Path]:
    """The files of one entry, from the first place that has any."""
    bases = list(dict.fromkeys([*([own.parent] if own else []), Path.cwd()]))
    for base in bases:
        if (base / entry).is_file():
            return [Path(os.path.realpath(base / entry))]
        found = glob.glob(entry, root_dir=base, recursive=True)
        files = [Path(os.path.realpath(base / name)) for name in found if (base / name).is_file()]
        if files:
            return files
    raise CaseError(
        f"case {case.name!r}: its source {entry!r} is no file, and as a pattern it matches none; "
        f"looked for from {' and '.join(map(str, bases))}; correct it or take it out of sources"
    )
