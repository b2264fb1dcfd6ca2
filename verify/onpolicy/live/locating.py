"""The first module that gives other rows for equal ones, in the order of execution.

Two layouts are compared event by event at equal places. All that ran before the first event that
differs had equal bits at every place, so the module that it belongs to is where they part: the one
whose output it is; or, if it is the input of a module, the one around it, whose own code ran
between its parts (in attention: the product with the cache, before the output's projection).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify.onpolicy.live.capturing import INPUT, OUTPUT, Event, Rows, Seen
from verify.onpolicy.live.sequences import placed

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Parted:
    """Where two layouts part. module: who is to blame, and its type. before: the part of the module
    whose input was the first to differ, or "" for the module's own output. differing, compared:
    places. largest: of |d|, None for integers. relative: the same by the row's largest value.
    sequence, position: the first place. choice: whether it is a router's that differs.
    """

    module: str
    type: str
    before: str
    path: str
    differing: int
    compared: int
    largest: float | None
    relative: float | None
    sequence: int
    position: int
    choice: bool

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document."""
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Difference:
    """One event at the places that both layouts have. differs: bool [n]. other: b's values."""

    event: Event
    places: Tensor
    differs: Tensor
    a: Tensor
    b: Tensor


def first_difference(
    a: Seen, b: Seen, tolerance: float = 0.0, chosen: Collection[Event] = ()
) -> Parted | None:
    """Where b parts from a, or None where every event that both have is equal.

    chosen: events that are choices of routers. tolerance: rows of floating-point numbers are equal
    up to this share of their largest value; 0 compares bits.
    """
    return next(differences(a, b, tolerance, chosen), None)


def differences(
    a: Seen, b: Seen, tolerance: float = 0.0, chosen: Collection[Event] = ()
) -> Iterator[Parted]:
    """Every event that differs, in the order of execution; see `first_difference`."""
    types = {event.module: event.type for event in a.rows}
    for event in a.rows:
        if event.kind == INPUT and event.around is None:
            continue  # what we gave ourselves
        found = differing(event, a, b, tolerance)
        if found is not None and bool(found.differs.any()):
            yield _parted(found, types, event in chosen)


def gives_other(module: str, a: Seen, b: Seen, tolerance: float = 0.0) -> bool | None:
    """Whether any output of a module differs; None where none could be compared."""
    outputs = [one for one in a.rows if one.module == module and one.kind == OUTPUT]
    compared = [one for event in outputs if (one := differing(event, a, b, tolerance)) is not None]
    return any(bool(one.differs.any()) for one in compared) if compared else None


def differing(event: Event, a: Seen, b: Seen, tolerance: float = 0.0) -> Difference | None:
    """The rows of an event at common places; None where there are none of the same form, or its
    module is not called as often on the other side, so that a turn is not the same turn."""
    if a.calls.get(event.module) != b.calls.get(event.module):
        return None
    one, other = a.rows.get(event), b.rows.get(event)
    if one is None or other is None:
        return None
    places, left, right = _common(one, other)
    if not len(places) or left.shape != right.shape or left.dtype != right.dtype:
        return None
    differs = (bits(left) != bits(right)).any(dim=1)
    if tolerance and left.is_floating_point():
        differs &= ~(_relative(left, right) <= tolerance)
    return Difference(event, places, differs, left, right)


def bits(values: Tensor) -> Tensor:
    """The same memory as integers."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    kind = _BITS[values.element_size()]
    return values if values.dtype == torch.bool else values.contiguous().view(kind)


def _common(one: Rows, other: Rows) -> tuple[Tensor, Tensor, Tensor]:
    if torch.equal(one.places, other.places):
        return one.places, one.values, other.values
    both = one.places[torch.isin(one.places, other.places)]
    left = one.values[torch.searchsorted(one.places, both)]
    return both, left, other.values[torch.searchsorted(other.places, both)]


def _relative(left: Tensor, right: Tensor) -> Tensor:
    """float64 [n]: largest |d| of each row by its largest value; NaN where either is not finite."""
    a, b = left.to(torch.float64), right.to(torch.float64)
    size = torch.maximum(a.abs().amax(dim=1), b.abs().amax(dim=1))
    return (a - b).abs().amax(dim=1) / size.clamp(min=torch.finfo(torch.float64).tiny)


def _parted(found: Difference, types: dict[str, str], choice: bool) -> Parted:
    event = found.event
    row = int(found.differs.nonzero()[0])
    sequence, position = placed(int(found.places[row]))
    largest = relative = None
    if found.a.is_floating_point():
        a, b = found.a[found.differs].double(), found.b[found.differs].double()
        largest = float((a - b).abs().max())
        relative = float(_relative(a, b).max())
    module = event.module if event.kind == OUTPUT else event.around
    assert module is not None
    return Parted(
        module,
        types.get(module, event.type),
        event.module if event.kind == INPUT else "",
        event.path,
        int(found.differs.sum()),
        len(found.places),
        largest,
        relative,
        sequence,
        position,
        choice,
    )
