"""What could not be read of a file: where it is, what was given, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.onpolicy.formats.json_records import BadRecord, Refused
from verify.onpolicy.samples import Place, Problem

MOST_PROBLEMS = 1000  # kept of one dump; more are counted
MOST_SAMPLES = 500_000  # of a file


class Problems:
    """What could not be read, in order. At most MOST_PROBLEMS are kept and the rest counted."""

    def __init__(self) -> None:
        self._kept: list[Problem] = []
        self._more = 0

    def add(self, place: Place, field: str, what: str, kind: str = "bad-value") -> None:
        if len(self._kept) < MOST_PROBLEMS:
            self._kept.append(Problem(place, field, what, kind))
        else:
            self._more += 1

    def listed(self) -> tuple[Problem, ...]:
        if not self._more:
            return tuple(self._kept)
        what = f"{self._more} more problems were found and are not listed"
        return (*self._kept, Problem(Place(self._kept[0].place.file), "", what, "note"))


@dataclass(frozen=True, eq=False)
class Spot:
    """A record that is being read: where it is, and where its problems go.

    number: how many records stand before it in its file, those that cannot be read included: what
    a record without an id is paired by, so that a broken one does not shift all that follow.
    """

    place: Place
    problems: Problems
    number: int = 0

    def bad(self, field: str, what: str) -> None:
        """The field is left out."""
        self.problems.add(self.place, field, what)

    def unreadable(self, what: str, field: str = "") -> None:
        """The whole record is left out."""
        self.problems.add(self.place, field, what, "unreadable")

    def note(self, field: str, what: str) -> None:
        """Nothing is left out, but somebody should know."""
        self.problems.add(self.place, field, what, "note")


def objects(
    records: Iterable[tuple[Place, Any]], problems: Problems
) -> Iterable[tuple[Spot, Mapping[str, Any]]]:
    """The records that are objects; the others are reported. At most MOST_SAMPLES of them."""
    for count, (place, record) in enumerate(records):
        spot = Spot(place, problems, count)
        if count == MOST_SAMPLES:
            spot.unreadable(f"more than {MOST_SAMPLES} records: this and what follows is not read")
            return
        if isinstance(record, dict):
            yield spot, record
        elif isinstance(record, BadRecord):
            spot.unreadable(record.why)
        else:
            spot.unreadable(f"is {described(record)}; a record is an object")


def room(samples: Sequence[Any], spot: Spot) -> bool:
    """Whether one more sample of a file is taken; a problem where it is not."""
    if len(samples) < MOST_SAMPLES:
        return True
    spot.unreadable(f"more than {MOST_SAMPLES} samples: this and what follows is not read")
    return False


def described(value: Any) -> str:
    """What was given, in a few words whatever its size."""
    if isinstance(value, Refused):
        return f"{value!s}, a number beyond float64"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"text of {len(value)} characters"
    if isinstance(value, int):
        return repr(value) if value.bit_length() < 100 else "an integer beyond 100 bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"an object of {len(value)} names"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
