"""Under torchrun: join the group that is there instead of starting ranks.

Evidence travels through the rendezvous store, not through collectives, so that a rank that got out
of step cannot hang the others; every rank then decides from the same records. Watching for deaths
is the launcher's business here; a rank whose evidence does not come is a missing rank.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verify import devices
from verify.evidence import Execution, Plan, Record, Trouble, from_line, to_line
from verify.interrupts import interrupts_held
from verify.plans import RunOptions, plans_of
from verify.ranks import worker_command, worker_environment
from verify.targets import Found
from verify.verdicts import CaseVerdict
from verify.workers import Abandoned, WorkerSpec, make_groups, read_evidence, run_cases, write_spec


def run_joined(
    found: Sequence[Found], options: RunOptions, progress: Callable[[str], None]
) -> tuple[list[Plan], list[CaseVerdict], list[Execution]]:
    """Runs every case on the ranks that the launcher made; the same verdicts on every rank."""
    from verify.running import judge, threads_per_rank

    limit = timedelta(seconds=max(options.timeout, 60.0))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    plans = plans_of(found, options, world)
    named = [plan.device for plan in plans if plan.device]
    for name in named[:1]:
        devices.enter(name, rank, world)
    dist.init_process_group(devices.backend(named, local_world), timeout=limit)
    threads = threads_per_rank(local_world)
    torch.set_num_threads(threads)
    store = dist.PrefixStore("verify", dist.distributed_c10d._get_default_store())
    degrees = sorted({degree for one in found for degree in one.case.ep})
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        spec = WorkerSpec(
            plans=[asdict(plan) for plan in plans],
            rank=rank,
            world=world,
            process=0,
            folder=folder,
            threads=threads,
            timeout=options.timeout,
            degrees=degrees,
            golden=str(options.golden_folder),
        )
        evidence = spec.stem.with_suffix(".jsonl")
        with open(evidence, "a", buffering=1) as file, suppress(Abandoned):
            groups = make_groups(degrees, rank, world)
            pairs = list(zip(found, plans, strict=True))
            run_cases(
                spec,
                pairs,
                dist.group.WORLD,
                groups,
                store,
                lambda record: _write(file, record),
            )
        mine, _ = read_evidence(evidence)
        for position, plan in enumerate(plans):
            if "process" in plan.claims:
                for process in range(1, plan.runs["process"] + 1):
                    progress(f"{plan.case}: fresh process {process} of {plan.runs['process']}")
                    fresh = replace(
                        spec, plans=[asdict(plan)], process=process, first_index=position
                    )
                    mine += _fresh(fresh, store, plan)
    records = _exchange(store, mine, plans, rank, world, limit)
    return judge(plans, records)


def leave() -> None:
    """Waits for all ranks, then leaves the launcher's group; call it after rank 0 has written.

    A launcher that sees one rank exit with another code than 0 ends the others at once.
    """
    if dist.is_available() and dist.is_initialized():
        with suppress(Exception):
            dist.barrier()
        dist.destroy_process_group()


def _write(file: Any, record: Record) -> None:
    file.write(to_line(record) + "\n")
    file.flush()


def _fresh(spec: WorkerSpec, store: Any, plan: Plan) -> list[Record]:
    """One fresh process beside this rank; the ranks' fresh processes form a group of their own."""
    key = f"fresh/{plan.case}/{spec.process}"
    server = None
    if spec.rank == 0:
        server = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        store.set(key, str(server.port))
    port = int(store.get(key))
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    spec = replace(spec, store_host=host, store_port=port)
    command, environment = worker_command(write_spec(spec)), worker_environment(spec)
    with open(spec.stem.with_suffix(".log"), "wb") as log:
        code = _exit_code(command, environment, log, spec.timeout)
    records, done = read_evidence(spec.stem.with_suffix(".jsonl"))
    if code != 0 or not done:
        what = "did not end in time" if code is None else f"exited with {code}"
        detail = f"the fresh process of rank {spec.rank} {what}"
        records.append(
            Trouble(plan.case, "missing-rank", detail, "process", spec.rank, spec.process)
        )
    store.set(f"{key}/left/{spec.rank}", "1")
    if server is not None:
        for rank in range(spec.world):
            store.get(f"{key}/left/{rank}")
    return records


def _exit_code(
    command: list[str], environment: dict[str, str], log: Any, seconds: float
) -> int | None:
    """The exit code of a command, or None if it took too long; it never outlives this call."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        with interrupts_held():
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
        with suppress(subprocess.TimeoutExpired):
            return started[0].wait(timeout=seconds)
        return None
    finally:
        for process in started:
            process.kill()
            process.wait()


def _exchange(
    store: Any,
    mine: Sequence[Record],
    plans: Sequence[Plan],
    rank: int,
    world: int,
    limit: timedelta,
) -> list[Record]:
    """The records of all ranks; a rank that never sends its own is missing."""
    store.set(f"evidence/{rank}", "\n".join(to_line(record) for record in mine))
    store.set_timeout(limit)
    records: list[Record] = []
    for peer in range(world):
        try:
            text = store.get(f"evidence/{peer}").decode()
        except Exception as error:
            detail = f"rank {peer} sent no evidence: {type(error).__name__}"
            records += [Trouble(p.case, "missing-rank", detail, None, peer) for p in plans]
            continue
        records += [from_line(line) for line in text.splitlines()]
    return records
