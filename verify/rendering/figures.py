"""Geometry of the figures in the HTML report: ULP histogram, tile map, grid of ranks.

Only integers from the document become coordinates; a template draws them as inline SVG in the
colours of the page, so that no library is needed and light, dark and print look right. It refuses
to draw what it cannot read: a malformed figure is left out, the lines of the finding remain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
SHOWN_RANKS = 256
_BUCKET = re.compile(r"(?:([0-9]{1,20})-)?([0-9]{1,20})")
_NOT_FINITE = "not finite"
_SLOTS = 66  # of a histogram over 64-bit distances: 0, 1, 2, 3-4, ... 2**63
_SIDE = 64  # tiles each way, beyond which a map is not drawn
LEVELS = ("below 1 %", "below 10 %", "below 50 %", "below 100 %", "all differ")


@dataclass(frozen=True)
class Bar:
    """One column of a histogram, in pixels from the top left corner; `about` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    about: str
    special: bool = False


@dataclass(frozen=True)
class Histogram:
    """Differing elements by ULP distance, the axis doubling from slot to slot."""

    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]  # middle of a slot, its largest distance
    width: int
    height: int  # of the bars; ticks lie below
    largest: str
    about: str


@dataclass(frozen=True)
class TileMap:
    """Where elements differ: one SVG path per level of density, labels at rows and columns."""

    paths: tuple[tuple[int, str], ...]  # level 0 (nothing) to 5 (all), path data
    rows: tuple[tuple[float, str], ...]
    columns: tuple[tuple[float, str], ...]
    width: int
    height: int
    about: str
    tile: str


@dataclass(frozen=True)
class RankCell:
    """One rank: `state` is equal, differs, other (another finding), named or missing."""

    rank: int
    state: str
    text: str


@dataclass(frozen=True)
class RankGrid:
    """All ranks of a case as far as they are shown, and what the grid says in words."""

    cells: tuple[RankCell, ...]
    more: int
    about: str


