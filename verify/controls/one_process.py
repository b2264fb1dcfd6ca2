"""Faults that show under one condition only, in one process: order, memory, threads, history, ...

Wherever it is possible the fault keeps still under the other conditions (`also`), so that only the
condition of its name can have caught it. What depends on chance or timing by nature (repeat,
contention) promises nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verify.controls.planting import COLUMNS, backwards, cases_of, drawn_order, fold, plant

DEADLINE = 0.004  # seconds


def in_drawn_order(x: Tensor) -> Tensor:
    """Sums in an order drawn from the operating system."""
    return fold(x, drawn_order(COLUMNS))


def in_order(x: Tensor) -> Tensor:
    """Sums in the one order."""
    return fold(x)


def plus_process_id(x: Tensor) -> Tensor:
    """Adds the process id."""
    return fold(x) + os.getpid()


def plus_one(x: Tensor) -> Tensor:
    """Adds one."""
    return fold(x) + 1


def _plus_leftover(pad: Tensor, x: Tensor) -> Tensor:
    filled = bool((pad == pad[0]).all())  # a quiet heap holds zeros or mixed leftovers
    return fold(x) + (int(pad[0]) if filled else 0)


def reads_unwritten(x: Tensor) -> Tensor:
    """Adds what an allocation held before anybody wrote to it, where that is one repeated byte."""
    return _plus_leftover(torch.empty(4096, dtype=torch.uint8), x)


def reads_written(x: Tensor) -> Tensor:
    """The same with an allocation that was written to."""
    return _plus_leftover(torch.zeros(4096, dtype=torch.uint8), x)


def sums_per_thread(x: Tensor) -> Tensor:
    """Adds up one partial sum per thread."""
    parts = [fold(part) for part in x.chunk(torch.get_num_threads(), dim=1)]
    return fold(torch.stack(parts, dim=1))


def sums_over_threads(x: Tensor) -> Tensor:
    """Splits the work in the same way, and adds in one order."""
    return fold(torch.cat(x.chunk(torch.get_num_threads(), dim=1), dim=1))


def remembers(*, leaks: bool) -> Callable[[Tensor], Tensor]:
    """Keeps its last input; with `leaks` another last input changes the result."""
    last: list[Tensor] = []

    def execute(x: Tensor) -> Tensor:
        """Adds a trace of the previous call when that had other inputs."""
        total = fold(x)
        if leaks and last and not torch.equal(last[0], x):
            total = total + last[0][0, 0]
        last[:] = [x.clone()]
        return total

    return execute


def _counts_until(enough: Callable[[float, int], bool]) -> int:
    """Steps that two Python threads make until each has enough, by start time and own steps."""
    counts = [0, 0]
    start = time.perf_counter()

    def work(slot: int) -> None:
        while not enough(start, counts[slot]):
            counts[slot] += 1

    workers = [threading.Thread(target=work, args=(slot,)) for slot in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts)


def refines_until_deadline(x: Tensor) -> Tensor:
    """Two threads work until a deadline; the result depends on how far they came."""
    steps = _counts_until(lambda start, count: time.perf_counter() - start > DEADLINE)
    return fold(x) + steps


def refines_in_steps(x: Tensor) -> Tensor:
    """Two threads make a number of steps, however long it takes."""
    return fold(x) + _counts_until(lambda start, count: count >= 5000)


def by_row_count(x: Tensor) -> Tensor:
    """Takes another order of addition for fewer than eight rows."""
    return fold(x) if x.shape[0] >= 8 else backwards(x)


def by_tile(x: Tensor, tile: int = COLUMNS) -> Tensor:
    """Adds up one partial sum per tile."""
    return fold(torch.stack([fold(part) for part in x.split(tile, dim=1)], dim=1))


def through_tiles(x: Tensor, tile: int = COLUMNS) -> Tensor:
    """Goes tile by tile, and adds in one order."""
    return fold(torch.cat(x.split(tile, dim=1), dim=1))


def per_multiprocessor(x: Tensor, num_sms: int = 1) -> Tensor:
    """Adds up one partial sum per worker, each of a strided part."""
    return fold(torch.stack([fold(x[:, own::num_sms]) for own in range(num_sms)], dim=1))


def by_multiprocessor(x: Tensor, num_sms: int = 1) -> Tensor:
    """Each worker has a part of the rows instead."""
    return torch.cat([fold(part) for part in x.chunk(num_sms, dim=0)])


OTHERS: Sequence[str] = ("repeat", "memory", "threads", "history")
BITS: Mapping[str, Any] = {"reason": "bits-differ", "alone": True}


def _others(claim: str) -> tuple[str, ...]:
    return tuple(other for other in OTHERS if other != claim)


CONTROLS = (
    # first of all, while nothing has dirtied the heap of its process
    plant(
        "condition/memory",
        reads_unwritten,
        reads_written,
        claim="memory",
        also=("repeat",),
        **BITS,
    ),
    plant("condition/repeat", in_drawn_order, in_order, claim="repeat", **BITS),
    plant(
        "condition/process", plus_process_id, plus_one, claim="process", also=("repeat",), **BITS
    ),
    plant(
        "condition/threads",
        sums_per_thread,
        sums_over_threads,
        claim="threads",
        also=_others("threads"),
        **BITS,
    ),
    plant(
        "condition/history",
        remembers(leaks=True),
        remembers(leaks=False),
        claim="history",
        also=_others("history"),
        **BITS,
    ),
    plant(
        "condition/contention", refines_until_deadline, refines_in_steps, claim="contention", **BITS
    ),
    plant(
        "condition/batch",
        by_row_count,
        in_order,
        claim="batch",
        also=OTHERS,
        batch={"x": 0, "out": 0},
        **BITS,
    ),
    plant(
        "condition/schedule",
        by_tile,
        through_tiles,
        claim="schedule",
        also=OTHERS,
        schedule=({"tile": 4}, {"tile": 8}),
        **BITS,
    ),
    plant(
        "condition/vary",
        per_multiprocessor,
        by_multiprocessor,
        claim="vary",
        also=OTHERS,
        vary={"num_sms": [2, 4]},
        **BITS,
    ),
)
CASES = cases_of(CONTROLS)
