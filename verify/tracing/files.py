"""The files of a recording: `rank-00000.trace` and so on in a folder, one for each rank.

A file is the magic and then frames that are only ever appended, so a run that is killed leaves a
file that can be read up to its last whole frame. A frame is its payload's length (uint32), its kind
(one byte), the payload, and the CRC-32 of kind and payload; numbers are little-endian.

    H  JSON  what the recording says of itself; the first frame. steps: [from, up to but not
             including, by], the steps that were recorded in full, with version 2; null, or
             absent, with version 1: all
    D  JSON  a list of definitions, each before its first use
    P  JSON  a program: its id and the ids of its definitions in the order of execution
    S        a step: uint32 program, int64 number, uint8 flags (1: ended by an exception, 2: the
             rest is deflated, 4: its state is that of the recording's end), and 32 bytes of lanes
             for each entry of the program
    E  JSON  the number of steps, why the recording ended, what it could not take; the last frame

Reading imports no torch. It refuses a file without a whole header, and one of another version; a
file that is cut, or damaged further on, is read as far as it is sound, and says where that ends.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.tracing.definitions import (
    LANES_BYTES,
    START,
    Definition,
    Event,
    Header,
    Program,
    Recording,
    Step,
    Whole,
)
from verify.tracing.frames import (
    BrokenFrame,
    definition_fields,
    definition_of,
    file_name,
    frame,
    header_fields,
    header_of,
    inflated,
    json_frame,
    parsed,
    split_frame,
    unwritable,
)

__all__ = [
    "Definition",
    "Event",
    "Header",
    "Program",
    "Recording",
    "Step",
    "TraceWriter",
    "Whole",
    "file_name",
    "read_folder",
    "read_recording",
]

MAGIC = b"VTRACE1\n"
_STEP = struct.Struct("<IqB")
_FAILED, _DEFLATED, _LATE = 1, 2, 4
_NAME = re.compile(r"rank-(\d{5,})\.trace")


class TraceWriter:
    """Appends one rank's recording to its file; what was written is there if the run is killed.

    folder: made if it is not there. InputFileError when the file exists and `overwrite` is not
    said, or when it cannot be written.
    """

    def __init__(self, folder: Path, header: Header, *, overwrite: bool = False) -> None:
        self.path = Path(folder) / file_name(header.rank)
        self._ids: dict[tuple[Any, ...], int] = {}
        self._new: list[dict[str, Any]] = []
        self._programs: dict[tuple[int, ...], int] = {}
        self._steps = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mode = "wb" if overwrite else "xb"
            self._file = self.path.open(mode, buffering=0)  # a kill leaves all that was written
        except FileExistsError:
            raise InputFileError(
                f"{self.path}: there is a recording already: give another folder, or "
                "overwrite=True to lose it"
            ) from None
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._write(MAGIC + json_frame("H", header_fields(header)))

    def define(
        self,
        name: str,
        kind: str,
        path: str,
        dtype: str,
        shape: tuple[int, ...],
        module: str = "",
        whole: Whole | None = None,
    ) -> int:
        """The id of a definition with these fields, the same for the same fields."""
        fields = (name, kind, path, dtype, shape, module, whole)
        found = self._ids.get(fields)
        if found is None:
            fields = (name, kind, path, dtype, tuple(shape), module, whole)  # not torch's class
            found = self._ids[fields] = len(self._ids)
            self._new.append(definition_fields(Definition(found, *fields)))
        return found

    def step(
        self,
        number: int,
        entries: Sequence[int],
        lanes: bytes,
        *,
        failed: bool = False,
        late: bool = False,
    ) -> None:
        """Appends a step. entries: ids in the order of execution. lanes: 32 bytes for each."""
        if len(lanes) != LANES_BYTES * len(entries):
            raise ValueError(
                f"{len(entries)} entries have {len(lanes)} bytes of lanes, not 32 each"
            )
        frames = b""
        if self._new:
            frames += json_frame("D", self._new)
            self._new = []
        key = tuple(entries)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = len(self._programs)
            frames += json_frame("P", {"id": program, "entries": key})
        # A tensor that is met again has the same lanes: a module's output, the next one's input.
        small = zlib.compress(lanes, 1)
        deflated = len(small) < len(lanes)
        flags = _FAILED * failed | _DEFLATED * deflated | _LATE * late
        head = _STEP.pack(program, number, flags)
        self._write(frames + frame("S", head + (small if deflated else lanes)))
        self._steps += 1

    def close(self, reason: str = "finished", skipped: Mapping[str, str] | None = None) -> None:
        """Writes the end and closes the file; once is enough, and more does nothing."""
        if not self._file.closed:
            end = {"steps": self._steps, "reason": reason, "skipped": dict(skipped or {})}
            self._write(json_frame("E", end))
            self._file.close()

    def leave(self) -> None:
        """Closes the file as it is, without an end; what is written from now on is dropped."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        if self._file.closed:
            return
        rest = memoryview(data)
        try:
            while rest:  # a raw file may take less than it is given
                rest = rest[self._file.write(rest) :]
        except OSError as error:  # a frame may be cut now, so nothing can follow it
            self._file.close()
            raise unwritable(self.path, error) from error