def histogram(ulps: Any, *, width: int = 260, height: int = 84) -> Histogram | None:
    """From a mapping such as `{"1": 300, "3-4": 12, "not finite": 1}`; None if it holds nothing."""
    counts: dict[int, int] = {}
    labels: dict[int, str] = {}
    other, named = 0, True
    for label, count in ulps.items() if isinstance(ulps, Mapping) else ():
        if not _is_count(count) or count == 0:
            continue
        found = _BUCKET.fullmatch(str(label))
        slot = _slot(int(found[2])) if found else _SLOTS
        if slot >= _SLOTS:
            other += count
            named = named and label == _NOT_FINITE
            continue
        counts[slot] = counts.get(slot, 0) + count
        labels[slot] = str(label)
    if not counts and not other:
        return None
    first, last = (min(counts), max(counts)) if counts else (0, -1)
    slots = last - first + 1 + (2 if other and counts else 1 if other else 0)
    step = min(width / slots, 28.0)
    largest = max([*counts.values(), other])
    bars = []
    for slot, count in sorted(counts.items()):
        label = f"{labels[slot]} ulp"
        bars.append(_bar((slot - first) * step, step, height, count, largest, label))
    every = max(-(-(last - first + 1) // 6), 1)
    ticks = [
        ((slot - first + 0.5) * step, _largest_of(slot)) for slot in range(first, last + 1, every)
    ]
    if other:
        label = _NOT_FINITE if named else "other"
        bars.append(_bar((slots - 1) * step, step, height, other, largest, label, True))
        ticks.append(((slots - 0.5) * step, "nan, inf" if named else label))
    said = "; ".join(bar.about for bar in bars)
    return Histogram(tuple(bars), tuple(ticks), width, height, f"{largest:,}", said)


def tile_map(tiles: Any, numel: Any, *, side: int = 11) -> TileMap | None:
    """From the `tiles` of a difference; `numel` gives how many elements a tile holds."""
    grid = _grid(tiles)
    if grid is None:
        return None
    (rows, columns), (high, wide), counts = grid
    depth = max(numel // (rows * columns), 1) if _is_count(numel) else 1
    paths = [""] * (len(LEVELS) + 1)
    hit: list[tuple[int, int]] = []
    for i, line in enumerate(counts):
        for j, count in enumerate(line):
            inside = (min(high, rows - i * high), min(wide, columns - j * wide))
            level = _level(count, inside[0] * inside[1] * depth)
            paths[level] += f"M{j * side} {i * side}h{side - 1}v{side - 1}h{1 - side}z"
            if level:
                hit.append((i, j))
    if not hit:
        return None
    row = _range([i for i, _ in hit], high, rows)
    column = _range([j for _, j in hit], wide, columns)
    matrix = f"rows {row} of {rows:,}, columns {column} of {columns:,}"
    where = matrix if rows > 1 else f"elements {column} of {columns:,}"
    return TileMap(
        tuple((level, path) for level, path in enumerate(paths) if path),
        _labels(len(counts), high, side, 4) if rows > 1 else (),
        _labels(len(counts[0]), wide, side, 3),
        len(counts[0]) * side,
        len(counts) * side,
        f"differ: {where}",
        f"{high} x {wide}" if rows > 1 else f"{wide}",
    )


def rank_grid(
    num_ranks: int,
    claims: Sequence[Json],
    findings: Sequence[Json],
) -> RankGrid | None:
    """Which ranks a group of findings names, and which gave evidence without one.

    `claims` are those that the findings belong to. None for a case of one rank, or when no finding
    names a rank.
    """
    named = {f["rank"] for f in findings if f["rank"] is not None}
    if num_ranks < 2 or not named:
        return None
    bad = findings[0]["verdict"] == "MISMATCH"
    digests = _digests_by_rank(claims, findings[0])
    if digests:
        return _replicas(num_ranks, digests)
    cells = []
    for rank in range(min(num_ranks, SHOWN_RANKS)):
        evidence = [one for claim in claims for one in claim["ranks"] if one["rank"] == rank]
        runs = sum(one["executions"] for one in evidence)
        differing = sum(one["differing"] for one in evidence)
        share = f"{differing}/{runs}"
        if rank in named and bad:
            cells.append(RankCell(rank, "differs", share))
        elif rank in named:
            lost = findings[0]["reason"] == "missing-rank"
            cells.append(RankCell(rank, "missing" if lost else "named", "lost" if lost else "here"))
        elif runs == 0:
            cells.append(RankCell(rank, "missing", "no runs"))
        else:
            cells.append(RankCell(rank, "other" if differing else "equal", share))
    about = "runs that differ, by rank" if bad else "ranks that the finding names"
    return RankGrid(tuple(cells), max(num_ranks - SHOWN_RANKS, 0), about)


def _replicas(num_ranks: int, digests: Mapping[int, str]) -> RankGrid:
    """Which ranks hold the same copy: equal digests share a letter, the most frequent one is A."""
    values = list(digests.values())
    order = sorted(dict.fromkeys(values), key=values.count, reverse=True)
    alone = len(order) > 1 and values.count(order[0]) == values.count(order[1])
    cells = []
    for rank in range(min(num_ranks, SHOWN_RANKS)):
        if rank not in digests:
            cells.append(RankCell(rank, "missing", "no copy"))
            continue
        index = order.index(digests[rank])
        state = "equal" if index == 0 and not alone else "differs"
        cells.append(RankCell(rank, state, f"copy {_letter(index)}"))
    about = f"{len(order)} different copies in the last run; the same letter, the same bits"
    return RankGrid(tuple(cells), max(num_ranks - SHOWN_RANKS, 0), about)


def _digests_by_rank(claims: Sequence[Json], finding: Json) -> dict[int, str]:
    """The last digests of a tensor that should be equal on all ranks; {} if they tell nothing."""
    if finding["reason"] != "ranks-differ" or not claims:
        return {}
    found = {
        one["rank"]: one["outputs"][finding["tensor"]]
        for one in claims[0]["ranks"]
        if finding["tensor"] in one["outputs"]
    }
    return found if len(set(found.values())) > 1 else {}


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"{index + 1}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _slot(largest: int) -> int:
    """0, 1 and 2 are slots of their own, then every power of two starts another."""
    return largest if largest <= 2 else (largest - 1).bit_length() + 1


def _largest_of(slot: int) -> str:
    if slot <= 2:
        return str(slot)
    return str(1 << slot - 1) if slot <= 11 else f"2^{slot - 1}"


def _bar(
    x: float, step: float, height: int, count: int, largest: int, label: str, special: bool = False
) -> Bar:
    tall = max(height * count / largest, 1.5)  # a single element must be seen, too
    gap = 1.0 if step > 4 else 0.4
    return Bar(
        round(x, 2),
        round(height - tall, 2),
        round(step - gap, 2),
        round(tall, 2),
        f"{label}: {count:,}",
        special,
    )


def _grid(tiles: Any) -> tuple[tuple[int, int], tuple[int, int], Sequence[Sequence[int]]] | None:
    """Shape, tile and counts, if they fit together and the map is small enough to draw."""
    if not isinstance(tiles, Mapping):
        return None
    shape, tile = _pair(tiles.get("shape")), _pair(tiles.get("tile"))
    counts = tiles.get("counts")
    if shape is None or tile is None or not isinstance(counts, list) or not counts:
        return None
    expected = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
    if max(expected) > _SIDE or len(counts) != expected[0]:
        return None
    for line in counts:
        if not isinstance(line, list) or len(line) != expected[1] or not all(map(_is_count, line)):
            return None
    return shape, tile, counts


def _pair(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    return (value[0], value[1]) if all(_is_count(v) and v > 0 for v in value) else None


def _level(count: int, room: int) -> int:
    """0 for none, else the first of LEVELS that holds, counted from 1."""
    if count == 0:
        return 0
    share = count / room
    return 1 + sum(share >= bound for bound in (0.01, 0.1, 0.5, 1.0))


def _range(hit: Sequence[int], step: int, size: int) -> str:
    low, high = min(hit) * step, min((max(hit) + 1) * step, size) - 1
    return f"{low:,}-{high:,}" if high > low else f"{low:,}"


def _labels(number: int, step: int, side: int, most: int) -> tuple[tuple[float, str], ...]:
    """The first row or column of some tiles, evenly spread."""
    every = -(-number // most)
    return tuple((i * side, f"{i * step:,}") for i in range(0, number, every))
