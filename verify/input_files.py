"""Reads files that somebody else wrote, and says in one line why one cannot be read.

A link into nothing, a circle of links, a pipe in place of a file, a Git LFS pointer, text in
another encoding and JSON that says a name twice are named as what they are, with the file. It
refuses to take any of them for a file that is not there, and JSON that Python alone would accept.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verify.errors import InputFileError

DEEPEST = 100  # levels of lists and objects; no document of ours has ten
_LFS = "version https://git-lfs"


def problem_of(path: Path, *, pipes: bool = False) -> str | None:
    """Why `path` is no file whose bytes can be had, in one line, or None.

    pipes: whether a pipe will do, which can be read once and from its beginning only.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return absence_of(path, error)
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return None
    return "is not a regular file (a device, socket or pipe)"


def absence_of(path: Path, error: Exception) -> str:
    """What an error of the operating system about `path` means, in one line."""
    if isinstance(error, ValueError):  # not an OSError: the name never reaches the system
        return "no such file: a path cannot hold a NUL byte"
    if not isinstance(error, OSError):
        return f"cannot read: {error}"
    if error.errno == errno.ELOOP:
        return "cannot read: its symbolic links lead in a circle"
    if error.errno == errno.ENOTDIR:
        return "no such file: a part of its path is a file, not a folder"
    if error.errno == errno.ENOENT:
        for link in (path, *path.parents):
            if link.is_symlink() and not link.exists():
                what = "it" if link == path else link
                return f"no such file: {what} is a symbolic link to {_target(link)}, which is gone"
        return "no such file"
    return f"cannot read: {error.strerror or error}"


def exists(path: Path) -> bool:
    """Whether something is there. InputFileError where that cannot be told, or a link is broken.

    Unlike `Path.exists`, which takes a circle of links and a folder that cannot be entered for
    nothing at all.
    """
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        problem = absence_of(path, error)
        if problem == "no such file":
            return False
        raise InputFileError(f"{path}: {problem}") from None
    return True


def read_text(path: Path, what: str, *, pipes: bool = False, largest: int = 2**31) -> str:
    """The UTF-8 text of a file that should be `what` ("a result document").

    Raises InputFileError naming path and reason.
    """
    problem = problem_of(path, pipes=pipes)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    try:
        size = path.stat().st_size
        if size > largest:
            raise InputFileError(f"{path}: not {what}: {size} bytes, at most {largest} are allowed")
        content = path.read_bytes()
    except OSError as error:
        raise InputFileError(f"{path}: {absence_of(path, error)}") from error
    if not content:
        raise InputFileError(f"{path}: not {what}: is empty (0 bytes)")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputFileError(f"{path}: not {what}: not UTF-8 text") from None


def parse_json(text: str, name: str, what: str) -> Any:
    """The value of strict JSON: no name twice in an object, no NaN, no number beyond float64.

    Raises InputFileError; `name` says which file it was.
    """
    if text.startswith(_LFS):
        raise InputFileError(f"{name}: not {what}: {pointer(text, name)}")
    try:
        return strict_json(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{name}: not {what}: {error}") from None


def strict_json(text: str | bytes) -> Any:
    """As `json.loads`; ValueError for names that occur twice, numbers that are not finite and
    values nested more than DEEPEST deep, which whoever walks through them later would trip over."""
    value = json.loads(
        text,
        object_pairs_hook=_without_doubles,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=_short,
    )
    level, depth = [value], 0
    while level := [item for node in level for item in _inside(node)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
    return value


def is_pointer(head: bytes) -> bool:
    """Whether a file that begins so is Git LFS's note about a file, not the file."""
    return head.startswith(_LFS.encode())


def pointer(text: str, name: str) -> str:
    """What a Git LFS pointer says, and what to do."""
    size = re.search(r"^size (\d{1,18})$", text, re.MULTILINE)
    stated = f" of {int(size.group(1))} bytes" if size else ""
    return (
        f"is a Git LFS pointer, not the file{stated} itself; "
        f"get it with: git lfs pull --include={Path(name).name}"
    )


def _inside(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _target(link: Path) -> str:
    try:
        return repr(os.readlink(link))
    except OSError:
        return "something"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {double!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which is not JSON")


def _short(text: str) -> int:
    if len(text) > 300:  # nothing that is counted or measured is; later it would not fit a float
        raise ValueError(f"the number {text[:40]}... has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is beyond float64")
    return value
