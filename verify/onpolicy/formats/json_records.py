"""The records of a JSON file: one a line, or the items of one document.

A line that is no JSON is reported and left out, and the others are read. NaN and Infinity are
taken as Python writes them; a name that occurs twice in an object makes its record unreadable,
since readers disagree on which one counts. Lines, documents and numbers have bounds, so that a
file costs memory in proportion to its size and no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy.samples import Place

LONGEST_LINE = 256 * 2**20  # bytes
LARGEST_DOCUMENT = 512 * 2**20  # bytes of a file that is one JSON value over many lines
LARGEST_FILE = 8 * 2**30
_LINES_TRIED = 8  # for the first object
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


class Refused(str):
    """Text in place of a number that float64 cannot hold; no reader takes it for one."""


class BadRecord:
    """In place of a record that cannot be read: why."""

    def __init__(self, why: str) -> None:
        self.why = why


def records(path: Path) -> Iterator[tuple[Place, Any]]:
    """Each record with its place, "line 7" or "[3]" in it; BadRecord where one cannot be read.

    A list of objects is taken apart, of other things it is one record.

    Raises InputFileError where the file cannot be read at all.
    """
    name = str(path)
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputFileError(
                f"{path}: {path.stat().st_size} bytes, at most {LARGEST_FILE} are read; "
                "give fewer steps, or split it by lines"
            )
        with path.open("rb") as file:
            document = _document(file, path)
            if document is not None:
                yield from _items(document, name, "")
                return
            for number, line in _lines(file):
                if isinstance(line, BadRecord):
                    yield Place(name, f"line {number}"), line
                elif line.strip(_BLANK):
                    yield from _items(parsed(line), name, f"line {number}")
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from error


def first_record(path: Path) -> Mapping[str, Any] | list[Any]:
    """The first object or list among the first records. InputFileError if there is none."""
    why = "it holds no JSON object"
    for tried, (place, record) in enumerate(records(path)):
        if isinstance(record, dict | list):
            return record
        if tried == 0:
            given = record.why if isinstance(record, BadRecord) else "is no JSON object"
            why = f"{place.record or 'its value'}: {given}"
        if tried == _LINES_TRIED:
            break
    raise InputFileError(f"{path}: no format that is known: not JSON: {why}")


def parsed(line: bytes) -> Any:
    """The value of a line, or BadRecord."""
    try:
        return _DECODER.decode(line.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8 text at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRecord(f"not JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError:
        return BadRecord("nested too deeply")
    except ValueError as error:
        # a name twice, or an integer beyond Python's limit of digits, less how to lift that
        return BadRecord(str(error).partition("; use sys.")[0])


def _items(value: Any, name: str, place: str) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, list) and any(isinstance(item, dict) for item in value[:_LINES_TRIED]):
        for index, item in enumerate(value):
            yield Place(name, f"{place}[{index}]"), item
    else:
        yield Place(name, place), value


def _document(file: BinaryIO, path: Path) -> Any:
    """The value of a file that is one JSON value over many lines, else None; the file stands
    behind a byte order mark then."""
    begin = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(begin)
    first = b""
    for _, line in _lines(file):
        if isinstance(line, BadRecord):
            break
        first = line.strip(_BLANK)
        if first:
            break
    value = None
    if first[:1] in (b"{", b"[") and isinstance(parsed(first), BadRecord):
        file.seek(0, 2)
        if file.tell() <= LARGEST_DOCUMENT:
            file.seek(begin)
            value = parsed(file.read())
            if isinstance(value, BadRecord):  # lines after all, of which the first one is cut
                value = None
    file.seek(begin)
    return value


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | BadRecord]]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if line.endswith(b"\n") or len(line) < LONGEST_LINE:
            yield number, line
            continue
        length = len(line)
        while line := file.readline(2**20):
            length += len(line)
            if line.endswith(b"\n"):
                break
        yield number, BadRecord(f"{length} bytes, at most {LONGEST_LINE} are read of a line")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name if len(name) <= 80 else name[:80] + "..."
                raise ValueError(f"the name {shown!r} occurs twice in one object")
            seen.add(name)
    return found


def _number(text: str) -> float | Refused:
    value = float(text)
    return value if value - value == 0 else Refused(text[:40])


_DECODER = json.JSONDecoder(object_pairs_hook=_without_doubles, parse_float=_number)
