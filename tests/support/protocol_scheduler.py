"""Who goes next: agents as generators, and policies that pick one whose condition holds.

An agent yields the condition of its next step (None: none). It belongs to a rank; ranks can stop
for ever, and can give up waiting.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol_settings import Setting

Condition = Callable[[], bool] | None
Agent = Iterator[Condition]


class Broken(AssertionError):
    """A violation, or a deadlock: nobody can go on."""


@dataclass
class Running:
    """An agent that was started. condition: of its next step."""

    agent: Agent
    rank: int
    condition: Condition = None
    done: bool = False

    @property
    def can_go(self) -> bool:
        """Its condition holds now."""
        return self.condition is None or self.condition()


class Scheduler:
    """Agents that run, one step at a time, in the order that the setting's policy picks."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = random.Random(setting.seed)
        self.running: list[Running] = []
        self.steps = 0
        self.gave_up: set[int] = set()  # ranks

    def start(self, agent: Agent, rank: int) -> Running:
        """One more agent."""
        self.running.append(Running(agent, rank))
        return self.running[-1]

    def run(self, *, dead: int | None = None, dies_at: int = 0, hasty: float = 0.0) -> None:
        """Run to the end. Raises Broken if nobody can go on.

        dead: this rank stops for ever at step `dies_at`, and waits then end by time. hasty: the
        chance per step that some rank that waits gives up, though it need not.
        """
        by_time = dead is not None or hasty > 0
        while self.running:
            stopped = dead if self.steps >= dies_at else None
            if hasty and self.random.random() < hasty:
                self._give_up(stopped)
            picked = self._pick(stopped)
            if picked is not None:
                self._step(picked)
            elif all(one.rank == stopped for one in self.running):
                return
            elif not (by_time and self._give_up(stopped)):
                raise Broken(f"deadlock after {self.steps} steps: {len(self.running)} agents wait")

    def _step(self, one: Running) -> None:
        self.steps += 1
        try:
            one.condition = next(one.agent)
        except StopIteration:
            one.done = True
            self.running.remove(one)

    def _pick(self, stopped: int | None) -> Running | None:
        running, policy, chosen = self.running, self.setting.policy, self.setting.chosen
        last = policy == "starve"  # else the chosen rank comes first
        if policy in ("random", "starve", "favour"):
            for _ in range(4):  # a few guesses are quicker than to look at all
                one = running[self.random.randrange(len(running))]
                if policy != "random" and (one.rank == chosen) == last:
                    continue
                if one.rank != stopped and one.can_go:
                    return one
            order = list(running)
            self.random.shuffle(order)
            if policy != "random":
                order.sort(key=lambda one: (one.rank == chosen) == last)
        else:
            order = running[::-1] if policy == "newest" else running
        return next((one for one in order if one.rank != stopped and one.can_go), None)

    def _give_up(self, stopped: int | None) -> bool:
        barred = self.gave_up | ({stopped} if stopped is not None else set())
        waiting = [one.rank for one in self.running if one.rank not in barred and not one.can_go]
        if waiting:
            self.gave_up.add(self.random.choice(waiting))
        return bool(waiting)
