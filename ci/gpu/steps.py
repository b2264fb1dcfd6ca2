"""Runs parts of ci/gpu.sh: their steps, each part within its time, and what each step left.

A step is a command, the document that it leaves, and the exit codes that count. A step that hangs
is killed with all that it started; one that fails does not keep the next from running. Steps of
several parts may run side by side; what became of each part is told apart. Nothing is judged here
but exit codes: the commands are the judges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from verify.interrupts import interrupts_held

ROOT = Path(__file__).resolve().parents[2]
LONGEST_TAIL = 4000
DEEPEST = 100  # levels of a document; those of ours have about ten
POLL = 0.05  # seconds between two looks at what runs
IDLE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For steps that share the cores: threads that wait must not keep others from theirs."""


@dataclass(frozen=True)
class Step:
    """One command. document: a file that it writes, or "-" for JSON on its standard output.

    good: exit codes of a command that did its work; `unavailable`: those that say that it cannot
    be done here; `unsupported`: texts in its output that say the same, for a tool that has no exit
    code for it; `needs`: a text that its output must hold, so that silence is no success. alone:
    nothing else may run meanwhile, whatever its part allows.
    """

    name: str
    command: Sequence[str]
    document: str = ""
    good: Sequence[int] = (0,)
    unavailable: Sequence[int] = ()
    needs: str = ""
    unsupported: Sequence[str] = ()
    alone: bool = False


@dataclass(frozen=True)
class Part:
    """Steps that belong together, and how many seconds they may take in all.

    alone: no step of it may run beside anything else, as what measures time or joules must not.
    """

    name: str
    seconds: float
    steps: Sequence[Step]
    alone: bool = False

    def only(self, *, alone: bool) -> Part:
        """This part with the steps that run alone, or with those that need not."""
        steps = [step for step in self.steps if (self.alone or step.alone) == alone]
        return replace(self, steps=steps)


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

    def and_then(self, other: Outcome) -> Outcome:
        """This and what became of the same part's other steps, later."""
        both = [one for one in (self, other) if one.steps]
        return Outcome(
            self.name,
            _worst([one.status for one in both]),
            sum(one.seconds for one in both),
            [step for one in both for step in one.steps],
        )


def _worst(statuses: Sequence[str]) -> str:
    """That of a part, from those of its steps; one without any is unavailable."""
    order = ("failed", "timed out", "unavailable", "passed")
    return next((status for status in order if status in statuses), "unavailable")


@dataclass
class _Running:
    """A step that runs: where its output goes, and until when it may."""

    part: str
    place: int
    step: Step
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    started: float
    until: float


def run_part(part: Part, log: Path, limit: float) -> Outcome:
    """Runs the steps of a part in turn until its time is up."""
    (outcome,) = run_parts([part], {part.name: log}, {part.name: limit})
    return outcome


def run_parts(
    parts: Sequence[Part],
    logs: Mapping[str, Path],
    limits: Mapping[str, float],
    at_once: int = 1,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs the steps of all parts, at most `at_once` at a time; outcomes in the order of the parts.

    The time of a part, `limits` by name in seconds, begins with its first step, and no step of it
    outlives it. ended: told each outcome as soon as it is known. Whatever ends this, no step runs
    on.
    """
    waiting = spread(parts) if at_once > 1 else _in_turn(parts)
    environment = {**IDLE, **os.environ} if at_once > 1 else dict(os.environ)
    running: list[_Running] = []
    begun: dict[str, float] = {}
    entries: dict[str, dict[int, dict[str, Any]]] = {part.name: {} for part in parts}
    outcomes: dict[str, Outcome] = {}
    try:
        while True:
            for part in parts:
                found = entries[part.name]
                if part.name not in outcomes and len(found) == len(part.steps):
                    steps = [found[place] for place in sorted(found)]
                    spent = time.monotonic() - begun[part.name] if steps else 0.0
                    status = _worst([step["status"] for step in steps])
                    outcomes[part.name] = Outcome(part.name, status, spent, steps)
                    ended(outcomes[part.name])
            if not (waiting or running):
                return [outcomes[part.name] for part in parts]
            while waiting and len(running) < at_once:
                part, place = waiting.pop(0)
                until = begun.setdefault(part.name, time.monotonic()) + limits[part.name]
                with interrupts_held():
                    begin = _begin(part, place, until, environment, logs[part.name])
                    if isinstance(begin, _Running):
                        running.append(begin)
                    else:
                        entries[part.name][place] = begin
            done = [one for one in running if _is_over(one)]
            for one in done:
                entries[one.part][one.place] = _result(one, logs[one.part])
                running.remove(one)
            if running and not done:
                time.sleep(POLL)
    finally:
        with interrupts_held():
            for one in running:
                _kill(one)
        for one in running:
            one.process.wait()
            one.output.close()
            one.errors.close()


def _in_turn(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Every step as its part and its place there, one part after the other."""
    return [(part, place) for part in parts for place in range(len(part.steps))]


def spread(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """The same, so that at any time each part is about as far as the others. Within a part the
    order stays: what takes long stands first there."""
    return sorted(_in_turn(parts), key=lambda one: one[1] / len(one[0].steps))


def _entry(step: Step) -> dict[str, Any]:
    return {"name": step.name, "command": " ".join(step.command[1:])}


def _begin(
    part: Part, place: int, until: float, environment: Mapping[str, str], log: Path
) -> _Running | dict[str, Any]:
    """The step that now runs, or why it does not."""
    step = part.steps[place]
    nothing = {**_entry(step), "exit": None, "seconds": 0.0, "document": None}
    if until - time.monotonic() <= 1:
        return {**nothing, "status": "timed out"}
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    try:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        errors.close()
        _append(log, f"$ {' '.join(step.command)}\n{error}\n")
        return {**nothing, "status": "unavailable", "why": str(error)}
    return _Running(part.name, place, step, process, output, errors, time.monotonic(), until)


def _is_over(one: _Running) -> bool:
    return one.process.poll() is not None or time.monotonic() > one.until


def _kill(one: _Running) -> None:
    """Kills the command's whole group: what a step started does not outlive it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, signal.SIGKILL)


def _result(one: _Running, log: Path) -> dict[str, Any]:
    """What became of a step that has ended, or whose time is up."""
    step, code = one.step, one.process.poll()
    _kill(one)
    one.process.wait()
    with one.output as output, one.errors as errors:
        output.seek(0)
        errors.seek(0)
        raw = output.read()
        printed, said = _text(raw), _text(errors.read())
    seconds = round(time.monotonic() - one.started, 1)
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
    found = {"status": status, "exit": code, "seconds": seconds, "document": document}
    if status != "passed":
        ended = code in step.good and step.needs in whole
        found["why"] = problem if ended else whole.strip()[-LONGEST_TAIL:]
    elif step.needs:
        found["said"] = next(line for line in whole.splitlines() if step.needs in line).strip("= ")
    return {**_entry(step), **found}


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
