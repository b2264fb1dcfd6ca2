"""The closed list of faults of a record of experts, each with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHOWN = 6


@dataclass(frozen=True)
class Fault:
    """A record that cannot be replayed as it is. kind: a name of FAULTS. what: in numbers."""

    kind: str
    where: str
    what: str


FAULTS: dict[str, str] = {
    "layer-offset": "index routers by the model's layer number; dense and extra layers count",
    "filler-rows": "rows that this request did not forward were never filled: record -1",
    "foreign-rows": "cached rows belong to another request: store routes with the cache",
    "filler-layers": "layers without a router hold a constant: leave them out, or name layers",
    "missing-rows": "record one row per forwarded token, n - 1 of n tokens",
    "missing-layers": "record the number of each layer, so that both sides name the same routers",
    "other-k": "set the number of experts per token to the same value on both sides",
    "repeated-experts": "a top-k choice has distinct experts; read the record with its own layout",
}

WRONG = frozenset(FAULTS) - {"filler-layers", "missing-layers"}
"""Faults of a record that would be replayed wrongly; the others only say too little."""


def few(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """At most SHOWN of each kind, and one line that counts the others."""
    kept: list[Fault] = []
    for kind in FAULTS:
        of = [fault for fault in faults if fault.kind == kind]
        kept += of[:SHOWN]
        if len(of) > SHOWN:
            kept.append(Fault(kind, "", f"and {len(of) - SHOWN} more samples"))
    return tuple(kept)


def spans(numbers: NDArray[np.integer[Any]]) -> str:
    """`0..3, 7`."""
    values = [int(value) for value in numbers]
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    shown = [f"{a}..{b}" if a != b else str(a) for a, b in spans[:SHOWN]]
    return ", ".join(shown) + (" ..." if len(spans) > SHOWN else "")
