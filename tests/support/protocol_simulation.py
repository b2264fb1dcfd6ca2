"""A discrete simulation of ranks that run launches, of forward and backward, with planted faults.

Agents are generators: each yields the condition of its next step (None: none) and a scheduler picks
one whose condition holds. Which waits there are is taken from mok/hopper/protocol.py and
backward_protocol.py; who takes tickets, and how ranks tell each other, is modelled here. Each
rank's host stream publishes and builds schedules, enters and launches; a CTA is a producer, a
consumer and movers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from protocol_backward import Backward
from protocol_memory import Memory, Rank
from protocol_passes import Forward, Pass
from protocol_scheduler import Agent, Running, Scheduler
from protocol_settings import PER_BLOCK, TICKET_ROWS, Routing, Rules, Setting

from mok.hopper.ticket_logs import DONE, DRAWN, STARTED, Record

SCHEDULED, ENTERED, PULLED, PUSHED = range(4)

_Drawn = tuple[int, Any]


class Simulation:
    """One run of all schedules and launches. `memory.violations` is filled if `keep_going`."""

    def __init__(
        self,
        routings: tuple[Routing, ...],
        setting: Setting,
        rules: Rules | None = None,
        *,
        keep_going: bool = False,
    ) -> None:
        self.routings, self.setting, self.rules = routings, setting, rules or Rules()
        self.count = len(routings[0].tokens)
        self.scheduler = Scheduler(setting)
        self.memory = Memory(setting, self.count, self.scheduler.gave_up, keep_going)
        self.ranks = self.memory.ranks
        given = (setting, self.rules, self.memory)
        self.passes: dict[bool, Pass] = {False: Forward(*given), True: Backward(*given)}
        self.logs: dict[int, list[Record]] = {}  # by launch; a step of the scheduler is a tick
        devices = [self.ranks] if setting.local else [[rank] for rank in self.ranks]
        for ranks in devices:
            self.scheduler.start(self._stream(ranks), ranks[0].index)

    def run(self, *, dead: int | None = None, dies_at: int = 0, hasty: float = 0.0) -> Simulation:
        """Run to the end, as Scheduler.run. Raises Broken at a violation too."""
        self.scheduler.run(dead=dead, dies_at=dies_at, hasty=hasty)
        return self

    def _failed(self, rank: Rank) -> bool:
        return rank.index in self.scheduler.gave_up

    # --- flags

    def _told(self, rank: Rank, kind: int, peer: int, epoch: int) -> bool:
        if peer == rank.index or self._failed(rank):
            return True
        seen = rank.flags[kind][peer]
        if kind != SCHEDULED and not self.rules.flags_are_epochs:
            return seen >= 1
        return seen >= epoch if self.rules.flags_compare_at_least else seen == epoch

    def _all_told(self, rank: Rank, kind: int, peers: Iterable[int], epoch: int) -> bool:
        return all(self._told(rank, kind, peer, epoch) for peer in peers)

    def _tell(self, rank: Rank, kind: int, epoch: int) -> Agent:
        for peer in self._rotated(rank):
            yield None
            if self._failed(rank) and self.rules.failed_ranks_stay_silent:
                return
            as_epoch = kind == SCHEDULED or self.rules.flags_are_epochs
            peer.flags[kind][rank.index] = epoch if as_epoch else 1

    def _rotated(self, rank: Rank) -> list[Rank]:
        return [self.ranks[(rank.index + step) % self.count] for step in range(1, self.count)]

    # --- the host's stream

    def _stream(self, ranks: list[Rank]) -> Agent:
        epoch = 0
        for schedule, routing in enumerate(self.routings, start=1):
            for step in (self._publish, self._build):
                yield from self._together([step(rank, schedule) for rank in ranks], ranks)
            for _ in range(routing.launches):
                epoch += 1
                entering = [self._enter(rank, routing, epoch) for rank in ranks]
                yield from self._together(entering, ranks)
                yield from self._launch(ranks, routing, epoch)

    def _together(self, agents: list[Agent], ranks: list[Rank]) -> Agent:
        started = [
            self.scheduler.start(a, rank.index) for a, rank in zip(agents, ranks, strict=True)
        ]
        yield lambda: all(one.done for one in started)

    def _publish(self, rank: Rank, schedule: int) -> Agent:
        yield None
        if self._failed(rank) and self.rules.failed_ranks_stay_silent:
            return
        cell = rank.cell("ids", schedule % self.rules.ids_buffers)
        self.memory.begin_write(rank, cell, f"ids of rank {rank.index}, schedule {schedule}")
        yield None
        cell.tag, cell.unread = schedule, self.count - 1
        rank.schedule = schedule
        yield from self._tell(rank, SCHEDULED, schedule)

    def _build(self, rank: Rank, schedule: int) -> Agent:
        peers = self._rotated(rank)
        yield partial(self._all_told, rank, SCHEDULED, [peer.index for peer in peers], schedule)
        cells = [peer.cell("ids", schedule % self.rules.ids_buffers) for peer in peers]
        for end in (False, True):
            for peer, cell in zip(peers, cells, strict=True):
                where = f"rank {rank.index} reads ids of {peer.index}"
                self.memory.look(rank, cell, schedule, where, end=end)
            yield None

    def _enter(self, rank: Rank, routing: Routing, epoch: int) -> Agent:
        yield None
        if self.rules.counters_zeroed_by_enter:
            rank.counters.clear()
        launch = self.passes[routing.backward]
        rank.epoch = epoch
        rank.work = launch.make_work(rank, routing)
        remote = sum(
            row is not None and row[0] == rank.index
            for peer in self._rotated(rank)
            for block in routing.rows[peer.index]
            for row in block
        )
        if routing.tokens[rank.index] and not self._failed(rank):
            staged = rank.cell("staged")
            self.memory.begin_write(rank, staged, f"x of rank {rank.index} for launch {epoch}")
            yield None
            staged.tag, staged.unread = epoch, remote
        yield from self._tell(rank, ENTERED, epoch)
        if rank.work.dispatches == 0:
            yield from self._tell(rank, PULLED, epoch)
        if rank.work.results == 0:
            yield from self._tell(rank, PUSHED, epoch)

    def _launch(self, ranks: list[Rank], routing: Routing, epoch: int) -> Agent:
        yield None
        if not self.rules.flags_are_epochs:
            for rank in ranks:
                for kind in (ENTERED, PULLED, PUSHED):
                    rank.flags[kind] = [0] * self.count
        if not self.rules.counters_zeroed_by_enter:
            for rank in ranks:
                self.scheduler.start(self._zero(rank), rank.index)
        waiting = deque(range(self.setting.grid * len(ranks)))
        live: list[list[Running]] = []
        while waiting or live:
            live = [warps for warps in live if not all(warp.done for warp in warps)]
            while waiting and len(live) < self.setting.resident:
                number = waiting.popleft()
                rank, cta = ranks[number % len(ranks)], number // len(ranks)
                live.append(self._cta(rank, cta, routing, epoch))
            yield partial(_one_left, list(live))
            live = [warps for warps in live if not all(warp.done for warp in warps)]
        for rank in ranks:
            rank.ended = epoch
            if not self.rules.pushed_told_by_last_tile:
                yield from self._tell(rank, PUSHED, epoch)
            for token in range(routing.tokens[rank.index]):
                if rank.summed[epoch, token] != 1:
                    self.memory.violated(rank, "not once", f"sum of token {token}, launch {epoch}")

    def _zero(self, rank: Rank) -> Agent:
        yield None
        rank.counters.clear()

    # --- a CTA

    def _cta(self, rank: Rank, cta: int, routing: Routing, epoch: int) -> list[Running]:
        pipe: deque[_Drawn] = deque()
        agents = [
            self._producer(rank, cta, pipe, routing, epoch),
            self._consumer(rank, cta, pipe, routing, epoch),
        ]
        agents += [self._mover(rank, cta, routing, epoch) for _ in range(self.setting.movers)]
        return [self.scheduler.start(agent, rank.index) for agent in agents]

    def _draw(self, rank: Rank, queue: str) -> int:
        rank.counters[queue, 0] += 1
        return rank.counters[queue, 0] - 1

    def _satisfied(self, rank: Rank, launch: Pass, task: Any, epoch: int) -> bool:
        if self._failed(rank):
            return True
        rules, counters = self.rules, rank.counters
        for need in launch.needs(rank, task):
            if counters[need.counter, need.index] < need.at_least:
                return False
        kind = {launch.sum: PUSHED, launch.end: PULLED}.get(task.kind)
        if (kind == PUSHED and rules.sum_waits_for_pushed) or (
            kind == PULLED and rules.exit_waits_for_pulled
        ):
            return self._all_told(rank, kind, range(self.count), epoch)
        return True

    def _producer(
        self, rank: Rank, cta: int, pipe: deque[_Drawn], routing: Routing, epoch: int
    ) -> Agent:
        launch = self.passes[routing.backward]
        yield None
        number = self._next(rank, cta)
        while True:
            task = launch.find_task(rank, number)
            self._log(launch, rank, cta, epoch, task, number, DRAWN)
            yield partial(self._satisfied, rank, launch, task, epoch)
            self._log(launch, rank, cta, epoch, task, number, STARTED)
            yield None
            mine, number = number, self._next(rank, number + self.setting.grid)
            yield lambda: len(pipe) < self.setting.depth
            pipe.append((mine, task))
            looks, where = launch.reads(rank, task, routing, epoch), launch.task_name
            self.memory.read(rank, looks, where(rank, task, epoch), end=False)
            if task.kind == launch.end:
                return

    def _next(self, rank: Rank, static: int) -> int:
        return self._draw(rank, "compute") if self.rules.tickets else static

    def _consumer(
        self, rank: Rank, cta: int, pipe: deque[_Drawn], routing: Routing, epoch: int
    ) -> Agent:
        launch = self.passes[routing.backward]
        held: _Drawn | None = None
        while True:
            yield lambda: bool(pipe)
            number, task = pipe.popleft()
            if task.kind == launch.end:
                if held is not None:
                    yield from self._release(rank, cta, launch, held, epoch)
                return
            where = launch.task_name(rank, task, epoch)
            puts = launch.writes(rank, task, routing, epoch)
            self.memory.write(rank, puts, where, end=False)
            yield None
            if held is not None:
                yield from self._release(rank, cta, launch, held, epoch)
            yield None
            looks = launch.reads(rank, task, routing, epoch)
            self.memory.read(rank, looks, where, end=True)
            # Again, since a rank that has failed by now writes to nobody else.
            puts = launch.writes(rank, task, routing, epoch)
            self.memory.write(rank, puts, where, end=True)
            launch.deliver(rank, task, routing, epoch)
            if task.kind == launch.sum:
                rank.summed[epoch, task.block] += 1
            held = (number, task)
            yield None
            if not pipe and self.rules.release_at_once:
                yield from self._release(rank, cta, launch, held, epoch)
                held = None

    def _release(self, rank: Rank, cta: int, launch: Pass, drawn: _Drawn, epoch: int) -> Agent:
        assert rank.work is not None
        number, task = drawn
        self._log(launch, rank, cta, epoch, task, number, DONE)
        for counter in launch.counted(task):
            yield None
            rank.counters[counter] += 1
            last = counter == ("results", 0) and rank.counters[counter] == rank.work.results
            if last and self.rules.pushed_told_by_last_tile:
                yield from self._tell(rank, PUSHED, epoch)

    def _log(
        self, launch: Pass, rank: Rank, cta: int, epoch: int, task: Any, number: int, event: int
    ) -> None:
        if task.kind != launch.end:
            record = (rank.index << 24 | cta, task.kind << 28 | number, event << 24 | task.column)
            self.logs.setdefault(epoch, []).append((*record, self.scheduler.steps))

    def _mover(self, rank: Rank, cta: int, routing: Routing, epoch: int) -> Agent:
        launch, work = self.passes[routing.backward], rank.work
        assert work is not None
        while True:
            yield None
            number = self._draw(rank, "dispatch")
            block, part = divmod(number, PER_BLOCK)
            if block >= work.blocks:
                return
            task = launch.dispatch(block)
            rows = range(part * TICKET_ROWS, (part + 1) * TICKET_ROWS)
            origins = [routing.rows[rank.index][block][row] for row in rows]
            remote = [row[0] for row in origins if row is not None and row[0] != rank.index]
            self._log(launch, rank, cta, epoch, task, number, DRAWN)
            yield partial(self._satisfied, rank, launch, task, epoch)
            if self.rules.dispatch_waits_for_entered:
                yield partial(self._all_told, rank, ENTERED, set(remote), epoch)
            self._log(launch, rank, cta, epoch, task, number, STARTED)
            where = launch.task_name(rank, task, epoch)
            cells = launch.ring_cells(rank, block, rows)
            for cell, _ in cells:
                self.memory.begin_write(rank, cell, where)
            for end in (False, True):
                for source in remote:
                    staged = self.ranks[source].cell("staged")
                    self.memory.look(rank, staged, epoch, where, end=end)
                yield None
            for row, (cell, readers) in zip(rows, cells, strict=True):
                cell.tag, cell.unread = (epoch, block, row), readers
            self._log(launch, rank, cta, epoch, task, number, DONE)
            yield None
            rank.counters["ready", block] += 1
            rank.counters["dispatched", 0] += 1
            if rank.counters["dispatched", 0] == work.dispatches:
                yield from self._tell(rank, PULLED, epoch)

    # --- at the end

    def check_end(self) -> None:
        """Every launch ended, all results are there once in each, and flags equal epochs."""
        epoch = 0
        expected: Counter[tuple[int, int, int]] = Counter()
        delivered: Counter[tuple[object, ...]] = Counter()
        for routing in self.routings:
            for _ in range(routing.launches):
                epoch += 1
                for index, tokens in enumerate(routing.tokens):
                    expected.update((index, epoch, token) for token in range(tokens))
                delivered += self.passes[routing.backward].expected(routing, epoch)
        seen = {(rank.index, *key): n for rank in self.ranks for key, n in rank.summed.items()}
        assert seen == dict(expected)
        given = {(rank.index, *key): n for rank in self.ranks for key, n in rank.delivered.items()}
        assert given == dict(delivered)
        for rank in self.ranks:
            assert rank.ended == epoch
            for kind, value in ((SCHEDULED, len(self.routings)), *((k, epoch) for k in (1, 2, 3))):
                peers = [f for p, f in enumerate(rank.flags[kind]) if p != rank.index]
                assert peers == [value] * (self.count - 1)


def _one_left(ctas: list[list[Running]]) -> bool:
    return any(all(warp.done for warp in warps) for warps in ctas)
