"""Tensors of goldens as safetensors files: to bytes, and back with every content checked.

What is kept in the index are digests of contents, never of files, since the order of a file's
header is not fixed. A file whose content is not what the index says is refused by name: a golden
that changed by itself is no golden. It refuses dtypes that the format cannot hold.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from verify.budgets import Reference
from verify.errors import InputFileError, UnsupportedError
from verify.goldens import PARTS
from verify.goldens.store import SUFFIX, Entry
from verify.hashing import digest_tensor, settled
from verify.tensor_files import opened

LARGEST = 256 * 2**20  # bytes of one golden: it is held in memory and committed to a repository
_ROUNDED_UP = ("budget", "margin")  # stored as float32, never smaller than they were
_METADATA = "mok-verify"
_MEND = "restore the file, or make the golden again: verify golden update"
_OTHER_BITS = "has other bits than when it was stored"


def to_bytes(tensors: Mapping[str, Tensor], case: str, kind: str) -> bytes:
    """A safetensors file. UnsupportedError for dtypes that it cannot hold."""
    from safetensors.torch import save

    stored = _unshared(tensors)
    # one key: several would be written in random order
    metadata = {_METADATA: json.dumps({"case": case, "kind": kind}, sort_keys=True)}
    try:
        return save(stored, metadata)
    except (KeyError, ValueError, TypeError) as error:
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()})
        raise UnsupportedError(
            f"golden of {case!r}: a safetensors file cannot hold {', '.join(kinds)}: {error}."
            " Return parts that it can hold, such as real and imaginary ones"
        ) from error


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of their content."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of every tensor, by name in sorted order."""
    return {name: str(digest_tensor(tensors[name])) for name in sorted(tensors)}


def file_name(case: str, kind: str, digests: Mapping[str, str]) -> str:
    """A name for this content: the case in letters that every file system has, and a hash."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", ".", case).strip(".-") or "case"
    content = json.dumps([case, kind, sorted(digests.items())])
    return f"{stem[:80]}.{kind}.{hashlib.sha256(content.encode()).hexdigest()[:12]}{SUFFIX}"


def load(folder: Path, entry: Entry) -> dict[str, Tensor]:
    """The tensors of an entry, checked against the index.

    Raises InputFileError when the file is missing, unreadable, or holds other tensors.
    """
    path = folder / entry.file
    with opened(path) as file:
        found = {name: file.tensor(name) for name in file.names}
    check(found, entry, str(path))
    return found


def check(tensors: Mapping[str, Tensor], entry: Entry, path: str) -> None:
    """Raises InputFileError unless these are the tensors of the entry, and of its kind."""
    missing, extra = set(entry.tensors) - set(tensors), set(tensors) - set(entry.tensors)
    pairs = ((missing, "lacks", "names"), (extra, "also holds", "does not name"))
    for names, what, index in pairs:
        if names:
            raise InputFileError(
                f"{path}: {what} tensor {min(names)!r}, which the index of goldens {index}; {_MEND}"
            )
    for name, tensor in tensors.items():
        try:
            got = str(digest_tensor(tensor))
        except UnsupportedError as error:
            raise InputFileError(f"{path}: tensor {name!r}: {error}") from error
        if got != entry.tensors[name]:
            before, after = (text.partition(":")[0] for text in (entry.tensors[name], got))
            what = f"is {after}, the index says {before}" if before != after else _OTHER_BITS
            raise InputFileError(f"{path}: tensor {name!r} {what}; {_MEND}")
    unlike = _unlike_its_kind(tensors, entry)
    if unlike:
        raise InputFileError(f"{path}: {unlike}, says the index of goldens; {_MEND}")


def pack_reference(references: Mapping[str, Reference]) -> dict[str, Tensor]:
    """A float64 golden's tensors: `NAME/exact` and so on; budgets as float32, rounded up."""
    packed: dict[str, Tensor] = {}
    for name, reference in references.items():
        for part in PARTS:
            value = getattr(reference, part).detach().double()
            packed[f"{name}/{part}"] = _float32_up(value) if part in _ROUNDED_UP else value
    return packed


def unpack_reference(tensors: Mapping[str, Tensor]) -> dict[str, Reference]:
    """The references of a float64 golden. Raises InputFileError when parts are missing."""
    names = dict.fromkeys(key.rpartition("/")[0] for key in tensors)
    try:
        return {
            name: Reference(*(tensors[f"{name}/{part}"].double() for part in PARTS))
            for name in names
        }
    except KeyError as error:
        raise InputFileError(f"a float64 golden lacks the tensor {error}") from error


def _unlike_its_kind(tensors: Mapping[str, Tensor], entry: Entry) -> str:
    """What an entry of such a kind cannot hold, or "": an index may be changed by hand, too."""
    if entry.kind != "float64":
        told = {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items()}
        return "" if told == dict(entry.outputs) else f"it holds {_listed(entry.outputs)}"
    names = {key.rpartition("/")[0] for key in tensors}
    if set(tensors) != {f"{name}/{part}" for name in names for part in PARTS}:
        return f"it is of kind float64, whose tensors are NAME/{', NAME/'.join(PARTS)}"
    for name in sorted(names):
        parts = [tensors[f"{name}/{part}"] for part in PARTS]
        if any(part.dtype not in (torch.float32, torch.float64) for part in parts):
            return f"{name} is of kind float64, whose tensors are float64 and float32"
        if len({tuple(part.shape) for part in parts}) > 1:
            return f"{name} is of kind float64, whose tensors have one shape"
    return ""


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the format wants them; it refuses shared memory, so that is copied."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = settled(tensor.detach()).cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        found[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return found


def _listed(outputs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} in {dtype}" for name, dtype in outputs.items()) or "nothing"


def _float32_up(value: Tensor) -> Tensor:
    small = value.float()
    up = torch.nextafter(small, torch.full_like(small, torch.inf))
    return torch.where(small.double() < value, up, small)