def read_folder(path: Path) -> dict[int, Recording]:
    """The recordings of a folder by rank; of a file, its only one. InputFileError when there is
    none, or when one cannot be read."""
    path = Path(path)
    if path.is_file():
        found = read_recording(path)
        return {found.header.rank: found}
    try:
        files = sorted(one for one in path.iterdir() if _NAME.fullmatch(one.name))
    except (OSError, ValueError) as error:
        problem = input_files.absence_of(path, error).replace("no such file", "no such folder", 1)
        raise InputFileError(f"{path}: {problem}") from error
    if not files:
        raise InputFileError(f"{path}: holds no recording (no file named {file_name(0)} or alike)")
    recordings = {}
    for file in files:
        found = read_recording(file)
        if file.name != file_name(found.header.rank):
            raise InputFileError(
                f"{file}: says that it is of rank {found.header.rank}, which is not its name"
            )
        recordings[found.header.rank] = found
    return recordings


def read_recording(path: Path) -> Recording:
    """What a file holds, as far as it is sound. InputFileError, naming file, offset and reason, for
    what is no recording or has no whole header."""
    path = Path(path)
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from error
    if not data:
        raise InputFileError(f"{path}: not a recording: is empty (0 bytes)")
    if input_files.is_pointer(data[:100]):
        text = data[:512].decode("utf-8", "replace")
        raise InputFileError(f"{path}: not a recording: {input_files.pointer(text, path.name)}")
    if not data.startswith(MAGIC):
        raise InputFileError(
            f"{path}: not a recording: begins with {data[: len(MAGIC)]!r}, not {MAGIC!r}"
        )
    return _Reader(path, data).read()


class _Reader:
    """Reads one file's frames in order."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._at = path, data, len(MAGIC)
        self._definitions: dict[int, Definition] = {}
        self._programs: dict[int, Program] = {}
        self._steps: list[Step] = []
        self._reason: str | None = None
        self._skipped: dict[str, str] = {}
        self._takers: dict[str, Callable[[bytes], None]] = {
            "D": self._take_definitions,
            "P": self._take_program,
            "S": self._take_step,
            "E": self._take_end,
        }

    def read(self) -> Recording:
        try:
            kind, payload, end = split_frame(self._data, self._at)
            if kind != "H":
                raise BrokenFrame(f"its first frame is of kind {kind!r}, not 'H'")
            header = header_of(payload)
        except BrokenFrame as error:
            raise InputFileError(
                f"{self._path}: not a recording: at byte {self._at}: {error}"
            ) from None
        self._at = end
        problem = None
        while problem is None and (self._at < len(self._data) or self._reason is None):
            try:
                if self._at == len(self._data):
                    raise BrokenFrame("it has no end: the run was killed, or is still going")
                if self._reason is not None:
                    raise BrokenFrame("bytes follow after its end")
                kind, payload, end = split_frame(self._data, self._at)
                if kind not in self._takers:
                    raise BrokenFrame(f"a frame of unknown kind {kind!r}")
                self._takers[kind](payload)
                self._at = end
            except BrokenFrame as error:
                count = sum(one.number != START for one in self._steps)
                after = f"after {count} step{'s' * (count != 1)}"
                if header.steps is not None and count:
                    after = f"after step {self._steps[-1].number}"
                problem = f"at byte {self._at} of {len(self._data)}, {after}: {error}"
        complete, steps = problem is None, tuple(self._steps)
        return Recording(header, steps, complete, problem, self._reason, self._skipped)

    def _take_definitions(self, payload: bytes) -> None:
        for fields in parsed(payload, list):
            one = definition_of(fields)
            if one.id in self._definitions:
                raise BrokenFrame(f"definition {one.id} occurs twice")
            self._definitions[one.id] = one

    def _take_program(self, payload: bytes) -> None:
        fields = parsed(payload, dict)
        try:
            entries = tuple(self._definitions[one] for one in fields["entries"])
            number = fields["id"]
        except (KeyError, TypeError) as error:
            raise BrokenFrame(f"a program is malformed ({error})") from None
        if type(number) is not int or number in self._programs:
            raise BrokenFrame(f"program {number!r} occurs twice, or is no number")
        self._programs[number] = Program(entries)

    def _take_step(self, payload: bytes) -> None:
        if len(payload) < _STEP.size:
            raise BrokenFrame("a step is too short")
        number, step, flags = _STEP.unpack_from(payload)
        program, lanes = self._programs.get(number), payload[_STEP.size :]
        if program is None:
            raise BrokenFrame(f"step {step} has program {number}, which was not defined")
        size = LANES_BYTES * len(program.definitions)
        if flags & _DEFLATED:
            lanes = inflated(lanes, size)
        if len(lanes) != size:
            raise BrokenFrame(f"step {step} has {len(lanes)} bytes of lanes, not 32 for each entry")
        last = self._steps[-1].number if self._steps else START - 1
        if step <= last:
            raise BrokenFrame(f"step {step} cannot follow after step {last}")
        self._steps.append(Step(step, program, lanes, bool(flags & _FAILED), bool(flags & _LATE)))

    def _take_end(self, payload: bytes) -> None:
        fields = parsed(payload, dict)
        try:
            count, reason = fields["steps"], fields["reason"]
            skipped = {str(name): str(why) for name, why in fields["skipped"].items()}
        except (KeyError, AttributeError):
            raise BrokenFrame("its end is malformed") from None
        if count != len(self._steps) or not isinstance(reason, str):
            raise BrokenFrame(
                f"its end speaks of {count!r} steps, and {len(self._steps)} are there"
            )
        self._reason, self._skipped = reason, skipped
