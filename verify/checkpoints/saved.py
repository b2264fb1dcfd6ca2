"""A file of torch.save as a checkpoint, read with weights_only=True and mapped into memory.

Such a file is a pickle: what is more than tensors and plain containers is refused, since reading it
would run code. Values that are no tensors are listed and not compared.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from verify import input_files
from verify.checkpoints.live import leaves
from verify.checkpoints.parameters import Checkpoint, Parameter
from verify.errors import InputFileError
from verify.hashing import dtype_name


@contextmanager
def file(path: Path) -> Iterator[Checkpoint]:
    """The tensors of a file, names of nested ones joined by dots. InputFileError says why not."""
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    try:
        value = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError and others
        raise InputFileError(f"{path}: not a torch.save file of tensors: {_told(error)}") from None
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    for name, leaf in _named(path, value):
        if not isinstance(leaf, Tensor):
            others.append(name)
        elif name in tensors:
            raise InputFileError(f"{path}: two tensors are named {name!r}")
        else:
            tensors[name] = leaf
    del value
    yield Checkpoint(
        str(path),
        "torch.save",
        {
            name: Parameter(
                name,
                dtype_name(tensor.dtype),
                tuple(tensor.shape),
                functools.partial(_given, tensor),
            )
            for name, tensor in tensors.items()
        },
        tuple(others),
    )


def _given(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _named(path: Path, value: object) -> list[tuple[str, object]]:
    try:
        return [(name or "the value itself", leaf) for name, leaf in leaves("", value)]
    except RecursionError:
        raise InputFileError(f"{path}: holds containers that are nested without end") from None


def _told(error: Exception) -> str:
    """What torch says, without its advice to read the file as code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    refused = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    said = (refused or lines or [type(error).__name__])[-1 if refused else 0]
    said = said.partition(" Please use ")[0]
    return f"{said[:300]} (only tensors and plain containers are read, by weights_only=True)"
