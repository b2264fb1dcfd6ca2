"""What is changed between executions: one module per condition, each with what it measured.

`CONDITIONS` maps a claim to the function that executes it. Each function gets a `Session` whose
base execution is done, and the number of executions wanted; it emits records and returns nothing.
A condition that cannot be made here emits a `Trouble` with reason `unsupported`, never silence.
"""

from __future__ import annotations

from collections.abc import Callable

from verify.conditions import (
    arguments,
    batch,
    contention,
    goldens,
    graphs,
    history,
    memory,
    multiprocessors,
    parallel,
    references,
    repeat,
    streams,
    threads,
)
from verify.sessions import Session

Condition = Callable[[Session, int], None]

CONDITIONS: dict[str, Condition] = {
    "repeat": repeat.run,
    "memory": memory.run,
    "threads": threads.run,
    "contention": contention.run,
    "stream": streams.run,
    "sms": multiprocessors.run,
    "batch": batch.run,
    "schedule": arguments.run_schedule,
    "vary": arguments.run_vary,
    "rank": parallel.run_rank,
    "ep": parallel.run_ep,
    "reference": references.run_reference,
    "exact": references.run_exact,
    "golden": goldens.run,
    "graph": graphs.run,
    "history": history.run,
}
"""In the order of execution: `history` comes last, since it calls the case with other inputs, and
`graph` right before it, since a recording that fails leaves traces in torch."""
