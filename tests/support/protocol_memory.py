"""Memory of ranks in the simulation of the protocol, modelled by what lies where.

A cell has a tag, None while it is being written, and the number of readers that still need it.
Readers look when they begin and when they end, writers when they begin, so that any overlap of the
two is seen, and so is a write that comes before the last reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from protocol_scheduler import Broken
from protocol_settings import Setting


class Work(Protocol):
    """What the simulation knows of one rank's launch, of whatever kind."""

    @property
    def blocks(self) -> int: ...
    @property
    def results(self) -> int: ...
    @property
    def dispatches(self) -> int: ...


@dataclass(frozen=True)
class Violation:
    kind: str  # "early read", "overwritten" or "not once"
    where: str


@dataclass
class Cell:
    tag: object = None
    unread: int = 0


class Look(NamedTuple):
    """A read: the cell has to hold `tag`. what: added to the task's name."""

    cell: Cell
    tag: object
    what: str = ""


class Put(NamedTuple):
    """A write. readers: how many will need it. in_place: begins when the task's reads are over."""

    cell: Cell
    tag: object
    readers: int
    in_place: bool = False


@dataclass
class Rank:
    index: int
    flags: list[list[int]]
    cells: dict[tuple[object, ...], Cell] = field(default_factory=dict)
    counters: Counter[tuple[str, int]] = field(default_factory=Counter)
    work: Work | None = None
    epoch: int = 0
    schedule: int = 0
    summed: Counter[tuple[int, int]] = field(default_factory=Counter)
    delivered: Counter[tuple[object, ...]] = field(default_factory=Counter)
    ended: int = 0

    def cell(self, *name: object) -> Cell:
        """The cell of this name, empty at first."""
        return self.cells.setdefault(name, Cell())


class Memory:
    """All cells of all ranks, and what was done wrong to them.

    failed: ranks whose own mistakes do not count, since their results are refused.
    """

    def __init__(self, setting: Setting, ranks: int, failed: Set[int], keep_going: bool) -> None:
        self.setting, self.failed, self.keep_going = setting, failed, keep_going
        self.ranks = [Rank(index, [[0] * ranks for _ in range(4)]) for index in range(ranks)]
        self.violations: list[Violation] = []

    def violated(self, rank: Rank, kind: str, where: str) -> None:
        if rank.index in self.failed:
            return
        self.violations.append(Violation(kind, where))
        if not self.keep_going:
            raise Broken(f"{kind}: {where}")

    def begin_write(self, rank: Rank, cell: Cell, where: str) -> None:
        if cell.unread > 0:
            self.violated(rank, "overwritten", where)
        cell.tag, cell.unread = None, 0

    def look(self, rank: Rank, cell: Cell, tag: object, where: str, *, end: bool = False) -> None:
        if cell.tag != tag:
            self.violated(rank, "early read", f"{where}: {cell.tag}, expected {tag}")
        if end:
            cell.unread -= 1

    def read(self, rank: Rank, looks: Iterable[Look], where: str, *, end: bool) -> None:
        """What a task reads: looked at when it is loaded and when it is done."""
        for cell, tag, what in looks:
            self.look(rank, cell, tag, where + what, end=end)

    def write(self, rank: Rank, puts: Iterable[Put], where: str, *, end: bool) -> None:
        """What a task writes: nobody may need it when it begins, others see it when it is done."""
        for cell, tag, readers, in_place in puts:
            if end == in_place:
                self.begin_write(rank, cell, where)
            if end:
                cell.tag, cell.unread = tag, readers
