"""Patterns for files: `*` and `?` inside a folder, `**` over any number of folders, `[...]`.

One meaning for files on the disk and for names that git gives, which may be gone from the disk. It
refuses patterns that lead out of the current directory, since nothing there is part of a change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

_MAGIC = re.compile(r"[*?\[]")


def problem_of(pattern: str) -> str | None:
    """What is wrong with a pattern, or None."""
    parts = pattern.split("/")
    if pattern.startswith("/") or ".." in parts or "." in parts or "" in parts:
        return "write it relative to the current directory, such as csrc/** or mok/*.py"
    if any("**" in part and part != "**" for part in parts):
        return "`**` stands alone between slashes, such as csrc/**/*.cu"
    try:
        _compiled(pattern)
    except re.error as error:
        return f"not a pattern: {error}"
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name relative to the current directory, with slashes, matches any of them."""
    return any(_compiled(pattern).fullmatch(name) for pattern in patterns)


def below(folder: str, patterns: Iterable[str]) -> bool:
    """Whether any of them can match a file below a folder."""
    return any(_leads_into(folder.split("/"), pattern.split("/")) for pattern in patterns)


def all_below(folder: str, patterns: Iterable[str]) -> bool:
    """Whether one of them, `folder/**` say, matches whatever is below a folder."""
    return any(
        pattern == "**" or (pattern.endswith("/**") and matches(folder, [pattern[:-3]]))
        for pattern in patterns
    )


def any_file(pattern: str, root: Path) -> bool:
    """Whether a file below `root` matches."""
    return any(matches(name, [pattern]) for name in _files(pattern, root))


def files(pattern: str, root: Path) -> Iterator[str]:
    """The files below `root` that match; links to folders are not followed, except where the
    pattern names one itself."""
    return (name for name in _files(pattern, root) if matches(name, [pattern]))


def linked(pattern: str, root: Path) -> Iterator[tuple[str, str]]:
    """Names that a pattern reaches through a link, each with its real name from `root`.

    A name of a file that matches, or of a link to a folder below which the pattern could match. Git
    tells changes by real names only.
    """
    here = os.path.realpath(root)
    for name in _files(pattern, root, links=True):
        real = Path(os.path.relpath(os.path.realpath(root / name), here)).as_posix()
        if real != name and (
            matches(name, [pattern]) or ((root / name).is_dir() and below(name, [pattern]))
        ):
            yield name, real


def _leads_into(folder: list[str], parts: list[str]) -> bool:
    for name, part in zip(folder, parts, strict=False):
        if part == "**":
            return True
        if not _compiled(part).fullmatch(name):
            return False
    return len(parts) > len(folder)


def _files(pattern: str, root: Path, *, links: bool = False) -> Iterator[str]:
    """Names of files that might match: only the folders are looked into that the pattern names.

    links: also those of links to folders.
    """
    parts = pattern.split("/")
    fixed = 0
    while fixed < len(parts) - 1 and not _MAGIC.search(parts[fixed]):
        fixed += 1
    start = root.joinpath(*parts[:fixed])
    deep = "**" in parts
    for folder, folders, names in os.walk(start):
        folders[:] = sorted(one for one in folders if one != ".git")
        inside = Path(folder).relative_to(root)
        if not deep and len(inside.parts) >= len(parts) - 1:
            folders.clear()  # the pattern cannot match below them
        if links:
            names = [*names, *(one for one in folders if (Path(folder) / one).is_symlink())]
        for name in sorted(one for one in names if one != ".git"):  # a file in a submodule
            yield (inside / name).as_posix()


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = pattern.split("/")
    written = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            written += ".+" if last else "(?:[^/]+/)*"
        else:
            written += _part(part) + ("" if last else "/")
    return re.compile(written, re.DOTALL)


def _part(part: str) -> str:
    """One name of a path as a regular expression."""
    written, position = "", 0
    while position < len(part):
        character = part[position]
        position += 1
        if character == "*":
            written += "[^/]*"
        elif character == "?":
            written += "[^/]"
        elif character == "[":
            negated = part[position : position + 1] == "!"
            start = position + negated
            end = part.find("]", start + 1)
            if end < 0:
                written += re.escape("[")
                continue
            inside = re.sub(r"([\\\[\]^&|~])", r"\\\1", part[start:end])
            written += f"[{'^/' if negated else ''}{inside}]"
            position = end + 1
        else:
            written += re.escape(character)
    return written
