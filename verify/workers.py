"""One worker process: a rank of the main run, or of a fresh one; `python -m verify.workers SPEC`.

It beats while it lives, appends every record to its own evidence file at once, and writes a last
line when it is done: what was reported before a death is kept, and a death is seen for what it is.
The heartbeat starts before anything heavy is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mok.endings import end_process
from verify.errors import UnsupportedError, VerifyError
from verify.evidence import (
    BASE,
    FIRST,
    Execution,
    Failure,
    Finished,
    Plan,
    Record,
    Trouble,
    from_line,
    to_line,
)

if TYPE_CHECKING:
    from torch import Tensor

    from verify.targets import Found

BEAT = 0.5  # seconds
DONE = '{"kind": "done"}'
ABANDONED = 13  # exit code after a failure that left ranks waiting for each other
IN_WORKER = "MOK_VERIFY_WORKER"  # set in the environment of every worker
MAX_KEPT_BYTES = 2**30  # base outputs kept on disk for other processes to compare with
PEER_GRACE = 10.0  # seconds that a rank which failed alone waits for its peers


class Abandoned(BaseException):
    """The ranks of this run are no longer in step; nothing more can be executed together."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs to know, as JSON."""

    plans: Sequence[dict[str, Any]]
    rank: int
    world: int
    process: int
    folder: str
    threads: int
    timeout: float
    store_host: str = ""
    store_port: int = 0
    degrees: Sequence[int] = field(default_factory=tuple)
    first_index: int = 0  # position of the first case in the main run, for its kept outputs
    golden: str | None = None  # the folder of goldens
    keep_goldens: bool = False  # leave what a golden of each case would hold in `folder`
    paths: Sequence[str] = field(default_factory=lambda: [p or os.getcwd() for p in sys.path])
    parent: int = field(default_factory=os.getpid)  # the process that watches this worker

    @property
    def stem(self) -> Path:
        return Path(self.folder) / f"process{self.process}-rank{self.rank}"


class Agreement:
    """Keeps ranks in step through a store, so that one failing rank leaves no others waiting.

    A rank that succeeded waits `limit` seconds for its peers, one that failed waits PEER_GRACE.
    """

    def __init__(self, store: Any, rank: int, world: int, name: str, limit: float = 300.0) -> None:
        self.store, self.rank, self.world, self.name = store, rank, world, name
        self.limit = limit
        self.count = 0
        self.abandoned = False

    def __call__(self, failure: Failure | None) -> Failure | None:
        """This rank's failure, or that of a peer; None when all ranks succeeded."""
        if self.world == 1:
            return failure
        self.count += 1
        key = f"{self.name}/{self.count}"
        self.store.set(f"{key}/{self.rank}", "error" if failure else "ok")
        deadline = time.monotonic() + (self.limit if failure is None else PEER_GRACE)
        waiting = set(range(self.world)) - {self.rank}
        failed: list[int] = []
        while waiting:
            for peer in sorted(waiting):
                if self.store.check([f"{key}/{peer}"]):
                    waiting.discard(peer)
                    if self.store.get(f"{key}/{peer}") == b"error":
                        failed.append(peer)
            if self.store.check([f"{self.name}/abandoned"]):
                self.abandoned = True
                origin = int(self.store.get(f"{self.name}/abandoned"))
                if failure is not None and origin != self.rank:
                    return Failure(failure.type, failure.message, failure.traceback, True)
                break
            if time.monotonic() > deadline and waiting:
                self.store.set(f"{self.name}/abandoned", str(self.rank))
                self.abandoned = True
                if failure is None:
                    text = f"ranks {sorted(waiting)} did not answer for {self.limit:.0f} s"
                    return Failure("PeerLost", text, "", True)
                break
            time.sleep(0.0005)
        if failure is None and failed:
            return Failure("PeerFailed", f"rank {failed[0]} failed", "", True)
        return failure


def start_heartbeat(path: Path, parent: int | None = None) -> None:
    """A thread that counts into a file; it stops when the process is stopped or dead.

    It ends the process, and what that started, once `parent` is gone: nobody would.
    """

    def beat() -> None:
        count = 0
        while True:
            if parent is not None and os.getppid() != parent:
                _end_group()
            count += 1
            with suppress(OSError):  # the folder may be gone already
                path.write_text(str(count))
            time.sleep(BEAT)

    threading.Thread(target=beat, daemon=True, name="verify-heartbeat").start()


