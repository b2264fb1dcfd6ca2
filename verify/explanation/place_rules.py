"""Rules on where differing elements are: tails of tiles, a row from which on, periods, one index.

They look at the mask only, and stay silent unless it is filled as the fault would fill it.
"""

from collections.abc import Callable

import numpy as np

from verify.explanation.difference import Pattern

Rule = Callable[[Pattern], str | None]
_TILES = tuple(1 << k for k in range(10, 2, -1))
_LONG_PERIOD = 4096
_OFFSET_BITS = (15, 16, 31, 32)


def _tail(p: Pattern) -> str | None:
    for name, axis in (("columns" if p.mask.ndim > 1 else "elements", 1), ("rows", 0)):
        hit = np.any(p.plane, axis=1 - axis)
        size, first = len(hit), int(np.argmax(hit))
        dense = np.mean(p.plane[:, first:] if axis else p.plane[first:])
        if first == 0 or dense < 0.5 or not hit[first:].all():
            continue
        fitting = [t for t in _TILES if first % t == 0 and size - first < t]
        if fitting:
            return (
                f"only {name} {first}..{size - 1} of {size} differ, and {first} is the last "
                f"multiple of {fitting[0]}: a tail tile not launched, not written or not masked"
            )
    return None


def _from_row_on(p: Pattern) -> str | None:
    what, plane = ("row", p.plane) if p.mask.ndim > 1 else ("element", p.mask.reshape(-1, 1))
    hit = np.any(plane, axis=1)
    rows, columns = plane.shape
    first = int(np.argmax(hit))
    if first == 0 or rows - first < 2 or not hit[first:].all() or np.mean(plane[first:]) < 0.5:
        return None
    text = f"every {what} from {first} on differs (of {rows}), none before"
    for bits in _OFFSET_BITS:
        if (first - 1) * columns < 1 << bits <= (first + 1) * columns:
            return f"{text}; offset {first} * {columns} passes 2**{bits}: overflow of an offset"
    if p.mask.ndim > 2 and first % p.mask.shape[-2] == 0:
        return None  # whole indices of an outer dimension
    if first & (first - 1) == 0:
        return f"{text}; {first} is a power of two: only the first tile was processed"
    return f"{text}: a bound or an offset goes wrong there"


def _periodic(p: Pattern) -> str | None:
    hit = np.any(p.plane, axis=0)
    size = len(hit)
    if hit.all() or hit.sum() < 3 or size < 12:
        return None
    start = hit[: 4 * _LONG_PERIOD]  # most periods fail here, whatever the size
    for period in range(2, min(_LONG_PERIOD, size // 3) + 1):
        if not np.array_equal(start[period:], start[:-period]):
            continue
        if np.array_equal(hit[period:], hit[:-period]):
            phases = np.flatnonzero(hit[:period]).tolist()
            what = "columns" if p.mask.ndim > 1 else "elements"
            shown = ", ".join(map(str, phases[:8])) + (" ..." if len(phases) > 8 else "")
            return (
                f"only {what} c with c mod {period} in {{{shown}}} differ: period {period}, "
                "a lane, vector width or interleaving"
            )
    return None


def _one_index(p: Pattern) -> str | None:
    if p.mask.ndim < 2 or p.mask.shape[0] ** min(p.comparison.num_differing - 1, 9) < 100:
        return None  # one index only, or a coincidence of more than 1 %
    hit = np.flatnonzero(np.any(p.mask.reshape(p.mask.shape[0], -1), axis=1))
    if len(hit) != 1:
        return None
    what = p.context.get("dim0", "index of dim 0")
    return (
        f"all {p.comparison.num_differing} lie in {what} {int(hit[0])} of {p.mask.shape[0]}: "
        "look at what is special about it (its size, its rank, its inputs)"
    )


PLACE_RULES: tuple[Rule, ...] = (_tail, _from_row_on, _periodic, _one_index)
