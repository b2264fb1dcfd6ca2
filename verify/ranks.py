"""Starts the ranks of a run and watches them: nobody waits for a dead or stopped rank.

A rank that exits without having reported everything, or that is stopped, is dead; the others get a
short grace to report what they saw and are then killed. gloo alone would wait for half an hour.
What was reported before a death is kept; `decision` makes of it what it is worth. A rank that runs
but is silent is left to the time-out: foreign code may hold the interpreter's lock for long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from verify.errors import CaseError
from verify.evidence import Record, from_line
from verify.interrupts import interrupts_held
from verify.workers import ABANDONED, DONE, IN_WORKER, WorkerSpec, read_evidence, write_spec

STOPPED_AFTER = 12.0  # seconds in the state `stopped`; without /proc, without a heartbeat
START_LIMIT = 60.0  # without /proc: seconds until the first heartbeat
GRACE = 12.0  # seconds that the others have after a death
POLL = 0.05


@dataclass
class Watched:
    """One worker process and what is known of it."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    beat: str = ""
    beat_at: float = field(default_factory=time.monotonic)
    stopped_at: float | None = None
    size: int = 0
    death: str = ""
    ended: bool = False  # and looked at


@dataclass(frozen=True)
class Outcome:
    """What the workers left: all records, and how each that did not finish ended."""

    records: list[Record]
    deaths: dict[int, str]  # rank -> what happened
    timed_out: bool = False
    abandoned: bool = False


@dataclass
class Group:
    """The workers of one start: ranks that execute together, and what is known of them."""

    watched: list[Watched]
    store: object  # their rendezvous, which lives as long as they do
    death_at: float | None = None
    left_at: float | None = None


def run_workers(
    specs: Sequence[WorkerSpec], timeout: float, progress: Callable[[str], None]
) -> Outcome:
    """Starts one process per spec and returns when all have ended, one way or another.

    Raises CaseError inside a worker: a file that checks its own cases while it is imported would
    start workers without end.
    """
    return run_groups([specs], timeout, progress)[0]


def run_groups(
    groups: Sequence[Sequence[WorkerSpec]],
    timeout: float,
    progress: Callable[[str], None],
    at_once: int = 1,
    begun: Callable[[int], None] = lambda place: None,
) -> list[Outcome]:
    """Starts every group of workers, at most `at_once` at a time; their outcomes in their order.

    timeout: seconds in which nothing moves in any of those that run, since each of them slows the
    others. begun: told the place of each group before it starts. Whatever ends this, no worker is
    left. Raises CaseError as run_workers does.
    """
    if os.environ.get(IN_WORKER):
        raise CaseError(
            "this file starts a check while a worker imports it; "
            'put that call under `if __name__ == "__main__":`'
        )
    outcomes: dict[int, Outcome] = {}
    running: dict[int, Group] = {}
    waiting = list(range(len(groups)))
    moved = time.monotonic()
    try:
        while running or waiting:
            while waiting and len(running) < at_once:
                place = waiting.pop(0)
                begun(place)
                running[place] = Group([], None)
                _begin(running[place], groups[place])
                moved = time.monotonic()
            now = time.monotonic()
            for group in running.values():
                if _has_moved(group):
                    moved = now
                    progress(_progress(group.watched))
            over = {place: _is_over(group, now) for place, group in running.items()}
            late = now - moved > timeout
            for place, group in list(running.items()):
                silent = late and group.death_at is None and not over[place]
                if over[place] or silent:
                    _end_all([group])
                    outcomes[place] = _outcome(group.watched, silent)
                    del running[place]
                    moved = now if not silent else moved
            if running:
                time.sleep(POLL)
    finally:
        _end_all(running.values())
    return [outcomes[place] for place in range(len(groups))]


def _begin(group: Group, specs: Sequence[WorkerSpec]) -> None:
    store = _store(len(specs)) if specs[0].world > 1 else None
    group.store = store
    if store is not None:
        specs = [replace(spec, store_host="127.0.0.1", store_port=store.port) for spec in specs]  # type: ignore[attr-defined]
    for spec in specs:
        with interrupts_held():
            group.watched.append(_start(spec))


def _end_all(groups: Iterable[Group]) -> None:
    """Kills every worker before the first wait: a second Ctrl-C then finds none that runs."""
    watched = [one for group in groups for one in group.watched]
    with interrupts_held():
        for one in watched:
            _kill(one)
    for one in watched:
        one.process.wait()


