"""Where the CUDA sources lie, and which files a kernel is made of.

In a checkout they are in `csrc/` beside the package; in an installed package in `mok/csrc/`. A
kernel's identity for the cache is the content of its file and of everything that it includes, not
of the whole folder: a change of one kernel leaves the others compiled. Refuses sources outside
that folder.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from mok.toolchain import SourceMissing

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


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

    Raises SourceMissing with the sources that exist.
    """
    root = source_root()
    path = (root / source).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        known = ", ".join(list_sources()) or "none"
        raise SourceMissing(
            f"no kernel source {source!r} in {root}; there are: {known}. "
            'Name it relative to that folder, such as "digest/digest.cu"'
        )
    return path.read_text(encoding="utf-8")


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
    """SHA-256 over names and contents of `source` and all that it includes."""
    digest = hashlib.sha256()
    for name in (source, *included_files(source)):
        for part in (name.encode(), read_source(name).encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()
