"""Memory of ranks in the simulation of the protocol, modelled by what lies where.

A cell has a tag, None while it is being written, and the number of readers that still need it.
Readers look when they begin and when they end, writers when they begin, so that any overlap of the
two is seen, and so is a write that comes before the last reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from protocol_scheduler import Broken
from protocol_settings import BLOCK_ROWS, Routing, Setting

from mok.hopper.protocol import (
    DOWN,
    KINDS,
    SHARED_DOWN,
    SHARED_UP,
    SUM,
    UP,
    Task,
    Work,
)


@dataclass(frozen=True)
class Violation:
    kind: str  # "early read", "overwritten" or "not once"
    where: str


@dataclass
class Cell:
    tag: object = None
    unread: int = 0


@dataclass
class Rank:
    index: int
    flags: list[list[int]]
    staged: Cell = field(default_factory=Cell)
    ids: list[Cell] = field(default_factory=list)
    x_ring: dict[tuple[int, int], Cell] = field(default_factory=dict)
    hidden: dict[tuple[int, int], Cell] = field(default_factory=dict)
    shared_hidden: dict[tuple[int, int], Cell] = field(default_factory=dict)
    y: dict[tuple[int, int], Cell] = field(default_factory=dict)
    counters: Counter[tuple[str, int]] = field(default_factory=Counter)
    work: Work | None = None
    epoch: int = 0
    schedule: int = 0
    summed: Counter[tuple[int, int]] = field(default_factory=Counter)
    ended: int = 0


class Memory:
    """All cells of all ranks, and what was done wrong to them.

    failed: ranks whose own mistakes do not count, since their results are refused.
    """

    def __init__(self, setting: Setting, ranks: int, failed: Set[int], keep_going: bool) -> None:
        self.setting, self.failed, self.keep_going = setting, failed, keep_going
        self.ranks = [
            Rank(index, [[0] * ranks for _ in range(4)], ids=[Cell() for _ in range(2)])
            for index in range(ranks)
        ]
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

    def read(self, rank: Rank, task: Task, routing: Routing, epoch: int, *, end: bool) -> None:
        """What a task reads: looked at when it is loaded and when it is done."""
        assert rank.work is not None
        work, where = rank.work, task_name(rank, task, epoch)
        if task.kind == UP:
            for row in range(BLOCK_ROWS):
                cell = rank.x_ring.setdefault((task.block % work.ring_x, row), Cell())
                self.look(rank, cell, (epoch, task.block, row), where, end=end)
        elif task.kind == DOWN:
            for column in range(work.columns_up):
                cell = rank.hidden.setdefault((task.block % work.ring_h, column), Cell())
                self.look(rank, cell, (epoch, task.block), where, end=end)
        elif task.kind == SHARED_DOWN:
            cell = rank.shared_hidden.setdefault((task.block, 0), Cell())
            self.look(rank, cell, (epoch, task.block), where, end=end)
        elif task.kind == SUM:
            routed = {
                row[1]
                for blocks in routing.rows
                for block in blocks
                for row in block
                if row is not None and row[0] == rank.index
            }
            first = task.block * self.setting.slots
            for route in range(first, first + self.setting.slots):
                for column in range(work.columns_down) if route in routed else ():
                    cell = rank.y.setdefault((route, column), Cell())
                    self.look(rank, cell, epoch, f"{where} y {route}", end=end)
            if end:
                rank.summed[epoch, task.block] += 1

    def write(self, rank: Rank, task: Task, routing: Routing, epoch: int, *, end: bool) -> None:
        assert rank.work is not None
        work, where = rank.work, task_name(rank, task, epoch)
        cells: list[tuple[Cell, object, int]] = []
        if task.kind == UP:
            place = (task.block % work.ring_h, task.column)
            cell = rank.hidden.setdefault(place, Cell())
            cells.append((cell, (epoch, task.block), work.columns_down))
        elif task.kind == SHARED_UP:
            cell = rank.shared_hidden.setdefault((task.block, task.column), Cell())
            cells.append((cell, (epoch, task.block), work.columns_down))
        elif task.kind == DOWN and rank.index not in self.failed:
            for row in routing.rows[rank.index][task.block]:
                if row is not None:
                    owner = self.ranks[row[0]]
                    cells.append((owner.y.setdefault((row[1], task.column), Cell()), epoch, 1))
        for cell, tag, readers in cells:
            if end:
                cell.tag, cell.unread = tag, readers
            else:
                self.begin_write(rank, cell, where)


def task_name(rank: Rank, task: Task, epoch: int) -> str:
    return f"{KINDS[task.kind]} {task.block} of rank {rank.index}, launch {epoch}"
