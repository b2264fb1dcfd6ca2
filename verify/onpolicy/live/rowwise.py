"""Modules that gave other rows for equal rows, however far their inputs had drifted elsewhere.

The first module that differs says nothing of those behind it, whose inputs differ. But at places
where all inputs of a module have equal bits, a module that computes row by row has to give equal
bits as well: leaves of the model, and its experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from verify.onpolicy.live.capturing import INPUT, OUTPUT, Event, Seen
from verify.onpolicy.live.locating import differing
from verify.tracing.hooks import named_modules

Border = dict[str, list[Event]]


@dataclass(frozen=True)
class RowWise:
    """All modules of one type. rows: places with equal inputs. other: of them, with other outputs.
    first: the first module with such a place, or ""."""

    type: str
    modules: int
    differing: int
    rows: int
    other: int
    experts: bool
    first: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document."""
        return dict(vars(self))


def leaves(model: nn.Module) -> set[str]:
    """Names of modules that hold no other module."""
    return {name for name, module in named_modules(model) if not any(module.children())}


def by_type(a: Seen, b: Seen, modules: Iterable[str], experts: Iterable[str]) -> list[RowWise]:
    """The modules named, by type, in the order of execution; the experts first."""
    special = set(experts)
    borders: dict[tuple[str, str, int], Border] = {}
    wanted = {*modules, *special}
    for event in a.rows:
        if event.module in wanted:
            key = (event.type, event.module, event.turn)
            borders.setdefault(key, {INPUT: [], OUTPUT: []})[event.kind].append(event)
    found: dict[tuple[bool, str], list[tuple[str, int, int]]] = {}
    for (kind, module, _), border in borders.items():
        counts = _counts(a, b, border)
        if counts is not None:
            found.setdefault((module not in special, kind), []).append((module, *counts))
    return [
        RowWise(
            kind,
            len({module for module, _, _ in ones}),
            len({module for module, _, other in ones if other}),
            sum(rows for _, rows, _ in ones),
            sum(other for _, _, other in ones),
            not usual,
            next((module for module, _, other in ones if other), ""),
        )
        for (usual, kind), ones in sorted(found.items(), key=lambda one: one[0][0])
    ]


def _counts(a: Seen, b: Seen, border: Border) -> tuple[int, int] | None:
    """Places where all inputs are equal, and those of them where an output is not."""
    equal: dict[int, bool] = {}
    other: set[int] = set()
    given = [found for event in border[INPUT] if (found := differing(event, a, b)) is not None]
    made = [found for event in border[OUTPUT] if (found := differing(event, a, b)) is not None]
    if not given or not made:
        return None
    for found in given:
        for place, differs in zip(found.places.tolist(), found.differs.tolist(), strict=True):
            equal[place] = equal.get(place, True) and not differs
    for found in made:
        other.update(found.places[found.differs].tolist())
    same = {place for place, holds in equal.items() if holds}
    return len(same), len(same & other)
