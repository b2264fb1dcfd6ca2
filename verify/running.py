"""`verify run`: plan, start the ranks, collect evidence, decide, and put the result together.

Every case runs in worker processes, so that a crash of the user's code is evidence and not the end
of the tool. Cases made for the same number of ranks share one start of the workers; the claim
`process` gets fresh ones for every case, several at once where that is safe (`footprints`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verify import results
from verify.decision import decide
from verify.environment import environment
from verify.errors import CaseError
from verify.evidence import Execution, Finished, Plan, Record, Trouble
from verify.footprints import at_once
from verify.plans import RunOptions, plans_of, unsupported, with_options
from verify.ranks import Outcome, run_groups, run_workers
from verify.targets import Found, find
from verify.verdicts import CaseVerdict
from verify.workers import WorkerSpec

__all__ = ["RunOptions", "run", "collect"]

Progress = Callable[[str], None]


def run(
    targets: Sequence[str], options: RunOptions, *, progress: Progress = lambda text: None
) -> dict[str, Any]:
    """Runs the cases of the targets and returns the result document.

    Raises CaseError for targets that cannot be found or planned. Under torchrun it joins the group
    that is there; every rank then returns the same document.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    asked = {one.target: one for one in find_all(targets)}
    found = [with_options(one, options) for one in asked.values()]
    if not found:
        raise CaseError("no cases to run")
    refuse_unreadable(found, options)
    if joined_by_torchrun():
        from verify.joining import run_joined

        plans, verdicts, executions = run_joined(found, options, progress)
    else:
        plans, verdicts, executions = run_here(found, options, progress)
    return results.build(
        plans=plans,
        verdicts=verdicts,
        executions=executions,
        environment=environment(),
        options=shown(options),
        command=["verify", *sys.argv[1:]],
        ranks=max(plan.ranks for plan in plans),
        started=started,
        seconds=time.perf_counter() - clock,
    )


def refuse_unreadable(found: Sequence[Found], options: RunOptions) -> None:
    """Reads every golden that the cases promise, before anything runs: a file that cannot be read
    is an error of its own (InputFileError), not a case without a golden; and the golden of another
    file's case is none of this one (CaseError)."""
    wanted = [one for one in found if "golden" in one.case.claims and one.case.golden]
    if wanted:
        from verify.goldens import packing, status, store

        folder = options.golden_folder
        with store.reading(folder):
            index = store.read(folder)
            pairs = [(one, e) for one in wanted for e in index.of(one.case.name, one.case.golden)]
            for _, entry in pairs:
                packing.load(folder, entry)
        for one, entry in pairs:  # not inside: it may import, and so run, what writes goldens
            problem = status.elsewhere(entry, one, folder)
            if problem:
                raise CaseError(f"{one.target}: the golden of {entry.case!r} {problem}")


def find_all(targets: Sequence[str]) -> list[Found]:
    """The cases of all targets, found from one working directory, whatever a file does to it."""
    here = os.getcwd()
    found: list[Found] = []
    try:
        for target in targets:
            os.chdir(here)
            found += find(target)
    finally:
        os.chdir(here)
    return found


def leave() -> None:
    """Leaves a launcher's group, together with all its ranks; call it after writing results."""
    if joined_by_torchrun():
        from verify.joining import leave as leave_group

        leave_group()


def run_here(
    found: Sequence[Found], options: RunOptions, progress: Progress
) -> tuple[list[Plan], list[CaseVerdict], list[Execution]]:
    """Starts the ranks as processes of this machine."""
    plans = plans_of(found, options)
    folder = Path(tempfile.mkdtemp(prefix="verify-"))
    try:
        pairs, records = _supported(list(zip(found, plans, strict=True)))
        for ranks in sorted({plan.ranks for _, plan in pairs}):
            chosen = [(one, plan) for one, plan in pairs if plan.ranks == ranks]
            place = folder / f"ranks{ranks}"
            place.mkdir()
            records += collect(chosen, ranks, options, place, progress)
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return judge(plans, records)


def _supported(
    cases: Sequence[tuple[Found, Plan]],
) -> tuple[list[tuple[Found, Plan]], list[Record]]:
    """The cases whose own wishes for a device and for ranks can be met here, and a record of each
    other one; what the options wish for was an error before."""
    pairs: list[tuple[Found, Plan]] = []
    lacking: list[Record] = []
    for one, plan in cases:
        why = unsupported(one.case, plan.ranks)
        if why is None:
            pairs.append((one, plan))
        else:
            lacking.append(Trouble(plan.case, "unsupported", why))
    return pairs, lacking


