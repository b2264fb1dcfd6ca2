"""Which events of one run are which events of another.

Events have the same key (name, kind, path, occurrence) in both runs. No key occurs twice in a step,
so what is common is found by looking it up, and the longest part that both runs executed in the
same order is a longest increasing subsequence: exact, and the same whichever run is called A. An
extra call of a module takes the last occurrence, wherever it came, since digests alone cannot say
which call was the extra one. It refuses to guess a partner for an event whose key the other run
lacks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from verify.tracing.definitions import Key, Program


@dataclass(frozen=True)
class Alignment:
    """How the entries of two programs go together.

    pairs: (place in A, place in B) of what both have, in A's order. only_a, only_b: places of what
    one side has. moved: the pairs outside the longest part that both executed in the same order.
    """

    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...] = ()
    only_b: tuple[int, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def same(self) -> bool:
        """Whether both have the same entries in the same order."""
        return not (self.only_a or self.only_b or self.moved)


def align(a: Program, b: Program) -> Alignment:
    """Pairs the entries of two programs."""
    return align_keys(a.keys, b.keys)


def align_keys(a: Sequence[Key], b: Sequence[Key]) -> Alignment:
    """Pairs two lists of keys, none of which holds a key twice."""
    if a == b:
        return Alignment(tuple((index, index) for index in range(len(a))))
    places = {key: index for index, key in enumerate(b)}
    pairs = [(index, places[key]) for index, key in enumerate(a) if key in places]
    common = {b_index for _, b_index in pairs}
    matched = {a_index for a_index, _ in pairs}
    kept = _longest_rising([b_index for _, b_index in pairs])
    return Alignment(
        tuple(pairs),
        tuple(index for index in range(len(a)) if index not in matched),
        tuple(index for index in range(len(b)) if index not in common),
        tuple(pair for place, pair in enumerate(pairs) if place not in kept),
    )


def _longest_rising(values: Sequence[int]) -> set[int]:
    """The places of a longest increasing subsequence of distinct numbers; n log n."""
    ends: list[int] = []  # of each length, the smallest last value
    places: list[int] = []  # and where it is
    before: list[int | None] = []
    for place, value in enumerate(values):
        length = bisect_left(ends, value)
        before.append(places[length - 1] if length else None)
        if length == len(ends):
            ends.append(value)
            places.append(place)
        else:
            ends[length], places[length] = value, place
    found: set[int] = set()
    at = places[-1] if places else None
    while at is not None:
        found.add(at)
        at = before[at]
    return found