def _store(world: int) -> object:
    """A rendezvous store on a port of the system's choice; it lives in this process."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _start(spec: WorkerSpec) -> Watched:
    for suffix in (".jsonl", ".beat", ".log", ".abandoned"):
        spec.stem.with_suffix(suffix).unlink(missing_ok=True)
    with open(spec.stem.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            worker_command(write_spec(spec)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=worker_environment(spec),
            start_new_session=True,
        )
    return Watched(spec, process)


def worker_command(spec: Path) -> list[str]:
    """How a worker is started; -P, since a file verify.py here must not shadow the package."""
    return [sys.executable, "-P", "-m", "verify.workers", str(spec)]


def worker_environment(spec: WorkerSpec) -> dict[str, str]:
    """This process's environment with the worker's rank, so that a user's file sees it at import.

    Every fresh process gets another PYTHONHASHSEED: the order of sets of strings must not matter.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **inherited,
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    if spec.process:
        given = os.environ.get("PYTHONHASHSEED", "")  # the main process has this one, or chance
        start = int(given) if given.isdigit() else 0
        environment["PYTHONHASHSEED"] = str((start + spec.process) % 2**32)
    return environment


def _has_moved(group: Group) -> bool:
    """Whether anything was reported since the last look."""
    files = [one.spec.stem.with_suffix(".jsonl") for one in group.watched]
    total = sum(path.stat().st_size for path in files if path.is_file())
    seen = sum(one.size for one in group.watched)
    group.watched[0].size += total - seen
    return total != seen


def _is_over(group: Group, now: float) -> bool:
    """Looks at every worker; whether all have ended, or those that have not get no more time."""
    ended = all(one.process.poll() is not None for one in group.watched)
    for one in group.watched:
        _look(one, now)
    if ended:
        return True
    if group.death_at is None and any(one.death for one in group.watched):
        group.death_at = now
    if group.left_at is None and any(one.process.poll() == ABANDONED for one in group.watched):
        group.left_at = now  # gloo's peers notice that one has left; NCCL's wait in their kernel
    return any(at is not None and now - at > GRACE for at in (group.death_at, group.left_at))


def _look(one: Watched, now: float) -> None:
    """Updates what is known of one worker; notes its death."""
    if one.death or one.ended:
        return
    code = one.process.poll()
    if code is not None:
        one.ended = True
        _, done = read_evidence(one.spec.stem.with_suffix(".jsonl"))
        left = code == ABANDONED and one.spec.stem.with_suffix(".abandoned").exists()
        if not left and (code != 0 or not done):
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            one.death = f"{how}{_log_tail(one.spec)}"
        return
    state = process_state(one.process.pid)
    if state in ("T", "t"):
        one.stopped_at = now if one.stopped_at is None else one.stopped_at
        if now - one.stopped_at > STOPPED_AFTER:
            _give_up(one, STOPPED_AFTER)
        return
    one.stopped_at = None
    if state:
        return  # it runs; code that holds the interpreter's lock silences the heart of a live rank
    with suppress(OSError):
        beat = one.spec.stem.with_suffix(".beat").read_text()
        if beat and beat != one.beat:
            one.beat, one.beat_at = beat, now
    limit = STOPPED_AFTER if one.beat else START_LIMIT
    if now - one.beat_at > limit:
        _give_up(one, limit)


def _give_up(one: Watched, seconds: float) -> None:
    one.death = f"stopped: no heartbeat for {seconds:.0f} s"
    _kill(one)
    one.process.wait()


def process_state(pid: int) -> str:
    """The letter of a process's state from /proc, such as S or T; empty where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].strip()[:1]  # the name before it may hold anything


def _kill(one: Watched) -> None:
    if one.process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)


def _outcome(watched: list[Watched], timed_out: bool) -> Outcome:
    records: list[Record] = []
    deaths: dict[int, str] = {}
    for one in watched:
        found, _ = read_evidence(one.spec.stem.with_suffix(".jsonl"))
        records += found
        if one.death:
            deaths[one.spec.rank] = one.death
    abandoned = any(one.process.returncode == ABANDONED for one in watched)
    return Outcome(records, deaths, timed_out, abandoned)


def _progress(watched: list[Watched]) -> str:
    """What the first rank reported last."""
    last = _last_record(watched[0].spec.stem.with_suffix(".jsonl"))
    if last is None:
        return "starting"
    claim, variant = getattr(last, "claim", ""), getattr(last, "variant", "")
    return f"{last.case}: {claim} {variant}".rstrip()


def _last_record(path: Path, block: int = 2**14) -> Record | None:
    """The last whole record of an evidence file, read from its end: the file may be long."""
    try:
        with open(path, "rb") as file:
            start = file.seek(0, os.SEEK_END)
            tail = b""
            while start:
                size = min(block, start)
                start -= size
                file.seek(start)
                tail = file.read(size) + tail
                block *= 2
                lines = tail.split(b"\n")[0 if start == 0 else 1 : -1]  # whole ones only
                for line in reversed(lines):
                    if line != DONE.encode():
                        return from_line(line.decode())
    except (OSError, ValueError):
        pass
    return None


def _log_tail(spec: WorkerSpec, lines: int = 4) -> str:
    with suppress(OSError):
        text = spec.stem.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        if text:
            return "; its last words: " + " | ".join(line.strip() for line in text[-lines:])
    return ""
