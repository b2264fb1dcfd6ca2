"""The backward launch in the simulation of the protocol: which memory its tasks read and write.

Rows of d_out and of x are one cell for each row here. What a hidden tile leaves for its rows
(d_gate, d_up, weighted, partial sums of the router's gradient) is one cell for each strip of 128
columns; g and u, where they are computed again, come into these before, and the one tile that reads
them writes over them. Every tile of an expert's weights reads all rows and strips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from protocol_memory import Cell, Look, Put, Rank
from protocol_passes import Pass, routed_to
from protocol_settings import BLOCK_ROWS, PER_BLOCK, BackwardSetting, Routing

from mok.hopper import backward_protocol
from mok.hopper.backward_protocol import (
    BACK_AGAIN,
    BACK_END,
    BACK_HIDDEN,
    BACK_INPUT,
    BACK_SHARED_AGAIN,
    BACK_SHARED_HIDDEN,
    BACK_SHARED_INPUT,
    BACK_SHARED_WEIGHTS,
    BACK_SUM,
    BACK_WEIGHTS,
    DISPATCH,
    PART_FIRST,
    PART_LAST,
    PART_NUMBER,
    Columns,
    Group,
    Need,
    Task,
    Work,
    least_ring,
    list_segments,
    order_groups,
)
from mok.hopper.schedule_model import cut_segments


class Backward(Pass):
    """The launch of csrc/moe/backward.cu."""

    sum, end, kinds = BACK_SUM, BACK_END, backward_protocol.KINDS

    def make_work(self, rank: Rank, routing: Routing) -> Work:
        backward = self._backward()
        rows, tokens = routing.expert_rows[rank.index], routing.tokens[rank.index]
        runs = cut_segments(
            [-(-count // BLOCK_ROWS) for count in rows], backward.segments, backward.uncut
        )
        segments = list_segments(rows, runs, BLOCK_ROWS)
        columns = backward.columns
        if not self.setting.shared:
            columns = replace(columns, shared_again=0, shared_hidden=0, shared_weights=0)
        groups = order_groups(
            segments,
            columns,
            saved_blocks=backward.saved_blocks,
            shared_blocks=-(-tokens // BLOCK_ROWS) if self.setting.shared else 0,
            sums=tokens,
            empty=[expert for expert, count in enumerate(rows) if count == 0],
        )
        if self.rules.weights_first:
            groups = _weights_first(groups)
        ring = max(1, least_ring([one.blocks for one in segments]) + backward.extra_ring)
        return Work(segments, groups, columns, ring, backward.saved_blocks, PER_BLOCK)

    def find_task(self, rank: Rank, number: int) -> Task:
        return backward_protocol.find_task(_work(rank), number)

    def dispatch(self, block: int) -> Task:
        return Task(DISPATCH, block, 0)

    def needs(self, rank: Rank, task: Task) -> Iterable[Need]:
        rules, work = self.rules, _work(rank)
        for need in backward_protocol.needs(work, task):
            if need.counter == "used" and not rules.x_waits_for_ring:
                continue
            if need.counter == "used" and not rules.used_counts_weights:
                inputs = work.segments[need.index].blocks * work.columns.input
                yield replace(need, at_least=inputs)
                continue
            weights = task.kind in (BACK_WEIGHTS, BACK_SHARED_WEIGHTS)
            if weights and "hidden" in need.counter and not rules.weights_wait_for_hidden:
                continue
            if need.counter == "cut" and not rules.parts_come_in_turn:
                continue
            if "again" in need.counter and not rules.hidden_waits_for_again:
                continue
            if task.kind in (BACK_INPUT, BACK_SHARED_INPUT) and not rules.input_waits_for_hidden:
                continue
            yield need

    def counted(self, task: Task) -> Iterable[tuple[str, int]]:
        for counter in backward_protocol.counted(task):
            weights = task.kind == BACK_WEIGHTS and counter[0] == "used"
            if not weights or self.rules.used_counts_weights:
                yield counter

    def ring_cells(self, rank: Rank, block: int, rows: Sequence[int]) -> list[tuple[Cell, int]]:
        work = _work(rank)
        readers = work.columns.hidden + work.columns.weights
        if block >= work.saved_blocks:
            readers += work.columns.again
        return [(rank.cell("rows", block % work.ring, row), readers) for row in rows]

    def reads(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> list[Look]:
        work, block = _work(rank), task.block
        columns = work.columns
        if task.kind == BACK_AGAIN:
            return self._rows(rank, block, epoch)
        if task.kind == BACK_HIDDEN:
            found = self._rows(rank, block, epoch)
            if block >= work.saved_blocks:
                strips = self._strips(rank, task)
                found += [Look(cell, (epoch, block, "g, u"), " g, u") for cell in strips]
            return found
        if task.kind == BACK_INPUT:
            return self._products(rank, block, epoch)
        if task.kind == BACK_WEIGHTS:
            return self._weights(rank, task, epoch)
        if task.kind == BACK_SHARED_HIDDEN and columns.shared_again:
            strips = self._strips(rank, task)
            return [Look(cell, (epoch, block, "g, u"), " g, u") for cell in strips]
        if task.kind in (BACK_SHARED_INPUT, BACK_SHARED_WEIGHTS):
            assert task.group is not None
            every = range(task.group.blocks) if task.kind == BACK_SHARED_WEIGHTS else (block,)
            return [
                Look(rank.cell("shared products", one, strip), (epoch, one))
                for one in every
                for strip in range(_shared_strips(columns))
            ]
        if task.kind == BACK_SUM:
            return self._sum(rank, task, routing, epoch)
        return []

    def writes(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> list[Put]:
        work, block, column = _work(rank), task.block, task.column
        columns = work.columns
        if task.kind in (BACK_AGAIN, BACK_SHARED_AGAIN):
            return [Put(cell, (epoch, block, "g, u"), 1) for cell in self._strips(rank, task)]
        if task.kind == BACK_HIDDEN:
            readers, over = columns.input + columns.weights, block >= work.saved_blocks
            return [Put(cell, (epoch, block), readers, over) for cell in self._strips(rank, task)]
        if task.kind == BACK_SHARED_HIDDEN:
            readers, over = columns.input + columns.shared_weights, columns.shared_again > 0
            return [Put(cell, (epoch, block), readers, over) for cell in self._strips(rank, task)]
        if task.kind == BACK_INPUT and rank.index not in self.memory.failed:
            owners = [(self.memory.ranks[o], route) for o, route in _rows_of(rank, task, routing)]
            found = [Put(owner.cell("y", route, column), epoch, 1) for owner, route in owners]
            if column == 0:
                found += [Put(owner.cell("d_router", route), epoch, 1) for owner, route in owners]
            return found
        if task.kind == BACK_WEIGHTS:
            assert task.group is not None
            part = task.group.part
            if part & PART_LAST:
                return []
            cell = rank.cell("scratch", column)
            in_place = not part & PART_FIRST
            return [Put(cell, (epoch, part & PART_NUMBER), 1, in_place)]
        if task.kind == BACK_SHARED_INPUT:
            tokens = routing.tokens[rank.index] - block * BLOCK_ROWS
            return [Put(rank.cell("shared d_x", block, column), epoch, min(tokens, BLOCK_ROWS))]
        return []

    def deliver(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> None:
        if task.kind == BACK_INPUT and rank.index not in self.memory.failed:
            for owner, route in _rows_of(rank, task, routing):
                self.memory.ranks[owner].delivered[epoch, "d_x", route, task.column] += 1
                if task.column == 0:
                    self.memory.ranks[owner].delivered[epoch, "d_router", route] += 1
        if task.kind == BACK_WEIGHTS:
            assert task.group is not None
            if task.group.part & PART_LAST:
                rank.delivered[epoch, "weights", task.group.expert, task.column] += 1
        if task.kind == BACK_SHARED_WEIGHTS:
            rank.delivered[epoch, "shared weights", task.column] += 1

    def expected(self, routing: Routing, epoch: int) -> Counter[tuple[object, ...]]:
        found: Counter[tuple[object, ...]] = Counter()
        columns = self._backward().columns
        shared = columns.shared_weights if self.setting.shared else 0
        for rank, rows in enumerate(routing.expert_rows):
            for route in routed_to(routing, rank):
                found[rank, epoch, "d_router", route] = 1
                found.update((rank, epoch, "d_x", route, c) for c in range(columns.input))
            for expert in range(len(rows)):
                tiles = range(columns.weights)
                found.update((rank, epoch, "weights", expert, tile) for tile in tiles)
            found.update((rank, epoch, "shared weights", tile) for tile in range(shared))
        return found

    def _backward(self) -> BackwardSetting:
        assert self.setting.backward is not None
        return self.setting.backward

    def _rows(self, rank: Rank, block: int, epoch: int) -> list[Look]:
        place = block % _work(rank).ring
        return [
            Look(rank.cell("rows", place, row), (epoch, block, row), " rows")
            for row in range(BLOCK_ROWS)
        ]

    def _products(self, rank: Rank, block: int, epoch: int) -> list[Look]:
        work = _work(rank)
        cells = [rank.cell("products", block % work.ring, c) for c in range(work.columns.again)]
        return [Look(cell, (epoch, block)) for cell in cells]

    def _strips(self, rank: Rank, task: Task) -> list[Cell]:
        """What a tile of g and u, or of what comes after them, has of its block."""
        work = _work(rank)
        shared = task.kind in (BACK_SHARED_AGAIN, BACK_SHARED_HIDDEN)
        every = _shared_strips(work.columns) if shared else work.columns.again
        strips = range(2 * task.column, min(2 * task.column + 2, every))
        if task.kind in (BACK_AGAIN, BACK_SHARED_AGAIN):
            strips = range(task.column, task.column + 1)
        if shared:
            return [rank.cell("shared products", task.block, strip) for strip in strips]
        return [rank.cell("products", task.block % work.ring, strip) for strip in strips]

    def _weights(self, rank: Rank, task: Task, epoch: int) -> list[Look]:
        group = task.group
        assert group is not None
        found = []
        for block in range(group.block, group.block + group.blocks):
            found += self._rows(rank, block, epoch) + self._products(rank, block, epoch)
        if not group.part & PART_FIRST:
            before = (epoch, (group.part & PART_NUMBER) - 1)
            found.append(Look(rank.cell("scratch", task.column), before, " sums"))
        return found

    def _sum(self, rank: Rank, task: Task, routing: Routing, epoch: int) -> list[Look]:
        columns, slots = _work(rank).columns, self.setting.slots
        routed = routed_to(routing, rank.index)
        found = []
        for route in range(task.block * slots, (task.block + 1) * slots):
            if route in routed:
                cells = [rank.cell("y", route, column) for column in range(columns.input)]
                cells.append(rank.cell("d_router", route))
                found += [Look(cell, epoch, f" route {route}") for cell in cells]
        if self.setting.shared:
            block = task.block // BLOCK_ROWS
            shared = [rank.cell("shared d_x", block, column) for column in range(columns.input)]
            found += [Look(cell, epoch, " shared") for cell in shared]
        return found


def _work(rank: Rank) -> Work:
    assert isinstance(rank.work, Work)
    return rank.work


def _shared_strips(columns: Columns) -> int:
    return columns.shared_again or 2 * columns.shared_hidden


def _rows_of(rank: Rank, task: Task, routing: Routing) -> list[tuple[int, int]]:
    """Owner and route of each row of a task's block."""
    return [row for row in routing.rows[rank.index][task.block] if row is not None]


def _weights_first(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """WEIGHTS of each segment before its HIDDEN: a fault."""
    lengths = {group: after.ticket - group.ticket for group, after in pairwise(groups)}
    early = {BACK_WEIGHTS: 0, BACK_HIDDEN: 1, BACK_INPUT: 2}
    routed = sorted(
        (one for one in groups if one.kind in early), key=lambda one: (one.segment, early[one.kind])
    )
    order = iter(routed)
    found, ticket = [], 0
    for group in groups:
        moved = next(order) if group.kind in early else group
        found.append(replace(moved, ticket=ticket))
        ticket += lengths.get(moved, 0)
    return tuple(found)