def _end_group() -> NoReturn:
    """Ends this process at once; if it leads a group, as `ranks` starts it, with the group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Runs one worker from its spec file; 0 when everything was reported."""
    spec = WorkerSpec(**json.loads(Path(arguments[0]).read_text()))
    os.environ[IN_WORKER] = "1"
    # last, so that nothing there can shadow a package
    sys.path += [path for path in (*spec.paths, os.getcwd()) if path not in sys.path]
    start_heartbeat(spec.stem.with_suffix(".beat"), spec.parent)
    with open(spec.stem.with_suffix(".jsonl"), "a", buffering=1) as file:
        try:
            _work(spec, lambda record: _append(file, to_line(record)))
        except Abandoned:
            spec.stem.with_suffix(".abandoned").touch()
            return ABANDONED
        _append(file, DONE)
    return 0


def _append(file: Any, line: str) -> None:
    file.write(line + "\n")
    file.flush()


def _work(spec: WorkerSpec, emit: Callable[[Record], None]) -> None:
    import torch

    from verify import devices

    torch.set_num_threads(spec.threads)
    plans = [Plan(**plan) for plan in spec.plans]
    named = [plan.device for plan in plans if plan.device]
    home = devices.current()
    for name in named[:1]:  # before the user's files are imported, which may allocate
        devices.enter(name, spec.rank, spec.world)
    entered = devices.current()
    found = _find(plans)
    if spec.world == 1:
        if devices.current() == entered:  # else a file has chosen another one
            devices.restore(home)  # `cuda` is this one, whatever other cases name
        run_cases(spec, list(zip(found, plans, strict=True)), None, {}, None, emit)
        return
    from datetime import timedelta

    import torch.distributed as dist

    limit = timedelta(seconds=max(spec.timeout, 60.0))
    store = dist.TCPStore(spec.store_host, spec.store_port, None, False, timeout=limit)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", spec.world))
    dist.init_process_group(
        devices.backend(named, local),
        store=store,
        rank=spec.rank,
        world_size=spec.world,
        timeout=limit,
    )
    groups = make_groups(spec.degrees, spec.rank, spec.world)
    pairs = list(zip(found, plans, strict=True))
    run_cases(spec, pairs, dist.group.WORLD, groups, store, emit)
    dist.barrier()
    dist.destroy_process_group()


def _find(plans: Sequence[Plan]) -> list[Found]:
    """The case of every plan, each looked for from where this worker was started.

    A file may change the directory while it is imported; its code then runs there, as it would
    without this tool.
    """
    from verify.targets import find_exact

    here = end = os.getcwd()
    found: list[Found] = []
    for plan in plans:
        os.chdir(here)
        found.append(find_exact(plan.target))
        end = os.getcwd() if os.getcwd() != here else end
    os.chdir(end)
    return found


def make_groups(degrees: Sequence[int], rank: int, world: int) -> dict[int, Any]:
    """This rank's subgroup for every degree; a degree of one is no group at all."""
    import torch.distributed as dist

    groups: dict[int, Any] = {1: None}
    for degree in sorted(set(degrees)):
        if degree in (1, world) or world % degree:
            continue
        for start in range(0, world, degree):
            group = dist.new_group(list(range(start, start + degree)))
            if start <= rank < start + degree:
                groups[degree] = group
    return groups


