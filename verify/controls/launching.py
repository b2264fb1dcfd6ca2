"""Executes the cases of controls through the real engine, and keeps the records for judging.

Everything is executed once, in worker processes: the cases of one process together, those of two
ranks together, and each fault that kills or hangs its workers apart. What is judged later is what
`verify run` would have judged. It refuses nothing and decides nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from verify.cases import Case
from verify.controls import stored
from verify.controls.catalogue import module_of
from verify.controls.planting import Control
from verify.evidence import Plan, Record
from verify.plans import RunOptions, plan_of
from verify.running import collect as execute
from verify.targets import Found

Progress = Callable[[str], None]
AT_ONCE = 3  # starts side by side: those that wait for a dead rank need no core
TIMEOUT = 120.0  # seconds without progress, for cases that do not hang on purpose


@dataclass(frozen=True)
class Collected:
    """What was executed: the controls, each case's plan and records, and how long it took."""

    controls: tuple[Control, ...]
    plans: dict[str, Plan]
    records: dict[str, tuple[Record, ...]]
    seconds: float = 0.0


@dataclass(frozen=True)
class _Start:
    """Cases that share one start of the workers."""

    title: str
    ranks: int
    timeout: float
    cases: tuple[tuple[Found, Plan], ...]


def collect(
    controls: Sequence[Control],
    off: frozenset[str] = frozenset(),
    *,
    progress: Progress = lambda text: None,
) -> Collected:
    """Executes faults and twins, without the conditions in `off`."""
    clock = time.perf_counter()
    starts = _starts(controls, off)
    plans = {plan.case: plan for start in starts for _, plan in start.cases}
    records: dict[str, list[Record]] = {case: [] for case in plans}
    with (
        tempfile.TemporaryDirectory(prefix="verify-controls-") as folder,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def run(number: int) -> list[Record]:
            start = starts[number]
            place = Path(folder) / str(number)
            place.mkdir()

            def tell(text: str) -> None:
                progress(f"{start.title}: {text}")

            options = RunOptions(processes=1, timeout=start.timeout, golden=stored.FOLDER)
            return execute(start.cases, start.ranks, options, place, tell)

        for found in pool.map(run, range(len(starts))):
            for record in found:
                records[record.case].append(record)
    return Collected(
        tuple(controls),
        plans,
        {case: tuple(found) for case, found in records.items()},
        time.perf_counter() - clock,
    )


def _starts(controls: Sequence[Control], off: frozenset[str]) -> list[_Start]:
    """Those that take long come first: the shared ones, then the deaths. What needs a device has a
    start of its own, so that nothing else of this process uses it meanwhile."""
    together: dict[tuple[str, int], list[tuple[Found, Plan]]] = {}
    apart: list[_Start] = []
    for control in controls:
        for case, runs in ((control.fault, control.runs), (control.twin, {})):
            planned = _planned(control, case, runs, off)
            if not planned[1].claims:
                continue
            if control.apart and case is control.fault:
                apart.append(_Start(control.name, case.ranks, control.timeout, (planned,)))
            else:
                together.setdefault((control.needs, case.ranks), []).append(planned)
    shared = [
        _Start(
            f"{ranks} process{'es' if ranks > 1 else ''}{f' with {needs}' if needs else ''}",
            ranks,
            TIMEOUT,
            tuple(cases),
        )
        for (needs, ranks), cases in sorted(together.items())
    ]
    return [*shared, *apart]


def _planned(
    control: Control, case: Case, runs: Mapping[str, int], off: frozenset[str]
) -> tuple[Found, Plan]:
    claims = tuple(claim for claim in case.claims if claim not in off)
    found = Found(replace(case, claims=claims), f"{module_of(control)}:{case.name}")
    options = RunOptions(processes=1, claims=claims)  # given claims are all: none is added
    plan = plan_of(found, options, case.ranks)
    return found, replace(plan, runs={**plan.runs, **runs})
