"""Geometry of a timeline: columns of steps, rows, and one SVG path for each state of a row.

A picture has room for so many columns and rows, so neighbours share one where there are more, the
worst of them is shown, and the first step to look at has a column of its own. Neither names nor
digests become coordinates. States differ in height as well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from verify.tracing.definitions import START
from verify.tracing.timeline import Row, worst
from verify.tracing.timeline_events import State

COLUMNS = 240
ROWS = 64
_PLOT = 860  # pixels
_MARGIN = 226  # for names, left of the plot
_TALLEST, _WIDEST = 12, 22
_ALONE = 8  # pixels at least of a step that stands alone among columns of several
_TICKS = 12
_TOP, _BOTTOM = 24, 20
_HEADING = 18
# From the top of a row and tall, in twelfths of its height.
_SHAPES = {
    State.ORIGIN: (0, 12),
    State.DIFFERS: (0, 12),
    State.ONLY: (6, 6),
    State.EQUAL: (4, 4),
    State.NONE: (6, 1),
}


@dataclass(frozen=True)
class Column:
    """Steps that share a column: places [start, stop) among the steps, and where it is drawn."""

    start: int
    stop: int
    x: int
    width: int


@dataclass(frozen=True)
class Line:
    """A row as it is drawn. paths: state and path data. rings: path data around origins."""

    y: int
    name: str
    about: str
    paths: tuple[tuple[str, str], ...]
    rings: str


@dataclass(frozen=True)
class Figure:
    """A picture. ticks: x and step. mark: x of the first step to look at, None without one."""

    lines: tuple[Line, ...]
    headings: tuple[tuple[int, str], ...]
    ticks: tuple[tuple[float, str], ...]
    mark: int | None
    mark_label: str
    mark_anchor: str
    width: int
    height: int
    margin: int
    tall: int
    shared: int  # the most steps that share a column


def columns(steps: Sequence[int], first: int | None) -> tuple[Column, ...]:
    """At most COLUMNS columns, and three more: the start has its own, set off from the steps, and
    so has the first step to look at, since the next one says where its difference went."""
    begins = int(bool(steps) and steps[0] == START)
    size = max(-(-(len(steps) - begins) // COLUMNS), 1)
    at = steps.index(first) if first in steps and first != START else None
    borders = {begins, len(steps)}
    if at is None:
        borders |= set(range(begins, len(steps), size))
    else:
        borders |= {at, at + 1, *range(at, begins, -size), *range(at + 1, len(steps), size)}
    pairs = list(pairwise(sorted(borders)))
    width = min(max(_PLOT // max(len(pairs) + begins, 1), 3), _WIDEST)
    found = [Column(0, 1, _MARGIN, max(width, _ALONE))] if begins else []
    x = _MARGIN + (found[0].width + 4 if begins else 0)
    for start, stop in pairs:
        found.append(Column(start, stop, x, max(width, _ALONE) if start == at else width))
        x += found[-1].width
    return tuple(found)


def shared_rows(
    rows: Sequence[Row], limit: int = ROWS
) -> tuple[tuple[str, tuple[State, ...]], ...]:
    """Ranks by name, neighbours together where there are more than `limit`."""
    size = max(-(-len(rows) // limit), 1)
    found = []
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        names = [_rank(one) for one in (group[0], group[-1])]
        name = names[0] if len(group) == 1 else f"{names[0]} to {names[1]}"
        states = zip(*(one.states for one in group), strict=True)
        found.append((name, group[0].states if len(group) == 1 else tuple(map(worst, states))))
    return tuple(found)


def figure(
    steps: Sequence[int],
    rows: Sequence[tuple[str, str, str, Sequence[State]]],
    first: int | None,
) -> Figure:
    """Rows of (heading, name, about, states). A heading is drawn where it changes, if not ""."""
    cells = columns(steps, first)
    tall = _TALLEST if len(rows) <= ROWS // 2 else 10
    y, before = _TOP, ""
    lines: list[Line] = []
    headings: list[tuple[int, str]] = []
    for heading, name, about, states in rows:
        if heading != before and heading:
            y += _HEADING if lines else 6
            headings.append((y, heading))
            y += 6
        before = heading
        lines.append(_line(y, tall, name, about, cells, states))
        y += tall + 2
    at = steps.index(first) if first is not None and first in steps else None
    mark = next((one for one in cells if at is not None and one.start <= at < one.stop), None)
    right = cells[-1].x + cells[-1].width if cells else _MARGIN
    said = "" if first is None else ("start" if first == START else f"step {first:,}")
    late = mark is not None and mark.x > _MARGIN + _PLOT // 2
    return Figure(
        tuple(lines),
        tuple(headings),
        _ticks(steps, cells),
        None if mark is None else mark.x,
        said,
        "end" if late else "start",
        max(right + 12, _MARGIN + 260),
        y + _BOTTOM,
        _MARGIN,
        tall,
        max((one.stop - one.start for one in cells), default=1),
    )


def _line(
    y: int, tall: int, name: str, about: str, cells: Sequence[Column], states: Sequence[State]
) -> Line:
    shown = [(one, worst(states[one.start : one.stop])) for one in cells]
    paths: dict[State, str] = {}
    rings = ""
    for state, group in groupby(shown, key=lambda pair: pair[1]):
        run = [one for one, _ in group]
        top, share = _SHAPES[state]
        high, low = y + top * tall // 12, max(share * tall // 12, 1)
        for left, right in _pieces(run):
            wide = right - left
            paths[state] = paths.get(state, "") + f"M{left} {high}h{wide}v{low}h-{wide}z"
        if state is State.ORIGIN:
            for one in run:
                wide = max(one.width - 1, 3)
                rings += f"M{one.x} {y}h{wide}v{tall}h-{wide}z"
    order = [state for state in State if state in paths]
    return Line(y, name, about, tuple((state.value, paths[state]) for state in order), rings)


def _pieces(run: Sequence[Column]) -> list[tuple[int, int]]:
    """Left and right of what is drawn of neighbours: wide cells apart, narrow ones as one bar."""
    if run[0].width >= 6:
        return [(one.x, one.x + one.width - 1) for one in run]
    pieces: list[tuple[int, int]] = []
    for one in run:
        if pieces and pieces[-1][1] == one.x:
            pieces[-1] = (pieces[-1][0], one.x + one.width)
        else:
            pieces.append((one.x, one.x + one.width))
    return pieces


def _ticks(steps: Sequence[int], cells: Sequence[Column]) -> tuple[tuple[float, str], ...]:
    own = [one for one in cells if steps[one.start] != START]
    every = max(-(-len(own) // _TICKS), 1)
    found = [(one.x + one.width / 2, f"{steps[one.start]:,}") for one in own[::every]]
    begins = [(one.x + one.width / 2, "start") for one in cells if steps[one.start] == START]
    return (*begins, *(found[1:] if begins and own and own[0].width < 40 else found))


def _rank(row: Row) -> str:
    return "sum over ranks" if row.name is None else f"rank {row.name}"
