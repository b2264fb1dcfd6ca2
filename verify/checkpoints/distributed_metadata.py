"""The `.metadata` of a torch.distributed.checkpoint folder, read without running what it says.

It is a pickle, and a checkpoint may come from anywhere. Only the classes that such metadata is
made of are known here, and even those are stood in for by records that hold what they are given;
all else is refused by name. What the records hold is checked before it is used.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from verify import input_files
from verify.checkpoints.parameters import Box, box_problem
from verify.errors import InputFileError

_LARGEST = 1 << 30
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
}
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PurePosixPath,
}


@dataclass(frozen=True)
class Piece:
    """One stored item: where its bytes lie in a file of the folder, and its place in the whole."""

    box: Box
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint and the pieces that it is stored in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Refused(Exception):
    """The pickle asks for something that metadata has no use for."""


def read(path: Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors, and the names of what is none. InputFileError naming file and reason."""
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    if path.stat().st_size > _LARGEST:
        raise InputFileError(
            f"{path}: has {path.stat().st_size} bytes, at most {_LARGEST} are read"
        )
    try:
        root = _Reader(io.BytesIO(path.read_bytes())).load()
    except Refused as error:
        raise InputFileError(
            f"{path}: asks for {error}, which the metadata of a checkpoint does not need; refused, "
            "since a pickle may run code"
        ) from None
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InputFileError(
            f"{path}: not the metadata of a checkpoint: {type(error).__name__}: {error}"
        ) from None
    try:
        return _understood(root)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputFileError(f"{path}: not the metadata of a checkpoint: {told}") from None


class _Record:
    """Holds what a pickle says about an object of some class."""

    kind = ""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {"": state}

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _Reader(pickle.Unpickler):
    """Knows no class but the records, which are made anew for every file."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known = {
            (module, name): type("Record", (_Record,), {"kind": name})
            for module, names in _RECORDS.items()
            for name in names
        }

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name)) or _VALUES.get((module, name))
        if found is None and module == "torch":
            value = getattr(torch, name, None) if name.isidentifier() else None
            found = value if isinstance(value, torch.dtype) else None
        if found is None:
            raise Refused(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise Refused(f"the object {pid!r} outside of the file")


def _understood(root: Any) -> tuple[dict[str, Stored], list[str]]:
    entries = _record(root, "Metadata")["state_dict_metadata"]
    places: dict[tuple[str, tuple[int, ...] | None], _Record] = {}
    for index, info in _mapping(root["storage_data"]).items():
        key = _record(index, "MetadataIndex")
        offset = key.state.get("offset")
        places[key["fqn"], None if offset is None else _sizes(offset)] = _record(
            info, "_StorageInfo"
        )
    tensors: dict[str, Stored] = {}
    others: list[str] = []
    for name, entry in _mapping(entries).items():
        if not isinstance(name, str):
            raise ValueError(f"the name {name!r} is no text")
        if getattr(entry, "kind", "") == "BytesStorageMetadata":
            others.append(name)
            continue
        tensors[name] = _tensor(name, _record(entry, "TensorStorageMetadata"), places)
    return tensors, others


def _tensor(name: str, entry: _Record, places: Mapping[Any, _Record]) -> Stored:
    properties = _record(entry["properties"], "TensorProperties").state
    dtype = properties[""][0] if "" in properties else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} has the dtype {dtype!r}")
    shape = _sizes(entry["size"])
    pieces = []
    for chunk in entry["chunks"]:
        chunk = _record(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if len(offsets) != len(sizes):
            raise ValueError(f"{name!r} has a part of {sizes} at {offsets}")
        box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
        problem = box_problem(box, shape)
        if problem:
            raise ValueError(f"{name!r}: {problem}")
        info = places.get((name, offsets))
        if info is None and len(entry["chunks"]) == 1:  # older versions: a whole has no offset
            info = places.get((name, None))
        if info is None:
            raise ValueError(f"it does not say where the part of {name!r} at {offsets} is stored")
        file, at, length = info["relative_path"], info["offset"], info["length"]
        if not isinstance(file, str) or {"..", "/"} & set(PurePosixPath(file).parts) or not file:
            raise ValueError(f"{name!r} is stored in {file!r}, which is not a file of the folder")
        if type(at) is not int or type(length) is not int or at < 0 or length < 0:
            raise ValueError(f"{name!r} is stored at {at!r}, {length!r} bytes")
        transforms = info.state.get("transform_descriptors") or ()
        if not all(isinstance(one, str) for one in transforms):
            raise ValueError(f"{name!r} is stored through {transforms!r}")
        pieces.append(Piece(box, file, at, length, tuple(transforms)))
    return Stored(dtype, shape, tuple(pieces))


def _record(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or value.kind != kind:
        raise ValueError(
            f"a {kind} is expected, not a {getattr(value, 'kind', type(value).__name__)}"
        )
    return value


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a dict is expected, not a {type(value).__name__}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)
