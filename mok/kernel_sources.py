"""Where the CUDA sources lie, and which files a kernel is made of.

In a checkout they are in `csrc/` beside the package; in an installed package in `mok/csrc/`. A
kernel's identity for the cache is the content of its file and of everything that it includes, not
of the whole folder: a change of one kernel leaves the others compiled. Where a file says `include`
in any form but the plain quoted line (brackets, a macro, a comment between), what it means is not
guessed, and the whole folder counts. Refuses sources outside that folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from mok.toolchain import JitError, SourceMissing

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# The word itself, also as `__has_include` and `include_next`; a comment that holds it costs only
# compilations. Lines may go on after a backslash, inside a word too.
_WORD = re.compile(r"(?<![a-zA-Z0-9])include(?![a-zA-Z0-9])")
_SPLICE = re.compile(r"\\[ \t\f\v]*\n")


def source_root() -> Path:
    """The folder of CUDA sources, installed or in a checkout.

    Raises SourceMissing if the package came without them.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise SourceMissing(
        f"the CUDA sources are missing: neither {package / 'csrc'} nor {package.parent / 'csrc'} "
        "exists. Install the package again, from a wheel, an sdist or a checkout"
    )


def list_sources() -> tuple[str, ...]:
    """Every .cu file below `source_root()`, relative to it with forward slashes, sorted."""
    root = source_root()
    return tuple(sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu")))


def read_source(source: str) -> str:
    """The text of one file, named relative to `source_root()`.

    Raises SourceMissing with the sources that exist, and JitError for one that cannot be read.
    """
    root = source_root()
    path = (root / source).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        known = ", ".join(list_sources()) or "none"
        raise SourceMissing(
            f"no kernel source {source!r} in {root}; there are: {known}. "
            'Name it relative to that folder, such as "digest/digest.cu"'
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JitError(
            f"kernel source {source} is not UTF-8: byte {error.object[error.start]:#04x} at "
            f"{error.start}. Save it as UTF-8"
        ) from error
    except OSError as error:
        raise JitError(
            f"kernel source {source} cannot be read ({error.strerror or error}). Check its "
            "permissions"
        ) from error


def included_files(source: str) -> tuple[str, ...]:
    """What `source` includes with quotes, directly or not, relative to the root and sorted.

    An include below `#if` counts always: that costs a compilation too many, never one too few. A
    file that does not exist is left out; if it is really included, the compiler says so.
    """
    root = source_root()
    seen: set[str] = set()
    waiting = [source]
    while waiting:
        for name in _INCLUDE.findall(read_source(waiting.pop())):
            if name not in seen and (root / name).is_file():
                seen.add(name)
                waiting.append(name)
    return tuple(sorted(seen - {source}))


def source_digest(source: str) -> bytes:
    """SHA-256 over names and contents of `source` and all that it includes.

    If one of these files includes something in another form than a plain line, it is over every
    file of the folder.
    """
    names = (source, *included_files(source))
    if not all(_plain(read_source(name)) for name in names):
        return _hashed(source, _everything())
    return _hashed(source, [(name, read_source(name).encode()) for name in names])


def _plain(text: str) -> bool:
    """Whether every `include` of a file is one that `included_files` follows."""
    return len(_WORD.findall(_SPLICE.sub("", text))) == len(_INCLUDE.findall(text))


def _everything() -> list[tuple[str, bytes]]:
    root = source_root()
    try:
        return [
            (path.relative_to(root).as_posix(), path.read_bytes())
            for path in sorted(root.rglob("*"))
            if path.is_file()
        ]
    except OSError as error:
        raise JitError(
            f"{error.filename} cannot be read ({error.strerror or error}). Check its permissions"
        ) from error


def _hashed(source: str, files: Iterable[tuple[str, bytes]]) -> bytes:
    digest = hashlib.sha256()
    for name, content in ((source, b""), *files):
        for part in (name.encode(errors="surrogateescape"), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()
