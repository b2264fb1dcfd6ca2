"""Runs a person's script in a fresh process, with orders for its recorder, and watches it.

What it prints goes into a file beside its recording. It is ended when no step was recorded for as
long as is allowed, and by whatever ends the tool but SIGKILL: then nothing of it runs on, on Linux
not even what has left its process group, as the workers of torchrun do. It refuses to change
anything about how the script computes: environment, directory and arguments are the user's, but
for two variables that say where to record, and behind the user's own PYTHONPATH where this package
is when it is not installed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from verify.errors import CaseError, UnsupportedError
from verify.interrupts import interrupts_held
from verify.replaying.orders import RUN_FOLDER, STOPPED, VARIABLE, Orders, write_orders
from verify.tracing.definitions import Recording
from verify.tracing.files import read_folder

Run = dict[int, Recording]
POLL = 0.02
_LAST_LINES, _LAST_BYTES = 6, 4096
_ROUNDS = 100
_PAUSE = 1.0  # seconds between two lines of progress
_RUN = "{run}"
_LINES = """\
it recorded nothing. Record all of its training steps, behind loading a checkpoint:
    import verify
    with verify.record("run", model, optimizer):
        ...  # the training loop"""


@dataclass(frozen=True)
class Script:
    """How a script is run. command: program and arguments; {run} stands for the run's folder.
    timeout: seconds without a step after which it is ended."""

    command: tuple[str, ...]
    timeout: float = 600.0


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """A file of Python with this interpreter, anything else as it is (torchrun, accelerate)."""
    return (sys.executable, *words) if words[0].endswith(".py") else tuple(words)


def recorded(
    script: Script,
    folder: Path,
    orders: Orders,
    *,
    files: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:
    """Runs a script under orders, with everything in `folder`, and reads what it recorded.

    files: what {run} stands for, a folder of its own if not given. CaseError for a script that
    cannot be started, fails, records nothing or is silent for too long, with its last words.
    """
    name = folder.name
    folder.mkdir(parents=True)
    files = files or folder / "files"
    files.mkdir(exist_ok=True)
    path = folder / "orders.json"
    write_orders(replace(orders, folder=str(folder)), path)
    command = [word.replace(_RUN, str(files)) for word in script.command]
    variables = {VARIABLE: str(path), RUN_FOLDER: str(files)}
    log = folder / "log.txt"
    code = _run(command, log, variables, folder, script.timeout, progress)
    shown = shlex.join(script.command)
    if code is None:
        raise CaseError(
            f"{name}: no step for {script.timeout:.0f} s, so it was ended (--timeout): {shown}"
            f"{last_words(log)}"
        )
    found = _read(folder)
    stopped = found is not None and _all(found, STOPPED)
    if code and not stopped:
        how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        raise CaseError(f"{name}: {how}: {shown}{last_words(log)}")
    if found is None:
        raise CaseError(f"{name}: {shown}: {_LINES}{last_words(log)}")
    if orders.stop_after is None and not _all(found, "finished"):
        reason = next(one.reason or one.problem for one in found.values())
        raise CaseError(f"{name}: its recording did not come to its end ({reason}): {shown}")
    return found


def last_words(log: Path) -> str:
    """The last lines of a log, to stand behind a message; "" when there are none."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = file.read().decode("utf-8", "replace").strip().splitlines()
        if text:
            return "\nits last words:\n" + "\n".join(f"  {one}" for one in text[-_LAST_LINES:])
    return ""


def _all(found: Run, beginning: str) -> bool:
    return all((one.reason or "").startswith(beginning) for one in found.values())


def _read(folder: Path) -> Run | None:
    if not any(folder.glob("rank-*.trace")):
        return None
    return read_folder(folder)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run(
    command: Sequence[str],
    log: Path,
    variables: dict[str, str],
    folder: Path,
    timeout: float,
    progress: Callable[[str], None],
) -> int | None:
    """The exit code; None when it was ended for being silent."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with open(log, "wb") as output, interrupts_held():
            process = _start(command, output, variables)
        assert process is not None
        size, moved, told = -1, time.monotonic(), 0.0
        while process.poll() is None:
            now, written = time.monotonic(), _written(folder)
            if written != size:
                size, moved = written, now
                if now - told >= _PAUSE:
                    told = now
                    progress(f"{folder.name}: {written / 1e6:.1f} MB recorded")
            if now - moved > timeout:
                return None
            time.sleep(POLL)
        return process.returncode
    finally:
        if process is not None:
            _end(process, f"{VARIABLE}={variables[VARIABLE]}".encode())


def _start(
    command: Sequence[str], output: IO[bytes], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    paths = [os.environ.get("PYTHONPATH", "")]  # the user's first
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # all of which would go before others
        paths.append(str(root))
    python_path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if any(paths) else {}
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, **python_path},
            start_new_session=True,
        )
    except OSError as error:
        raise CaseError(
            f"{command[0]}: cannot be started ({error.strerror or error}); give a script of Python "
            "(train.py) or a program that is on the PATH (torchrun)"
        ) from error
    except ValueError as error:  # a NUL in an argument
        raise UnsupportedError(f"the command cannot be started: {error}") from error


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """Ends a script, and what it started and left behind. mark: in their environment."""
    with interrupts_held():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(_ROUNDS):  # one may be starting another
            marked = list(_marked(mark))
            for pid in marked:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not marked:
                return
            time.sleep(POLL)


def _marked(mark: bytes) -> Iterator[int]:
    """Processes with this variable; none where there is no /proc."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def _written(folder: Path) -> int:
    total = 0
    for path in folder.glob("rank-*.trace"):
        with suppress(OSError):
            total += path.stat().st_size
    return total
