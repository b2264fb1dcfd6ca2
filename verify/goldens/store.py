"""The folder of goldens: `index.json`, one line per entry, and the tensor files that it names.

The index is the one point of truth. Tensor files have names of their content, so that writing new
ones never touches those that the index names; then the index is replaced in one rename; then files
that nothing names any more are removed. A process killed at any moment leaves the old state or the
new one. It refuses to write through symbolic links, and to read names that lead out of the folder.
No torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.resources
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.goldens import KINDS, PARTS
from verify.validation import first_problem

INDEX = "index.json"
SUFFIX = ".safetensors"
VERSION = 1
_PARTIAL = ".partial-"
_LARGEST = 64 * 2**20  # bytes; what is larger is not an index
_WHAT = "an index of goldens"


@dataclass(frozen=True)
class Entry:
    """One golden.

    case, kind, key: what it is of; key is None except for kind `bits`. reason: why it was last
    changed. target: finds the case again. file: the tensor file. inputs: digest of everything that
    the case was given. source_digest, made: provenance. outputs: dtype of every output.
    tensors: digest of every stored tensor. nonfinite: how many values are NaN or infinity.
    """

    case: str
    kind: str
    key: Mapping[str, str] | None
    reason: str
    target: str
    file: str
    inputs: str
    source_digest: str
    made: Mapping[str, Any]
    outputs: Mapping[str, str]
    tensors: Mapping[str, str]
    nonfinite: int = 0

    @property
    def identity(self) -> tuple[str, str, str]:
        """Of which there may be one entry."""
        return self.case, self.kind, json.dumps(self.key, sort_keys=True)


@dataclass(frozen=True)
class Index:
    """All entries of a folder, by identity."""

    folder: Path
    entries: tuple[Entry, ...] = field(default_factory=tuple)

    def of(self, case: str, kind: str) -> list[Entry]:
        return [one for one in self.entries if (one.case, one.kind) == (case, kind)]


def read(folder: Path) -> Index:
    """The index of a folder; without a folder or an index in it there are no entries.

    Raises InputFileError naming file and reason for anything else.
    """
    path = folder / INDEX
    if not input_files.exists(folder):
        return Index(folder)
    if not folder.is_dir():
        raise InputFileError(f"{folder}: is a file; goldens lie in a folder")
    try:
        lost = sorted(filter(_ours, os.listdir(folder)))
    except OSError as error:
        raise InputFileError(f"{folder}: cannot read: {error.strerror or error}") from error
    if not input_files.exists(path):
        if any(not name.startswith(_PARTIAL) for name in lost):
            raise InputFileError(
                f"{path}: no such file, but the folder holds goldens ({lost[-1]}); restore it, or"
                " remove them and make them again: verify golden update"
            )
        return Index(folder)
    return Index(folder, parse(input_files.read_text(path, _WHAT, largest=_LARGEST), str(path)))


def parse(text: str, name: str) -> tuple[Entry, ...]:
    """The entries in the text of an index. Raises InputFileError; `name` says which file it is."""

    def refuse(problem: str) -> InputFileError:
        return InputFileError(f"{name}: not {_WHAT}: {problem}")

    data = input_files.parse_json(text, name, _WHAT)
    if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
        raise refuse(f"version {data['version']!r}, this version reads {VERSION}")
    problem = first_problem(data, _schema())
    if problem:
        raise refuse(problem)
    entries = tuple(Entry(**line) for line in data["entries"])
    seen: set[tuple[str, str, str]] = set()
    for entry in entries:
        if entry.identity in seen:
            raise refuse(f"two entries for {entry.case!r} of kind {entry.kind}")
        seen.add(entry.identity)
        if entry.kind not in KINDS:
            raise refuse(
                f"entry {entry.case!r}: kind {entry.kind!r}; allowed are {', '.join(KINDS)}"
            )
        if not _safe(entry.file):
            raise refuse(f"entry {entry.case!r}: file {entry.file!r} is not a plain name")
        if (entry.kind == "bits") != (entry.key is not None):
            raise refuse(f"entry {entry.case!r}: a key belongs to kind bits, and only there")
        if entry.kind == "float64":
            names = {key.rpartition("/")[0] for key in entry.tensors}
            wrong = set(entry.tensors) ^ {f"{name}/{part}" for name in names for part in PARTS}
            if wrong:
                raise refuse(
                    f"entry {entry.case!r}: a float64 golden has {', '.join(PARTS)} of every"
                    f" output; wrong or missing: {min(wrong)!r}"
                )
    return entries


def write(folder: Path, entries: Sequence[Entry], files: Mapping[str, bytes]) -> list[str]:
    """Makes `entries` the state of the folder; `files` holds tensor files that are new.

    Returns the names of tensor files that were removed. Raises InputFileError with path and reason;
    then the old state is still there. Call it inside `locked`.
    """
    _refuse_links(folder)
    wanted = {entry.file for entry in entries}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / INDEX).exists():  # goldens without any index would be a lost index
            _replace(folder / INDEX, text_of(()).encode())
        for name, content in files.items():
            if name in wanted:
                _replace(folder / name, content)
        _replace(folder / INDEX, text_of(entries).encode())
        return _sweep(folder, wanted)
    except OSError as error:
        where = error.filename or folder
        raise InputFileError(f"cannot write {where}: {error.strerror or error}") from error


def text_of(entries: Sequence[Entry]) -> str:
    """The index as text: one line per entry, in the order of their identities."""
    ordered = sorted(entries, key=lambda entry: entry.identity)
    lines = ",\n".join(json.dumps(asdict(entry), allow_nan=False) for entry in ordered)
    return f'{{"version": {VERSION}, "entries": [\n{lines}\n]}}\n'


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other writers and readers out while entries are read, changed and written."""
    _refuse_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputFileError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released with the handle, also by SIGKILL
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keeps writers out while the index and the files that it names are read, one after the other.

    Readers do not keep each other out, and nothing is made. Without a folder, or on a file system
    that knows no locks, there is nothing to hold. Not inside `locked`, which would wait for itself.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError):  # `read` says what is wrong with it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def unnamed(index: Index) -> list[str]:
    """Files of this tool in the folder that no entry names."""
    if not index.folder.is_dir():
        return []
    wanted = {entry.file for entry in index.entries}
    return sorted(
        path.name
        for path in index.folder.iterdir()
        if _ours(path.name) and path.name not in wanted and not path.is_dir()
    )


