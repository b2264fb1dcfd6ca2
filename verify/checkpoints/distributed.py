"""A torch.distributed.checkpoint folder as a checkpoint, whatever ranks it was written by.

Items are read by torch's own FileSystemReader, one tensor at a time; what it returns is read with
weights_only=True and compared with what the metadata promises, since the format itself would
convert another dtype without a word. Missing files are named. It refuses folders that were written
without a common `.metadata`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from verify import input_files
from verify.checkpoints import distributed_metadata
from verify.checkpoints.distributed_metadata import Stored
from verify.checkpoints.parameters import Checkpoint, Parameter, tiling_problem
from verify.errors import InputFileError
from verify.hashing import dtype_name

METADATA = ".metadata"
_NAMED = 5


@contextmanager
def folder(top: Path) -> Iterator[Checkpoint]:
    """The tensors of a folder. InputFileError naming file and reason."""
    stored, others = distributed_metadata.read(top / METADATA)
    _refuse_incomplete(top, stored)
    for name, tensor in stored.items():
        boxes = [piece.box for piece in tensor.pieces]
        problem = tiling_problem(tensor.shape, boxes, cover=True)
        if problem:
            raise InputFileError(f"{top / METADATA}: tensor {name!r} {problem}")
    reader = _reader(top, stored)
    parameters = {
        name: Parameter(
            name,
            dtype_name(tensor.dtype),
            tensor.shape,
            functools.partial(_load, top, reader, name, tensor),
        )
        for name, tensor in stored.items()
    }
    files = len({piece.file for tensor in stored.values() for piece in tensor.pieces})
    kind = f"torch.distributed.checkpoint, {files} file{'' if files == 1 else 's'}"
    yield Checkpoint(str(top), kind, parameters, tuple(others))


def _refuse_incomplete(top: Path, stored: dict[str, Stored]) -> None:
    """Before anything is read: which files the metadata names, and how long they have to be."""
    needed: dict[str, int] = {}
    for tensor in stored.values():
        for piece in tensor.pieces:
            needed[piece.file] = max(needed.get(piece.file, 0), piece.offset + piece.length)
    missing = sorted(name for name in needed if not input_files.exists(top / name))
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise InputFileError(
            f"{top}: lacks {', '.join(missing[:_NAMED])}{more}: the checkpoint is not complete"
        )
    for name, length in needed.items():
        path = top / name
        problem = input_files.problem_of(path)
        if problem:
            raise InputFileError(f"{path}: {problem}")
        size = path.stat().st_size
        if size < length:
            raise InputFileError(f"{path}: is truncated: {length} bytes are needed, {size} there")


def _reader(top: Path, stored: dict[str, Stored]) -> FileSystemReader:
    places: dict[MetadataIndex, _StorageInfo] = {
        _index(name, number, stored[name]): _StorageInfo(
            piece.file, piece.offset, piece.length, piece.transforms or None
        )
        for name, tensor in stored.items()
        for number, piece in enumerate(tensor.pieces)
    }
    reader = FileSystemReader(top)
    reader.set_up_storage_reader(Metadata({}, storage_data=places), is_coordinator=True)
    return reader


class _Bytes:
    """A planner's part that the reader uses for items that are wanted as bytes."""

    content = b""

    def load_bytes(self, _item: ReadItem, value: io.BytesIO) -> None:
        self.content = value.getvalue()


def _load(top: Path, reader: FileSystemReader, name: str, stored: Stored) -> Tensor:
    """The whole tensor, put together of its pieces."""
    whole: Tensor | None = None
    for number, piece in enumerate(stored.pieces):
        part = _item(top / piece.file, reader, name, _index(name, number, stored))
        sizes = tuple(stop - start for start, stop in piece.box)
        if part.dtype != stored.dtype or tuple(part.shape) != sizes:
            raise InputFileError(
                f"{top / piece.file}: {name!r} is stored as {dtype_name(part.dtype)}"
                f"{list(part.shape)}, the metadata says {dtype_name(stored.dtype)}{list(sizes)}"
            )
        if len(stored.pieces) == 1:
            return part
        if whole is None:
            whole = torch.empty(stored.shape, dtype=stored.dtype)
        whole[tuple(slice(*edge) for edge in piece.box)] = part
    return torch.empty(stored.shape, dtype=stored.dtype) if whole is None else whole


def _item(path: Path, reader: FileSystemReader, name: str, index: MetadataIndex) -> Tensor:
    wanted = _Bytes()
    none = torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), none, index, none, none)
    planner: Any = wanted
    try:
        reader.read_data(LoadPlan([item]), planner)
        value = torch.load(io.BytesIO(wanted.content), map_location="cpu", weights_only=True)
    except Exception as error:  # of the file system, of a transform, or of torch.load
        said = str(error).strip().splitlines() or [""]
        raise InputFileError(
            f"{path}: cannot read tensor {name!r}: {type(error).__name__}: {said[0][:300]}"
        ) from None
    if not isinstance(value, Tensor):
        raise InputFileError(f"{path}: {name!r} is stored as a {type(value).__name__}, no tensor")
    return value


def _index(name: str, number: int, stored: Stored) -> MetadataIndex:
    return MetadataIndex(name, [start for start, _ in stored.pieces[number].box], number)
