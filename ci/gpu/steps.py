"""Runs one part of ci/gpu.sh: its steps in turn, within its time, and what each of them left.

A step is a command, the document that it leaves, and the exit codes that count. A step that hangs
is killed with all that it started; one that fails does not keep the next from running. Nothing is
judged here but exit codes: the commands are the judges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONGEST_TAIL = 4000
DEEPEST = 100  # levels of a document; those of ours have about ten


@dataclass(frozen=True)
class Step:
    """One command. document: a file that it writes, or "-" for JSON on its standard output.

    good: exit codes of a command that did its work; `unavailable`: those that say that it cannot
    be done here; `unsupported`: texts in its output that say the same, for a tool that has no exit
    code for it; `needs`: a text that its output must hold, so that silence is no success.
    """

    name: str
    command: Sequence[str]
    document: str = ""
    good: Sequence[int] = (0,)
    unavailable: Sequence[int] = ()
    needs: str = ""
    unsupported: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """Steps that belong together, and how many seconds they may take in all."""

    name: str
    seconds: float
    steps: Sequence[Step]


@dataclass
class Outcome:
    """What became of a part: passed, failed, timed out or unavailable, and its steps."""

    name: str
    status: str = "passed"
    seconds: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "seconds": round(self.seconds, 1)} | {
            "steps": self.steps
        }


def run_part(part: Part, log: Path, limit: float) -> Outcome:
    """Runs the steps of a part until its time is up; a failed step does not keep others back."""
    outcome, started = Outcome(part.name), time.monotonic()
    found: list[str] = []
    for step in part.steps:
        left = limit - (time.monotonic() - started)
        entry = _run_step(step, log, left)
        outcome.steps.append(entry)
        found.append(entry["status"])
    for status in ("failed", "timed out", "unavailable"):
        if status in found:
            outcome.status = status
            break
    if not part.steps:
        outcome.status = "unavailable"
    outcome.seconds = time.monotonic() - started
    return outcome


def _run_step(step: Step, log: Path, limit: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": step.name, "command": " ".join(step.command[1:])}
    if limit <= 1:
        return {**entry, "status": "timed out", "exit": None, "seconds": 0.0, "document": None}
    started = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            code = _wait(step.command, output, errors, limit)
        except OSError as error:
            _append(log, f"$ {' '.join(step.command)}\n{error}\n")
            why = {"status": "unavailable", "exit": None, "why": str(error), "document": None}
            return {**entry, "seconds": 0.0, **why}
        output.seek(0)
        errors.seek(0)
        raw = output.read()
        printed, said = _text(raw), _text(errors.read())
    seconds = round(time.monotonic() - started, 1)
    document, problem = _document(step, raw)
    shown = "" if step.document == "-" and not problem else printed
    _append(log, f"$ {' '.join(step.command)}\n{shown}{said}[exit {code}, {seconds} s]\n")
    whole = printed + said
    if code is None:
        status = "timed out"
    elif code in step.unavailable or any(text in whole for text in step.unsupported):
        status = "unavailable"
    elif code not in step.good or problem or step.needs not in whole:
        status = "failed"
    else:
        status = "passed"
    entry |= {"status": status, "exit": code, "seconds": seconds, "document": document}
    if status != "passed":
        ended = code in step.good and step.needs in whole
        entry["why"] = problem if ended else whole.strip()[-LONGEST_TAIL:]
    elif step.needs:
        entry["said"] = next(line for line in whole.splitlines() if step.needs in line).strip("= ")
    return entry


def _wait(command: Sequence[str], output: Any, errors: Any, limit: float) -> int | None:
    """The exit code, or None after the time is up; then the command's whole group is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(raw: bytes) -> str:
    """Output as text; what is no UTF-8 must not keep the rest from being read."""
    return raw.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _append(log: Path, text: str) -> None:
    with open(log, "a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _document(step: Step, raw: bytes) -> tuple[Any, str]:
    """What the step left, and why it cannot be read; XML as text."""
    if not step.document:
        return None, ""
    try:
        held = raw if step.document == "-" else Path(step.document).read_bytes()
        text = held.decode("utf-8")
        if step.document.endswith(".xml"):
            ElementTree.fromstring(text)
            return text, ""
        found = json.loads(text)
    except (OSError, ValueError, RecursionError, ElementTree.ParseError) as error:
        return None, f"its document cannot be read: {error}"
    if _deeper(found, DEEPEST):
        return None, f"its document cannot be read: it is nested deeper than {DEEPEST} levels"
    return found, ""


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper: what can be read cannot always be written."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            inner
            for one in layer
            if isinstance(one, list | dict)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not layer:
            return False
    return True