def _ours(name: str) -> bool:
    """Whether `packing.file_name` or `_replace` made this name: nothing else is ever removed, since
    somebody may keep files of his own in the folder, or give a folder of weights by mistake."""
    made = rf".*\.({'|'.join(KINDS)})\.[0-9a-f]{{12}}{re.escape(SUFFIX)}"
    return re.fullmatch(rf"{made}|{re.escape(_PARTIAL)}\d+-.*", name, re.DOTALL) is not None


def _sweep(folder: Path, wanted: set[str]) -> list[str]:
    gone = []
    for path in sorted(folder.iterdir()):
        if _ours(path.name) and path.name not in wanted and not path.is_dir():
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # the new state is complete; what is left over is named by `unnamed`
            if not path.name.startswith(_PARTIAL):
                gone.append(path.name)
    return gone


def _replace(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, and durably."""
    partial = path.with_name(f"{_PARTIAL}{os.getpid()}-{path.name}")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_links(folder: Path) -> None:
    for path in (folder, folder / INDEX):
        if path.is_symlink():
            raise InputFileError(
                f"{path}: is a symbolic link to {os.readlink(path)!r}; writing would replace the"
                " link. Give the real folder"
            )


def _safe(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name) is not None


def _schema() -> dict[str, Any]:
    file = importlib.resources.files("verify").joinpath("schema", "golden-v1.schema.json")
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema
