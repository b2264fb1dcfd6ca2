"""Files of torch.save that nobody vouches for: looked through first, then read by torch.load.

Read with weights_only=True, and of numpy only what makes arrays of numbers, by functions of our
own under numpy's names; storages are mapped, not copied. It refuses compressed archives, storages
that claim more than the file holds, and every global that is not on the list of `torch_globals`.
"""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy.formats import values
from verify.onpolicy.formats.numpy_stand_ins import SAFE_GLOBALS, Array
from verify.onpolicy.formats.torch_globals import Refused
from verify.onpolicy.formats.torch_pickles import Told, told_of
from verify.onpolicy.formats.values import Spot
from verify.rendering.escaping import clipped

LARGEST = 64 * 2**30  # bytes of a file; its storages are mapped
LARGEST_PICKLE = 4 * 2**30  # bytes of what is not mapped: lists, texts, numpy arrays
LARGEST_OLD = 4 * 2**30  # bytes of a file from before version 1.6, which cannot be mapped
_LARGEST_DIRECTORY = 256 * 2**20
_LOOKED_AT = 64 * 2**10
_FEW = 2**20  # numbers that any file may hold
# How every file of torch.save before version 1.6 begins: a pickle of the format's magic number.
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_NO_ARCHIVE = (  # what zipfile raises for a file that is none, or damaged
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"


@dataclass
class Content:
    """What a file holds, and how many numbers may yet be copied out of it.

    A few bytes can stand for any number of values (one storage expanded to any shape, one list that
    every sample shares), so the copies are counted.
    """

    value: Any
    left: int

    def take(self, count: int) -> bool:
        self.left -= count
        return self.left >= 0


def opened(path: Path) -> Content:
    """The value in a file of torch.save, checked. InputFileError says why it is not read."""
    size = _size(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(_OLD))
        if start.startswith(b"PK\x03\x04"):
            mapped = True
            _check_archive(path, size)
        elif start == _OLD:
            mapped = False
            _check_old(path, size)
        else:
            kind = "a plain pickle, which can be code" if start[:1] == b"\x80" else "not one at all"
            raise Refused(f"is no file of torch.save, but {kind}; write it with torch.save")
        value = _loaded(path, mapped)
    except Refused as error:
        raise InputFileError(f"{path}: {error}") from None
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    return Content(value, max(_FEW, 8 * size))


def names_in(path: Path) -> tuple[str, ...]:
    """The first texts in a file of torch.save, among them the names of its outer dict.

    For telling formats apart; empty where it cannot be told. Never raises for a bad file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_OLD))
            if start == _OLD:
                file.seek(0)
                head, begin = file.read(_LOOKED_AT), 0
                for _ in range(3):
                    begin = told_of(head, begin).end
                return told_of(head, begin, part=True, legacy=True).names
        _check_directory(path, path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            entry = next(info for info in archive.infolist() if _is_pickle(info.filename))
            if entry.compress_type != zipfile.ZIP_STORED:
                return ()
            with archive.open(entry) as pickle:
                return told_of(pickle.read(_LOOKED_AT), part=True).names
    except (OSError, StopIteration, *_NO_ARCHIVE):
        return ()


def plain(content: Content, value: Any, spot: Spot, field: str) -> Any:
    """A tensor or numpy array as an ndarray; lists, numbers and texts as they are.

    bfloat16 and float8 become float32, which holds them exactly; what has no dimension becomes a
    number. None with a problem for what
    holds no numbers, or more of them than a file of this size can.
    """
    if isinstance(value, list | tuple):
        if not _affordable(content, value):
            return _too_many(spot, field)
        return value
    if isinstance(value, Array):
        if value.value is None:
            spot.bad(field, f"is {value.why}")
            return None
        value = value.value
    if isinstance(value, np.ndarray):
        if not content.take(value.size):
            return _too_many(spot, field)
        return value if value.ndim else value.item()
    if value is None or isinstance(value, str | int | float | bytes | Mapping):
        return value
    return _from_tensor(content, value, spot, field)


def stored_as(value: Any) -> str:
    """The dtype in the file of a tensor of bfloat16, which no ndarray says; else ""."""
    return "bfloat16" if str(getattr(value, "dtype", "")) == "torch.bfloat16" else ""


def _from_tensor(content: Content, value: Any, spot: Spot, field: str) -> Any:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        spot.bad(field, f"is {values.described(value)}; it is a tensor, an array or a list")
        return None
    if not content.take(value.numel()):
        return _too_many(spot, field)
    tensor = value.detach()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.to(torch.float32)
    return tensor.numpy().copy() if tensor.ndim else tensor.item()


def _too_many(spot: Spot, field: str) -> None:
    spot.bad(field, "holds more numbers than its file has bytes: values are repeated in place")


def _affordable(content: Content, value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list, and the lists in it, may be walked through."""
    level: list[Any] = [value]
    for _ in range(4):  # routing has three levels
        below: list[Any] = []
        for items in level:
            if not content.take(len(items)):
                return False
            if items and isinstance(items[0], list | tuple):
                below += [item for item in items if isinstance(item, list | tuple)]
        if not below:
            return True
        level = below
    return False


def _size(path: Path) -> int:
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    if size > LARGEST:
        raise InputFileError(f"{path}: {size} bytes, at most {LARGEST} are read; give fewer steps")
    return size


def _is_pickle(name: str) -> bool:
    return name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1)


