"""Files of torch.save, changed on purpose: other entries, another pickle, instructions by hand."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def saved(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def entries(content: bytes) -> dict[str, bytes]:
    """The entries of an archive, by their names."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive(
    content: bytes,
    changed: Mapping[str, bytes | None] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """The archive with entries changed, added or, where None, removed; names without folder."""
    found: dict[str, bytes | None] = {**entries(content)}
    folder = next(iter(found)).partition("/")[0]
    found.update({f"{folder}/{name}": data for name, data in (changed or {}).items()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as written:
        for name, data in found.items():
            if data is not None:
                written.writestr(name, data)
    return buffer.getvalue()


def pickled(path: Path, instructions: bytes) -> Path:
    """Writes an archive whose pickle is PROTO 2, the instructions and STOP."""
    plain = saved({"rollout_id": 1, "samples": []})
    path.write_bytes(archive(plain, {"data.pkl": b"\x80\x02" + instructions + b"."}))
    return path


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def whole(value: int) -> bytes:
    """An integer, as pickle writes it."""
    return pickle.dumps(value, 2)[2:-1]


def called(name: str, *arguments: bytes) -> bytes:
    """GLOBAL, a tuple of arguments, REDUCE."""
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def storage(key: str, count: int, kind: str = "torch.FloatStorage") -> bytes:
    """The persistent id of a storage."""
    module, _, attribute = kind.rpartition(".")
    named = f"c{module}\n{attribute}\n".encode()
    return b"(" + text("storage") + named + text(key) + text("cpu") + whole(count) + b"tQ"


def sizes(*numbers: int) -> bytes:
    """A tuple of integers."""
    return b"(" + b"".join(map(whole, numbers)) + b"t"


def tensor(place: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A tensor of a storage, as torch.save rebuilds it."""
    return called(
        "torch._utils._rebuild_tensor_v2",
        place,
        whole(offset),
        sizes(*shape),
        sizes(*strides),
        b"\x89",
        called("collections.OrderedDict"),
    )
