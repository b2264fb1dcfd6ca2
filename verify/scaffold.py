"""Writes the case file to start from: `verify init`.

It refuses to overwrite anything; the file appears whole or not at all, also when two processes
write it at the same time.
"""

from __future__ import annotations

import importlib.resources
import os
import shlex
import tempfile
from pathlib import Path

from verify.errors import InputFileError


def template() -> str:
    """The text of the file."""
    file = importlib.resources.files("verify").joinpath("templates", "case.txt")
    return file.read_text(encoding="utf-8")


def init(path: Path) -> str:
    """Writes the case file and returns what to do next."""
    if path.suffix != ".py":
        raise InputFileError(f"{path}: a case file ends in .py, such as {path}.py")
    if path.stem in ("verify", "mok", "torch"):
        raise InputFileError(
            f"{path}: a file of that name would shadow the package; choose another"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputFileError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(template())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        path.hardlink_to(temporary)  # unlike a rename, this fails when the name is taken
    except FileExistsError:
        raise InputFileError(f"{path} exists; choose another name or remove it") from None
    except OSError as error:
        raise InputFileError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return f"wrote {path}; now: verify run {shlex.quote(str(path))}"