def judge(
    plans: Sequence[Plan], records: Sequence[Record]
) -> tuple[list[Plan], list[CaseVerdict], list[Execution]]:
    """The verdict of every case."""
    verdicts = [decide(plan, records) for plan in plans]
    return list(plans), verdicts, [r for r in records if isinstance(r, Execution)]


def collect(
    cases: Sequence[tuple[Found, Plan]],
    ranks: int,
    options: RunOptions,
    folder: Path,
    progress: Progress,
) -> list[Record]:
    """Runs the main workers, then fresh ones for every case that promises `process`."""
    outcome = run_workers(_specs(cases, ranks, 0, options, folder), options.timeout, progress)
    records = outcome.records + _troubles(cases, ranks, 0, outcome, options)
    if outcome.deaths or outcome.timed_out:
        return records
    for position, (found, plan) in enumerate(cases):
        if "process" in plan.claims:
            ended = [r for r in records if isinstance(r, Finished) and r.case == plan.case]
            ended = [one for one in ended if not one.process]
            beside = at_once(ended, ranks, timeout=options.timeout)
            records += _fresh(found, plan, ranks, position, beside, options, folder, progress)
    return records


def _fresh(
    found: Found,
    plan: Plan,
    ranks: int,
    position: int,
    beside: int,
    options: RunOptions,
    folder: Path,
    progress: Progress,
) -> list[Record]:
    """The records of the fresh processes of one case, at most `beside` at a time, in the order of
    the processes, whichever ended first."""
    own, count = [(found, plan)], plan.runs["process"]
    processes = range(1, count + 1)
    outcomes = run_groups(
        [_specs(own, ranks, process, options, folder, position) for process in processes],
        options.timeout,
        progress,
        beside,
        lambda place: progress(f"{plan.case}: fresh process {place + 1} of {count}"),
    )
    records: list[Record] = []
    for process, fresh in zip(processes, outcomes, strict=True):
        records += fresh.records + _troubles(own, ranks, process, fresh, options)
    return records


def _specs(
    cases: Sequence[tuple[Found, Plan]],
    ranks: int,
    process: int,
    options: RunOptions,
    folder: Path,
    first_index: int = 0,
) -> list[WorkerSpec]:
    degrees = sorted({degree for found, _ in cases for degree in found.case.ep})
    return [
        WorkerSpec(
            plans=[asdict(plan) for _, plan in cases],
            rank=rank,
            world=ranks,
            process=process,
            folder=str(folder),
            threads=threads_per_rank(ranks),
            timeout=options.timeout,
            degrees=degrees,
            first_index=first_index,
            golden=str(options.golden_folder),
            keep_goldens=options.keep_goldens,
        )
        for rank in range(ranks)
    ]


def threads_per_rank(ranks: int) -> int:
    """Intra-op threads of each rank: the cores shared out, at least one; the same in every run."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _troubles(
    cases: Sequence[tuple[Found, Plan]],
    ranks: int,
    process: int,
    outcome: Outcome,
    options: RunOptions,
) -> list[Record]:
    """What deaths and time-outs mean for the claims."""
    troubles: list[Record] = []
    claim = "process" if process else None
    finished = {(r.case, r.rank) for r in outcome.records if isinstance(r, Finished)}
    open_cases = {
        rank: [plan.case for _, plan in cases if (plan.case, rank) not in finished]
        for rank in range(ranks)
    }
    for _, plan in cases:
        for rank, death in sorted(outcome.deaths.items()):
            # a death between two cases, or after the last one, concerns all of them
            if open_cases[rank] and plan.case not in open_cases[rank]:
                continue
            reason = "missing-rank" if ranks > 1 else "crashed"
            who = f"rank {rank}" if ranks > 1 else "the process"
            troubles.append(Trouble(plan.case, reason, f"{who} {death}", claim, rank, process))
        if outcome.timed_out and any(plan.case in names for names in open_cases.values()):
            detail = f"no execution ended for {options.timeout:.0f} s"
            troubles.append(Trouble(plan.case, "timed-out", detail, claim, None, process))
    return troubles


def joined_by_torchrun() -> bool:
    """Whether a launcher such as torchrun has already made the ranks."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in needed) and int(os.environ["WORLD_SIZE"]) > 1


def shown(options: RunOptions) -> dict[str, Any]:
    """The options as the document has them: as `verify run` takes them, paths as text."""
    given = {name: value for name, value in asdict(options).items() if name != "keep_goldens"}
    return {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
