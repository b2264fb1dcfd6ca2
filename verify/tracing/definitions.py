"""What a recording is made of: definitions, events, steps. Values only, no torch and no files.

A definition says what an entry of a step is a digest of; a program is the list of a step's entries
in the order in which they were executed; a step adds the lanes. Nearly all steps of a run share one
program, so a step costs 32 bytes an entry, and events are made when they are asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verify.digests import SCHEME, Digest

VERSION, WITH_CHOICE = 1, 2
"""Of files of all steps, and of chosen ones: a reader without choices would miss the others."""
LANES_BYTES = 32  # of an entry: four 64-bit numbers, little-endian
START = -1  # the number of the step that holds the state before the first one
LEVELS = ("module", "op")
KINDS = (
    "input",
    "output",
    "grad_output",
    "grad_input",
    "grad",
    "parameter",
    "buffer",
    "optimizer",
    "rng",
    "probe",
)

Key = tuple[str, str, str, int]
"""Name, kind, path and occurrence of an event: the same in two runs of one program."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Where a shard lies: the shape of the whole, and [start, stop) along each dimension."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        inside = len(self.shape) == len(self.ranges) and all(
            0 <= start <= stop <= size
            for size, (start, stop) in zip(self.shape, self.ranges, strict=True)
        )
        if not inside:
            raise ValueError(f"ranges {self.ranges} do not lie in a tensor of shape {self.shape}")


@dataclass(frozen=True, slots=True)
class Definition:
    """What an entry is a digest of.

    name: of the module, parameter, probe or op. kind: one of KINDS. path: where in nested arguments
    or state, "" where there is one tensor only. dtype, shape: of the tensor that this rank has.
    module: its class, or "". whole: where that tensor lies in a larger one, or None.
    """

    id: int
    name: str
    kind: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    module: str = ""
    whole: Whole | None = None

    def digest(self, lanes: tuple[int, int, int, int]) -> Digest:
        """The digest with these lanes; of a shard, the part of the whole's digest that it adds."""
        full = self.shape if self.whole is None else self.whole.shape
        return Digest(self.dtype, full, math.prod(self.shape), lanes)


@dataclass(frozen=True, slots=True)
class Event:
    """One digest of one step. index: its place in the order of execution. occurrence: how many
    events of the same name, kind and path came before it in its step."""

    step: int
    index: int
    definition: Definition
    occurrence: int
    digest: Digest

    @property
    def key(self) -> Key:
        return (self.definition.name, self.definition.kind, self.definition.path, self.occurrence)


@dataclass(frozen=True)
class Program:
    """The entries of a step, in the order of execution. Shared by the steps that have it."""

    definitions: tuple[Definition, ...]

    @cached_property
    def occurrences(self) -> tuple[int, ...]:
        """Of each entry, how many of the same name, kind and path came before it."""
        seen: dict[tuple[str, str, str], int] = {}
        found = []
        for one in self.definitions:
            place = (one.name, one.kind, one.path)
            found.append(seen.get(place, 0))
            seen[place] = found[-1] + 1
        return tuple(found)

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """Of each entry; no key occurs twice."""
        return tuple(
            (one.name, one.kind, one.path, number)
            for one, number in zip(self.definitions, self.occurrences, strict=True)
        )


@dataclass(frozen=True)
class Step:
    """One step. number: START for the state before the first. lanes: 32 bytes an entry. failed:
    whether an exception ended it, so that entries may be missing. late: whether its state was taken
    at the end of the recording, behind whatever came after the step."""

    number: int
    program: Program
    lanes: bytes
    failed: bool = False
    late: bool = False

    def __len__(self) -> int:
        return len(self.program.definitions)

    def event(self, index: int) -> Event:
        """The event at a place in the order of execution."""
        one = self.program.definitions[index]
        lanes = struct.unpack_from("<4Q", self.lanes, index * LANES_BYTES)
        digest = one.digest(lanes)
        return Event(self.number, index, one, self.program.occurrences[index], digest)

    @property
    def events(self) -> Iterator[Event]:
        """All events in the order of execution."""
        return map(self.event, range(len(self)))


@dataclass(frozen=True)
class Header:
    """What a recording says of itself. level: "module" or "op". created: ISO 8601, UTC. steps:
    those that were recorded in full, None for all; see `choices`."""

    rank: int
    world: int
    level: str
    created: str
    environment: Mapping[str, Any]
    scheme: str = SCHEME
    steps: range | None = None

    @property
    def version(self) -> int:
        """Of the file."""
        return VERSION if self.steps is None else WITH_CHOICE


@dataclass(frozen=True)
class Recording:
    """What one rank recorded. complete: whether its end was written. problem: why reading stopped
    before an end, in words. reason: why the recording ended ("finished", or an exception). skipped:
    what was met and has no digest, with the reason for the first of its kind."""

    header: Header
    steps: tuple[Step, ...]
    complete: bool
    problem: str | None = None
    reason: str | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end: it was not killed, and no exception ended it."""
        return self.complete and self.reason in (None, "finished")

    @property
    def cut_at(self) -> int | None:
        """The step in which an exception ended the run; None where none did, or nobody wrote it."""
        if not self.complete or self.finished:
            return None
        if not self.steps:
            return START
        return self.steps[-1].number + (not self.steps[-1].failed)
