"""Runs cases in order, in as few starts of the workers as a budget allows.

The budget is looked at between starts. A start that has begun is finished, so a budget is passed by
about one case; the first start has one case and shows what a case costs. Without a budget all cases
of the same number of ranks share one start. It refuses to cut a case short: half of its evidence
would be none.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verify.evidence import Execution, Plan, Record
from verify.plans import RunOptions
from verify.targets import Found

MOST_AT_ONCE = 8  # cases of one start, within a budget
Pair = tuple[Found, Plan]


@dataclass(frozen=True)
class Budget:
    """Seconds of the gate and executions of its cases; None is no limit. `clock` gives the seconds
    since the gate began."""

    seconds: float | None
    executions: int | None
    clock: Callable[[], float]

    def spent(self, executions: int) -> str | None:
        """What is used up, in words, or None."""
        used = self.clock()
        if self.seconds is not None and used >= self.seconds:
            return f"{used:.1f} s of at most {self.seconds:g} s were used"
        if self.executions is not None and executions >= self.executions:
            return f"{executions} of at most {self.executions} executions were made"
        return None


@dataclass(frozen=True)
class Paced:
    """All records, the cases that did not run, and what was used up if there are any."""

    records: list[Record]
    left: list[Plan]
    spent: str | None
    executions: int


def ordered(pairs: Sequence[Pair], affected: frozenset[int]) -> list[Pair]:
    """Affected cases first. Equal numbers of ranks stand together, across that border too."""
    first = [pair for position, pair in enumerate(pairs) if position in affected]
    rest = [pair for position, pair in enumerate(pairs) if position not in affected]
    return [
        *sorted(first, key=lambda pair: pair[1].ranks),
        *sorted(rest, key=lambda pair: -pair[1].ranks),
    ]


def paced(
    pairs: Sequence[Pair],
    options: RunOptions,
    budget: Budget,
    execute: Callable[..., list[Record]],
    progress: Callable[[str], None] = lambda text: None,
) -> Paced:
    """Runs as many of the cases, in the order given, as the budget allows.

    execute: as `verify.running.collect`, all records of some cases for one number of ranks.
    """
    queue, records = list(pairs), list[Record]()
    executions, began = 0, budget.clock()
    folder = Path(tempfile.mkdtemp(prefix="verify-gate-"))
    try:
        while queue:
            spent = budget.spent(executions)
            if spent is not None:
                return Paced(records, [plan for _, plan in queue], spent, executions)
            done = len(pairs) - len(queue)
            size = _size(budget, done, budget.clock() - began, executions)
            ranks = queue[0][1].ranks
            batch = [pair for pair in queue[:size] if pair[1].ranks == ranks]
            batch = batch[: _leading(queue, ranks)]
            del queue[: len(batch)]
            place = folder / str(done)
            place.mkdir()
            progress(f"cases {done + 1} to {done + len(batch)} of {len(pairs)}")
            made = execute(batch, ranks, options, place, progress)
            shutil.rmtree(place, ignore_errors=True)
            records += made
            executions += sum(isinstance(record, Execution) for record in made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Paced(records, [], None, executions)


def _leading(queue: Sequence[Pair], ranks: int) -> int:
    """How many cases at the front of the queue are for so many ranks."""
    for position, (_, plan) in enumerate(queue):
        if plan.ranks != ranks:
            return position
    return len(queue)


def _size(budget: Budget, done: int, seconds: float, executions: int) -> int:
    """How many cases the next start may have, by what those before cost on average."""
    if budget.seconds is None and budget.executions is None:
        return 2**31
    if not done:
        return 1
    most = float(MOST_AT_ONCE)
    if budget.seconds is not None and seconds > 0:
        most = min(most, (budget.seconds - budget.clock()) * done / seconds)
    if budget.executions is not None and executions:
        most = min(most, (budget.executions - executions) * done / executions)
    return max(1, int(most))