def _check_archive(path: Path, size: int) -> None:
    """Raises Refused where the archive is none of torch.save, or its storages are not all there."""
    _check_directory(path, size)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if _is_pickle(entry.filename)]
            if len(pickles) != 1:
                raise Refused(f"is a zip archive with {len(pickles)} data.pkl; torch.save has one")
            folder = pickles[0].filename.removesuffix("data.pkl")
            sizes = _sizes(entries, folder, size)
            if "constants.pkl" in sizes:
                raise Refused("is a TorchScript program, which is code; save tensors instead")
            order = archive.read(folder + "byteorder") if "byteorder" in sizes else b"little"
            if order != b"little":
                raise Refused("was written on a big-endian machine; write it again on another")
            if pickles[0].file_size > LARGEST_PICKLE:
                raise Refused(
                    f"its pickle has {pickles[0].file_size} bytes, at most {LARGEST_PICKLE} are "
                    "read; give fewer samples, or save tensors in place of lists"
                )
            content = archive.read(pickles[0])
    except Refused:
        raise
    except _NO_ARCHIVE as error:
        raise Refused(
            f"is no zip archive of torch.save, or is cut: {clipped(error, 200)}"
        ) from None
    told = told_of(content)
    for key, claimed in told.storages.items():
        held = sizes.get(f"data/{key}")
        if held != claimed:
            has = "it is not there" if held is None else f"it has {held}"
            raise Refused(
                f"the storage {clipped(key, 40)!r} should have {claimed} bytes, and {has}; the "
                "file is damaged, copy or write it again"
            )
    _check_torch_sees(path, content, told)


def _sizes(entries: list[zipfile.ZipInfo], folder: str, size: int) -> dict[str, int]:
    """Bytes of each entry, by its name in the folder. Raises Refused for what could expand."""
    sizes: dict[str, int] = {}
    for entry in entries:
        name = clipped(entry.filename, 80)
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise Refused(f"its entry {name!r} is compressed, and torch.save compresses nothing")
        if entry.flag_bits & 1:
            raise Refused(f"its entry {name!r} is encrypted")
        short = entry.filename.removeprefix(folder)
        if short in sizes:
            raise Refused(f"it has two entries {name!r}")
        sizes[short] = entry.file_size
    if sum(sizes.values()) > size:
        raise Refused(f"its entries are said to have {sum(sizes.values())} bytes, it has {size}")
    return sizes


def _check_directory(path: Path, size: int) -> None:
    """The list of entries ends the file and is not too long to be read."""
    with path.open("rb") as file:
        file.seek(max(0, size - 42))
        tail = file.read(42)
        if len(tail) != 42 or tail[20:24] != _END or tail[40:42] != b"\0\0":
            raise Refused("is a zip archive that is cut, or has something behind its end")
        length = int.from_bytes(tail[32:36], "little")
        if tail[:4] == _LOCATOR:
            file.seek(min(int.from_bytes(tail[8:16], "little"), size))
            record = file.read(56)
            if record[:4] != _END64:
                raise Refused("is a zip archive whose directory is not where it should be")
            length = max(length % 0xFFFFFFFF, int.from_bytes(record[40:48], "little"))
    if length > min(size, _LARGEST_DIRECTORY):
        raise Refused(f"is a zip archive whose directory is said to have {length} bytes")


def _check_torch_sees(path: Path, content: bytes, told: Told) -> None:
    """torch's own reader finds the same pickle, and the storages inside the file.

    Two readers of zip archives can be made to see two archives in one file.
    """
    import torch

    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))
        same = reader.get_record("data.pkl") == content
        size = os.path.getsize(path)
        ends = [reader.get_record_offset(f"data/{key}") + n for key, n in told.storages.items()]
    except Exception as error:  # RuntimeError, and whatever else a later version raises
        raise Refused(f"torch does not read it: {_first_line(error)}") from None
    if not same or max(ends, default=0) > size:
        raise Refused("its entries are not where its directory says; write it again")


def _check_old(path: Path, size: int) -> None:
    """Raises Refused where a file from before version 1.6 claims more than it holds."""
    if size > LARGEST_OLD:
        raise Refused(f"{size} bytes, at most {LARGEST_OLD} are read of a file of this old kind")
    with path.open("rb") as file:  # the mapping goes when the last view of it does
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    position = 0
    for _ in range(3):  # the magic number, the version of the format, the machine
        position = told_of(data, position).end
    told = told_of(data, position, legacy=True)
    keys = told_of(data, told.end, keep=size)
    position = keys.end
    if set(keys.names) != set(told.storages):
        raise Refused("its list of storages is not that of its tensors; write it again")
    for key in keys.names:
        count = int.from_bytes(data[position : position + 8], "little")
        position += 8 + told.storages[key]
        if position > size or not _is_size(told.storages[key], count):
            raise Refused(
                f"the storage {clipped(key, 40)!r} should have {told.storages[key]} bytes, "
                "and they are not there; the file is cut, copy or write it again"
            )


def _is_size(size: int, count: int) -> bool:
    return any(size == count * width for width in (1, 2, 4, 8))


def _loaded(path: Path, mapped: bool) -> Any:
    import torch

    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # RuntimeError, UnpicklingError, KeyError, struct.error, ...
        raise Refused(f"torch does not read it: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """What torch says, without its advice to read the file as code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "weights_only" not in line), type(error).__name__)
    return clipped(said.partition(" Please use ")[0], 300)
