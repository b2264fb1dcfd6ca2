"""Opens safetensors files one tensor at a time, and says exactly why one cannot be opened.

Files that were not checked out, not finished or never were safetensors are the usual case in CI;
"header too large" helps nobody. It refuses to load a whole file, and to guess at one that is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify import input_files
from verify.errors import InputFileError

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_HEADER = 100_000_000  # the format's own limit
_OTHERS = (  # what a file that begins so is instead
    (b"\x93NUMPY", "a NumPy file (.npy)"),
    (b"PK\x03\x04", "a zip archive, as torch.save and numpy.savez write"),
    (b"\x80\x02", "a pickle, as older versions of torch.save wrote"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x1f\x8b", "a file compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"<", "a page of HTML or XML: the server answered with it instead of the file"),
)


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
    problem = input_files.problem_of(path)
    if problem:
        return problem
    try:
        with path.open("rb") as file:
            head = file.read(512)
            size = file.seek(0, 2)
            if size == 0:
                return "is empty (0 bytes)"
            if input_files.is_pointer(head):
                return input_files.pointer(head.decode("utf-8", "replace"), path.name)
            if size < 8:
                return f"not a safetensors file: only {size} bytes"
            length = int.from_bytes(head[:8], "little")
            if length > _LONGEST_HEADER or head[8:9] != b"{":
                other = [f", {what}" for magic, what in _OTHERS if head.startswith(magic)]
                return f"not a safetensors file: begins with {head[:16]!r}{''.join(other)}"
            if 8 + length > size:
                return f"is truncated: its header needs {8 + length} bytes, the file has {size}"
            file.seek(8)
            return _data_problem(file.read(length), size - 8 - length)
    except OSError as error:
        return input_files.absence_of(path, error)


def _data_problem(header: bytes, available: int) -> str | None:
    """Whether the header is one, and whether the tensors that it promises are all there is.

    The format's own reader lets the last of two tensors of one name win, without a word.
    """
    try:
        entries = input_files.strict_json(header.decode("utf-8"))
        ends = [_end(name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except RecursionError:
        return "not a safetensors file: its header is nested too deeply"
    except UnicodeDecodeError:
        return "not a safetensors file: its header is malformed: not UTF-8 text"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        told = f": {error}" if isinstance(error, ValueError) else ""
        return f"not a safetensors file: its header is malformed ({type(error).__name__}){told}"
    needed = max(ends, default=0)
    if needed > available:
        return f"is truncated: its tensors need {needed} bytes, {available} are there"
    if needed < available:
        more = available - needed
        return f"is not what its header says: {more} bytes follow after its tensors' {needed}"
    return None


def _end(name: str, entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError(f"tensor {name!r} lies at {begin!r} to {end!r}")
    return end
