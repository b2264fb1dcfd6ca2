"""How a file begins: enough to tell which format it is, whatever its name says.

Reads the first bytes and, of text, the first records; of a zip archive the names in it, of
safetensors the header. It loads nothing that could run code, and refuses what no reader takes
(compressed files, pages of HTML, Git LFS pointers) by what it is.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy.formats import json_records

JSON, TORCH, PICKLE = "json", "torch", "pickle"
PARQUET, SAFETENSORS = "parquet", "safetensors"
CONTAINERS: Mapping[str, str] = MappingProxyType(
    {
        JSON: "JSON, one object a line or one document",
        TORCH: "a zip archive of torch.save",
        PICKLE: "a pickle, as torch.save wrote before version 1.6",
        PARQUET: "Parquet",
        SAFETENSORS: "safetensors",
    }
)

_START = 4096
_LONGEST_HEADER = 100_000_000  # of safetensors, by the format's own rule
_MOST_NAMES = 100_000
_FOREIGN = (  # what no reader takes, and what to do
    (b"\x1f\x8b", "is compressed with gzip; unpack it first: gunzip FILE"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; unpack it first: unzstd FILE"),
    (b"BZh", "is compressed with bzip2; unpack it first: bunzip2 FILE"),
    (b"\xfd7zXZ\x00", "is compressed with xz; unpack it first: unxz FILE"),
    (b"\x93NUMPY", "is a NumPy array (.npy), which says nothing of tokens; save safetensors"),
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file; no reader takes it"),
    (b"GGUF", "is a GGUF file: weights, no log-probabilities"),
    (b"\xff\xfe", "is UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text; save it as UTF-8"),
    (b"<", "is a page of HTML or XML: the server answered with it instead of the file"),
)


@dataclass(frozen=True, eq=False)
class Head:
    """What can be told of a file from how it begins.

    container: a name of CONTAINERS. suffix: lower case with its dot, "" where there is none; for
    messages only, since names lie. size: bytes. start: the first bytes, at most 4096. first: of
    JSON the first object that can be read (the first of a document that is a list), of safetensors
    its header, else empty. row: of JSON whose first record is a list, that. names: of a zip archive
    its entries.
    """

    path: Path
    container: str
    suffix: str
    size: int
    start: bytes
    first: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    row: tuple[Any, ...] = ()

    def has(self, *names: str) -> bool:
        """Whether the first object has all of these names."""
        return all(name in self.first for name in names)


def head_of(path: Path) -> Head:
    """Looks at a file. InputFileError where it is none, or none that any reader takes."""
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_START)
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from error
    if not start:
        raise InputFileError(f"{path}: is empty (0 bytes)")
    if input_files.is_pointer(start):
        text = start.decode("utf-8", "replace")
        raise InputFileError(f"{path}: {input_files.pointer(text, str(path))}")
    for magic, what in _FOREIGN:
        if start.startswith(magic):
            raise InputFileError(f"{path}: {what}")
    suffix = path.suffix.lower()
    if start.startswith(b"PAR1"):
        return Head(path, PARQUET, suffix, size, start)
    if start.startswith(b"PK\x03\x04"):
        return Head(path, TORCH, suffix, size, start, names=_torch_names(path))
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return Head(path, PICKLE, suffix, size, start)
    if start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= _LONGEST_HEADER:
        return Head(path, SAFETENSORS, suffix, size, start, _safetensors_header(path))
    first = json_records.first_record(path)
    if isinstance(first, list):
        return Head(path, JSON, suffix, size, start, row=tuple(first))
    return Head(path, JSON, suffix, size, start, first)


def _torch_names(path: Path) -> tuple[str, ...]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise InputFileError(
            f"{path}: begins like a zip archive, as torch.save writes, and is none or is cut: "
            f"{error}"
        ) from None
    names = [entry.filename for entry in entries]
    if not any(name.endswith("data.pkl") for name in names):
        raise InputFileError(
            f"{path}: is a zip archive, and none of torch.save: it holds "
            f"{', '.join(repr(name) for name in names[:3]) or 'nothing'}"
        )
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        first = packed[0][:60]
        raise InputFileError(
            f"{path}: is a zip archive of torch.save whose entries are compressed ({first!r}), "
            "which torch.save never does; write it with torch.save, or pack it with zip -0"
        )
    return tuple(names[:_MOST_NAMES])


def _safetensors_header(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = input_files.strict_json(file.read(length).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: not a safetensors file: its header: {error}") from None
    return header if isinstance(header, dict) else {}
