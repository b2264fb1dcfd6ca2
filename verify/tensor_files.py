"""Opens safetensors files one tensor at a time, and says exactly why one cannot be opened.

Files that were not checked out, not finished or never were safetensors are the usual case in CI;
"header too large" helps nobody. It refuses to load a whole file, and to guess at one that is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.errors import InputFileError

if TYPE_CHECKING:
    from torch import Tensor

_LFS = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # the format's own limit


class TensorFile:
    """An open file: names, and each tensor when asked."""

    def __init__(self, path: Path, handle: Any) -> None:
        self.path = path
        self._handle = handle
        self.names: list[str] = sorted(handle.keys())

    def tensor(self, name: str) -> Tensor:
        try:
            return self._handle.get_tensor(name)
        except Exception as error:  # safetensors raises SafetensorError, torch KeyError and others
            raise InputFileError(f"{self.path}: cannot read tensor {name!r}: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """The file, checked. Raises InputFileError naming file and reason."""
    problem = problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputFileError(f"{path}: not a safetensors file: {error}") from error
    with handle as inner:
        yield TensorFile(path, inner)


def problem_of(path: Path) -> str | None:
    """Why `path` cannot be a readable safetensors file, in one line, or None."""
    if path.is_dir():
        return "is a folder, not a file"
    try:
        with path.open("rb") as file:
            head = file.read(512)
            size = file.seek(0, 2)
            if size == 0:
                return "is empty (0 bytes)"
            if head.startswith(_LFS):
                return _pointer(head, path)
            if size < 8:
                return f"not a safetensors file: only {size} bytes"
            length = int.from_bytes(head[:8], "little")
            if length > _LONGEST_HEADER or head[8:9] != b"{":
                return f"not a safetensors file: begins with {head[:16]!r}"
            if 8 + length > size:
                return f"is truncated: its header needs {8 + length} bytes, the file has {size}"
            file.seek(8)
            return _data_problem(file.read(length), size - 8 - length)
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return f"cannot read: {error.strerror or error}"


def _pointer(head: bytes, path: Path) -> str:
    size = re.search(rb"^size (\d+)", head, re.MULTILINE)
    stated = f" of {int(size.group(1))} bytes" if size else ""
    return (
        f"is a Git LFS pointer, not the file{stated} itself; "
        f"get it with: git lfs pull --include={path.name}"
    )


def _data_problem(header: bytes, available: int) -> str | None:
    """Whether the tensors that the header promises are there."""
    try:
        entries = json.loads(header)
        ends = [
            int(entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        return f"not a safetensors file: its header is malformed ({type(error).__name__})"
    needed = max(ends, default=0)
    if needed > available:
        return f"is truncated: its tensors need {needed} bytes, {available} are there"
    return None
