"""Frames of a recording's file as bytes, and the values in them as JSON, both ways.

What was read is checked field by field, so that damage with a right checksum, or a file that
somebody else wrote, is told in words and not met later as some other error.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.tracing.definitions import (
    KINDS,
    LEVELS,
    VERSION,
    WITH_CHOICE,
    Definition,
    Header,
    Whole,
)

HEAD = struct.Struct("<IB")  # length of the payload, kind
CRC_BYTES = 4


class BrokenFrame(Exception):
    """A frame that cannot be used, and why."""


def frame(kind: str, payload: bytes) -> bytes:
    """A whole frame: length, kind, payload, checksum."""
    body = kind.encode() + payload
    return len(payload).to_bytes(4, "little") + body + zlib.crc32(body).to_bytes(4, "little")


def json_frame(kind: str, value: Any) -> bytes:
    return frame(kind, json.dumps(value, separators=(",", ":")).encode())


def split_frame(data: bytes, at: int) -> tuple[str, bytes, int]:
    """Kind and payload of the frame at byte `at`, and where the next one begins."""
    body = at + HEAD.size
    if body > len(data):
        raise BrokenFrame("the file is cut inside a frame: was the run killed?")
    length, kind = HEAD.unpack_from(data, at)
    end = body + length
    if end + CRC_BYTES > len(data):
        raise BrokenFrame(f"a frame of {length} bytes is cut: was the run killed?")
    stated = int.from_bytes(data[end : end + CRC_BYTES], "little")
    if stated != zlib.crc32(memoryview(data)[body - 1 : end]):
        raise BrokenFrame("a frame is damaged: its checksum is another")
    return chr(kind), data[body:end], end + CRC_BYTES


def inflated(data: bytes, size: int) -> bytes:
    """What was deflated to `data`; BrokenFrame unless that is `size` bytes, and no more is made."""
    try:
        stream = zlib.decompressobj()
        whole = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise BrokenFrame(f"a frame cannot be inflated: {error}") from None
    if len(whole) != size or not stream.eof or stream.unused_data:
        raise BrokenFrame(f"a frame does not inflate to {size} bytes")
    return whole


def parsed(payload: bytes, kind: type) -> Any:
    """The JSON value of a payload, which must be of type `kind`."""
    try:
        value = input_files.strict_json(payload.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"a frame's JSON cannot be read: {error}") from None
    if type(value) is not kind:
        raise BrokenFrame(f"a frame's JSON is a {type(value).__name__}, not a {kind.__name__}")
    return value


def header_fields(header: Header) -> dict[str, Any]:
    return {
        "version": header.version,
        "rank": header.rank,
        "world": header.world,
        "scheme": header.scheme,
        "level": header.level,
        "created": header.created,
        "environment": header.environment,
        "steps": None if header.steps is None else _bounds(header.steps),
    }


def header_of(payload: bytes) -> Header:
    """A header of a version that is known."""
    fields = parsed(payload, dict)
    version = fields.get("version")
    if version not in (VERSION, WITH_CHOICE):
        raise BrokenFrame(
            f"it is of version {version!r}, and this verify reads versions {VERSION} and "
            f"{WITH_CHOICE}"
        )
    level = _field(fields, "level", str)
    if level not in LEVELS:
        raise BrokenFrame(f"its level is {level!r}, which is none of {', '.join(LEVELS)}")
    rank, world = _field(fields, "rank", int), _field(fields, "world", int)
    if not 0 <= rank < world:
        raise BrokenFrame(f"it is of rank {rank} of {world}")
    return Header(
        rank,
        world,
        level,
        _field(fields, "created", str),
        _field(fields, "environment", dict),
        _field(fields, "scheme", str),
        steps=_steps(fields.get("steps")),
    )


def _bounds(steps: range) -> list[int]:
    return [steps.start, steps.stop, steps.step]


def _steps(value: Any) -> range | None:
    """The steps that were recorded in full; recordings of before there was a choice say nothing."""
    if value is None:
        return None
    sizes = _sizes(value)
    if len(sizes) != 3 or not sizes[2] or not range(*sizes):
        raise BrokenFrame(f"its steps are {value!r}, which is no range of steps")
    return range(*sizes)


def definition_fields(one: Definition) -> dict[str, Any]:
    whole = one.whole and {"shape": one.whole.shape, "ranges": one.whole.ranges}
    return {
        "id": one.id,
        "name": one.name,
        "kind": one.kind,
        "path": one.path,
        "dtype": one.dtype,
        "shape": one.shape,
        "module": one.module,
        "whole": whole,
    }


def definition_of(fields: Any) -> Definition:
    if type(fields) is not dict:
        raise BrokenFrame(f"a definition is a {type(fields).__name__}, not an object")
    kind = _field(fields, "kind", str)
    if kind not in KINDS:
        raise BrokenFrame(f"a definition is of kind {kind!r}, which is none of {', '.join(KINDS)}")
    texts = [_field(fields, name, str) for name in ("name", "path", "dtype", "module")]
    name, path, dtype, module = texts
    shape, whole = _sizes(fields.get("shape")), None
    if fields.get("whole") is not None:
        given = _field(fields, "whole", dict)
        ranges = [_sizes(one) for one in _field(given, "ranges", list)]
        try:
            whole = Whole(_sizes(given.get("shape")), tuple((a, b) for a, b in ranges))
        except ValueError as error:
            raise BrokenFrame(f"the definition of {name!r} is malformed: {error}") from None
        if tuple(stop - start for start, stop in whole.ranges) != shape:
            raise BrokenFrame(f"the definition of {name!r} has ranges that are not its shape")
    return Definition(_field(fields, "id", int), name, kind, path, dtype, shape, module, whole)


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise BrokenFrame(f"{name} is {value!r}, not of type {kind.__name__}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(one) is int and one >= 0 for one in value):
        raise BrokenFrame(f"{value!r} are no sizes")
    return tuple(value)


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.trace"


def unwritable(path: Path, error: OSError) -> InputFileError:
    """What to raise when a file cannot be written."""
    return InputFileError(f"{path}: cannot write: {error.strerror or error}")
