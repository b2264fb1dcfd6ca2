"""What the simulation of the protocol has to know of a kind of launch, and the forward's.

Waits, groups and counters are those of mok/hopper/protocol.py; here is which memory a task reads
and writes. The backward's is in protocol_backward.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from protocol_memory import Cell, Look, Memory, Put, Rank
from protocol_settings import BLOCK_ROWS, PER_BLOCK, Routing, Rules, Setting

from mok.hopper import protocol
from mok.hopper.protocol import (
    DISPATCH,
    DOWN,
    END,
    SHARED_DOWN,
    SHARED_UP,
    SUM,
    UP,
    Group,
    Need,
    Task,
    Work,
    least_rings,
    order_groups,
)


class Pass(ABC):
    """A kind of launch. sum, end: its kinds of tasks with these meanings."""

    sum: int
    end: int
    kinds: dict[int, str]

    def __init__(self, setting: Setting, rules: Rules, memory: Memory) -> None:
        self.setting, self.rules, self.memory = setting, rules, memory

    @abstractmethod
    def make_work(self, rank: Rank, routing: Routing) -> Any:
        """What a rank has to do."""

    @abstractmethod
    def find_task(self, rank: Rank, number: int) -> Any: ...

    @abstractmethod
    def dispatch(self, block: int) -> Any:
        """The task of a dispatch ticket of this block."""

    @abstractmethod
    def needs(self, rank: Rank, task: Any) -> Iterable[Need]:
        """The waits of a task that the rules leave."""

    @abstractmethod
    def counted(self, task: Any) -> Iterable[tuple[str, int]]: ...

    @abstractmethod
    def ring_cells(self, rank: Rank, block: int, rows: Sequence[int]) -> list[tuple[Cell, int]]:
        """Where dispatched rows go, and how many read each."""

    @abstractmethod
    def reads(self, rank: Rank, task: Any, routing: Routing, epoch: int) -> list[Look]: ...

    @abstractmethod
    def writes(self, rank: Rank, task: Any, routing: Routing, epoch: int) -> list[Put]: ...

    @abstractmethod
    def deliver(self, rank: Rank, task: Any, routing: Routing, epoch: int) -> None:
        """Counts what a finished task gives away for good, on the rank that gets it."""

    @abstractmethod
    def expected(self, routing: Routing, epoch: int) -> Counter[tuple[object, ...]]:
        """Of a launch, by rank and then as `deliver` counts; each has to come once."""

    def task_name(self, rank: Rank, task: Any, epoch: int) -> str:
        """The subject of a message."""
        return f"{self.kinds[task.kind]} {task.block} of rank {rank.index}, launch {epoch}"


def routed_to(routing: Routing, rank: int) -> set[int]:
    """Routes of a rank's tokens that lie in some row."""
    rows = [row for blocks in routing.rows for block in blocks for row in block]
    return {row[1] for row in rows if row is not None and row[0] == rank}


class Forward(Pass):
    """The launch of csrc/moe/forward.cu."""

    sum, end, kinds = SUM, END, protocol.KINDS

    def make_work(self, rank: Rank, routing: Routing) -> Work:
        setting = self.setting
        segments, tokens = routing.segments[rank.index], routing.tokens[rank.index]
        shared = -(-tokens // BLOCK_ROWS) if setting.shared else 0
        groups = order_groups(
            segments,
            shared_blocks=shared,
            sums=tokens,
            columns_up=setting.columns_up,
            columns_down=setting.columns_down,
            columns_shared=1,
        )
        if self.rules.down_first:
            groups = _down_first(groups, setting.columns_up, setting.columns_down)
        least_x, least_h = least_rings(segments)
        ring_x = max(1, least_x + setting.extra_x)
        ring_h = max(1, least_h + setting.extra_h)
        columns = (setting.columns_up, setting.columns_down, 1)
        return Work(groups, ring_x, ring_h, *columns, dispatch_per_block=PER_BLOCK)

    def find_task(self, rank: Rank, number: int) -> Task:
        return protocol.find_task(_work(rank), number)

    def dispatch(self, block: int) -> Task:
        return Task(DISPATCH, block, 0)

    def needs(self, rank: Rank, task: Task) -> Iterable[Need]:
        for need in protocol.needs(_work(rank), task):
            if task.kind == UP and need.counter == "down" and not self.rules.hidden_waits_for_ring:
                continue
            if task.kind == DISPATCH and not self.rules.x_waits_for_ring:
                continue
            yield need

    def counted(self, task: Task) -> Iterable[tuple[str, int]]:
        return protocol.counted(task)

    def ring_cells(self, rank: Rank, block: int, rows: Sequence[int]) -> list[tuple[Cell, int]]:
        work = _work(rank)
        place = block % work.ring_x
        return [(rank.cell("x ring", place, row), work.columns_up) for row in rows]

    def reads(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> list[Look]:
        work, block = _work(rank), task.block
        if task.kind == UP:
            return [
                Look(rank.cell("x ring", block % work.ring_x, row), (epoch, block, row))
                for row in range(BLOCK_ROWS)
            ]
        if task.kind == DOWN:
            return [
                Look(rank.cell("hidden", block % work.ring_h, column), (epoch, block))
                for column in range(work.columns_up)
            ]
        if task.kind == SHARED_DOWN:
            return [Look(rank.cell("shared hidden", block, 0), (epoch, block))]
        if task.kind == SUM:
            routed = routed_to(routing, rank.index)
            first = block * self.setting.slots
            return [
                Look(rank.cell("y", route, column), epoch, f" y {route}")
                for route in range(first, first + self.setting.slots)
                for column in range(work.columns_down if route in routed else 0)
            ]
        return []

    def writes(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> list[Put]:
        work, block = _work(rank), task.block
        if task.kind == UP:
            cell = rank.cell("hidden", block % work.ring_h, task.column)
            return [Put(cell, (epoch, block), work.columns_down)]
        if task.kind == SHARED_UP:
            cell = rank.cell("shared hidden", block, task.column)
            return [Put(cell, (epoch, block), work.columns_down)]
        if task.kind == DOWN and rank.index not in self.memory.failed:
            return [
                Put(self.memory.ranks[row[0]].cell("y", row[1], task.column), epoch, 1)
                for row in routing.rows[rank.index][block]
                if row is not None
            ]
        return []

    def deliver(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> None:
        if task.kind == DOWN and rank.index not in self.memory.failed:
            for row in routing.rows[rank.index][task.block]:
                if row is not None:
                    self.memory.ranks[row[0]].delivered[epoch, "y", row[1], task.column] += 1

    def expected(self, routing: Routing, epoch: int) -> Counter[tuple[object, ...]]:
        return Counter(
            (rank, epoch, "y", route, column)
            for rank in range(len(routing.tokens))
            for route in routed_to(routing, rank)
            for column in range(self.setting.columns_down)
        )


def _work(rank: Rank) -> Work:
    assert isinstance(rank.work, Work)
    return rank.work


def _down_first(groups: tuple[Group, ...], columns_up: int, columns_down: int) -> tuple[Group, ...]:
    """Down of each segment before its up: a fault."""
    swapped = [
        replace(group, kind={UP: DOWN, DOWN: UP}.get(group.kind, group.kind)) for group in groups
    ]
    columns = {UP: columns_up, DOWN: columns_down, SHARED_UP: 1, SHARED_DOWN: columns_down, SUM: 1}
    found, ticket = [], 0
    for group in swapped:
        found.append(replace(group, ticket=ticket))
        ticket += group.blocks * columns.get(group.kind, 0)
    return tuple(found)
