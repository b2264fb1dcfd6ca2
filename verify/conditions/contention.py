"""contention: other work competes for cores and memory bandwidth while the case runs.

For tensors on a GPU that is `cuda_contention`, for those on a CPU other processes. Here the load
reports its own progress through shared memory, so that overlap is measured, not assumed: an
execution during which no load made progress does not count, and a claim without any such execution
is UNVERIFIED(no-overlap).
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from verify.conditions import cuda_contention
from verify.conditions.availability import Unavailable, available, on_any_rank, unsupported
from verify.conditions.watching import cuda_devices, uses_cpu
from verify.interrupts import interrupts_held
from verify.sessions import Session, perform

TRIES_PER_RUN = 200  # a case of microseconds needs many until a load is seen to move
TRIES_OF_RANKS = 3
START_TIMEOUT = 20.0  # seconds
PATIENCE = 60.0  # seconds of executions without enough overlap
LONGEST_WAIT = 0.05  # seconds; see `_let_loads_run`
LONGEST_LOOK = 0.002  # seconds, less than what a scheduler gives at a time

LOAD = """
import mmap, os, struct, sys
path, slot, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(path, "r+b") as file:
    shared = mmap.mmap(file.fileno(), 4096)
step = 1 << 15  # a few microseconds: even the shortest execution must see the count move
source = memoryview(bytearray(1 << 24))
count = at = 0
while os.getppid() == parent:
    for _ in range(100):
        copied = bytes(source[at : at + step])
        at = (at + step) % len(source)
        count += 1
        struct.pack_into("<Q", shared, 8 * slot, count)
"""


@dataclass
class Load:
    """Running load processes and the counters that they advance."""

    processes: list[subprocess.Popen[bytes]]
    shared: mmap.mmap

    def counters(self) -> list[int]:
        raw = bytes(self.shared[: 8 * len(self.processes)])
        return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def run(session: Session, runs: int) -> None:
    """Under loads on every device that the case has tensors on."""
    devices = cuda_devices(session)
    if on_any_rank(session, bool(devices)):
        if on_any_rank(session, not devices):
            unsupported(session, "contention", "only some ranks use a GPU")
        else:
            cuda_contention.run(session, runs, devices)
    if on_any_rank(session, uses_cpu(session)):
        _run_on_cpu(session, runs)


def _run_on_cpu(session: Session, runs: int) -> None:
    """Executions under load until `runs` of them overlapped, or the tries are used up."""
    processes = max(2, (os.cpu_count() or 1)) if session.stage.world == 1 else 1
    with _load(processes) as started:
        load = available(session, "contention", lambda: _running(started))
        if load is None:
            return
        overlapped = missed = 0
        give_up = time.monotonic() + PATIENCE
        # the ranks execute together, so all make the same number of tries
        tries = (TRIES_OF_RANKS if session.stage.world > 1 else TRIES_PER_RUN) * runs
        for index in range(tries):
            before = load.counters()
            beside = 0  # loads that moved during the execution: what the record says, no later look

            def measured(before: list[int] = before) -> tuple[dict[str, int], bool]:
                nonlocal beside
                moved = [b - a for a, b in zip(before, load.counters(), strict=True)]
                beside = sum(step > 0 for step in moved)
                return {"load_processes": beside, "load_steps": sum(moved)}, beside > 0

            capture = perform(
                session,
                "contention",
                f"load={processes}",
                run=index,
                requested={"load_processes": processes},
                effective=measured,
            )
            counts = beside > 0 and capture.failure is None
            overlapped += counts
            missed = 0 if counts else missed + 1
            late = index >= runs and time.monotonic() > give_up
            if session.stage.world == 1 and (overlapped >= runs or late):
                break
            _let_loads_run(load, missed)


def _running(load: Load | None) -> Load:
    if load is None:
        raise Unavailable("could not start load processes")
    return load


def _let_loads_run(load: Load, missed: int) -> None:
    """After executions without overlap: waits, longer every time, until a load runs beside us.

    On a busy machine other work may have pushed every load off the cores for many milliseconds;
    executing again at once would use up all tries in that gap. A count that moves while this
    process looks without sleeping belongs to a load on another core at this moment, so that even an
    execution of microseconds that follows at once has it beside.
    """
    until = time.monotonic() + min(LONGEST_WAIT, 1e-3 * missed)
    while time.monotonic() < until:
        look_until = time.monotonic() + LONGEST_LOOK
        before = load.counters()
        while time.monotonic() < look_until:
            if load.counters() != before:
                return
        time.sleep(1e-4)


@contextmanager
def _load(count: int) -> Iterator[Load | None]:
    """`count` processes that copy memory and count; stopped at the end, whatever happens."""
    with tempfile.NamedTemporaryFile(prefix="verify-load-") as file:
        file.truncate(4096)
        shared = mmap.mmap(file.fileno(), 4096)
        started: list[subprocess.Popen[bytes]] = []
        try:
            for slot in range(count):
                arguments = [file.name, str(slot), str(os.getpid())]
                # -I: a file called struct.py in the working folder must not be found
                command = [sys.executable, "-IS", "-c", LOAD, *arguments]
                with suppress(OSError), interrupts_held():
                    started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            load = Load(started, shared)
            deadline = time.monotonic() + START_TIMEOUT
            while not all(load.counters()) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield load if started and any(load.counters()) else None
        finally:
            with interrupts_held():
                for process in started:
                    process.kill()
            for process in started:
                process.wait()
            shared.close()