def run_cases(
    spec: WorkerSpec,
    cases: Sequence[tuple[Found, Plan]],
    group: Any,
    groups: dict[int, Any],
    store: Any,
    emit: Callable[[Record], None],
) -> None:
    """Every case in turn; base outputs are kept on disk for fresh processes to compare with."""
    from verify import allocations, devices, footprints
    from verify.conduct import conduct, report_setup_failure, set_up
    from verify.sessions import Session, first
    from verify.staging import Stage

    trusted = _trusted(spec) if spec.process else {}
    home = devices.current()
    for index, (found, plan) in enumerate(cases, start=spec.first_index):
        devices.restore(home)
        allocations.give_back()  # no case finds what those before it have left
        asked = footprints.asked()
        agree = Agreement(store, spec.rank, spec.world, f"p{spec.process}/c{index}", spec.timeout)

        def emit_in_step(record: Record, agree: Agreement = agree) -> None:
            emit(record)
            if agree.abandoned:
                raise Abandoned

        stage = set_up(_with_plan(found, plan), spec.rank, spec.world, group, agree)
        if not isinstance(stage, Stage):
            report_setup_failure(emit_in_step, plan, spec.rank, stage, spec.process)
            emit(Finished(plan.case, spec.rank, spec.process))
            continue
        session = Session(
            stage,
            plan,
            emit_in_step,
            spec.process,
            group,
            groups,
            agree,
            golden=Path(spec.golden) if spec.golden is not None else None,
            keep_golden=golden_path(spec.folder, index) if spec.keep_goldens else None,
        )
        if spec.process:
            session.trusted = trusted.get(plan.case, {})
            kept = _kept_path(spec, index)
            session.load_trusted = lambda name, kept=kept: _load(kept, name)  # type: ignore[misc]
        try:
            first(session) if spec.process else conduct(session)
        except VerifyError as error:
            # a wrong declaration shows on all ranks alike, so they stay in step
            emit_in_step(_declared_wrongly(plan, spec, error))
        if not spec.process and "process" in plan.claims and session.base is not None:
            _keep(_kept_path(spec, index), session.base.kept)
        wanted = not spec.process and "process" in plan.claims
        footprint = footprints.footprint(asked) if wanted else {}
        emit(Finished(plan.case, spec.rank, spec.process, footprint))


def _declared_wrongly(plan: Plan, spec: WorkerSpec, error: VerifyError) -> Trouble:
    claim = "process" if spec.process else None
    reason = "unsupported" if isinstance(error, UnsupportedError) else "case-error"
    return Trouble(plan.case, reason, str(error), claim, spec.rank, spec.process)


def _with_plan(found: Found, plan: Plan) -> Found:
    """The case as planned: its seed and device may come from the command line."""
    from dataclasses import replace

    return replace(found, case=replace(found.case, seed=plan.seed, device=plan.device))


def golden_path(folder: str | Path, index: int) -> Path:
    """Where the worker of the main run leaves what a golden of a case would hold."""
    return Path(folder) / f"golden-case{index}.pt"


def _kept_path(spec: WorkerSpec, index: int) -> Path:
    return Path(spec.folder) / f"base-case{index}-rank{spec.rank}.pt"


def _keep(path: Path, tensors: dict[str, Tensor]) -> None:
    import torch

    if sum(t.numel() * t.element_size() for t in tensors.values()) <= MAX_KEPT_BYTES:
        partial = path.with_suffix(".partial")
        torch.save(tensors, partial)
        os.replace(partial, path)


def _load(path: Path, name: str) -> Tensor | None:
    import torch

    if not path.is_file():
        return None
    tensors: dict[str, Tensor] = torch.load(path, weights_only=True)
    return tensors.get(name)


def _trusted(spec: WorkerSpec) -> dict[str, dict[str, str]]:
    """The base digests that this rank reported in the main run, by case."""
    path = Path(spec.folder) / f"process0-rank{spec.rank}.jsonl"
    records, _ = read_evidence(path)
    return {
        record.case: dict(record.outputs)
        for record in records
        if isinstance(record, Execution) and record.claim == BASE and record.variant == FIRST
    }


def read_evidence(path: Path) -> tuple[list[Record], bool]:
    """The records of one file, and whether its worker said that it was done.

    A line cut by a death is dropped; everything before it counts.
    """
    records: list[Record] = []
    done = False
    if not path.is_file():
        return records, done
    for line in path.read_text().splitlines():
        if line == DONE:
            done = True
            continue
        try:
            records.append(from_line(line))
        except (ValueError, TypeError):
            break
    return records, done


def write_spec(spec: WorkerSpec) -> Path:
    """Stores a spec beside the evidence that its worker will write."""
    path = spec.stem.with_suffix(".spec.json")
    path.write_text(json.dumps(asdict(spec)))
    return path


if __name__ == "__main__":
    _code = main(sys.argv[1:])
    if _code == ABANDONED:
        # at once: a collective that never ends, on a GPU, would keep the interpreter from ending
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)
    end_process(_code)
