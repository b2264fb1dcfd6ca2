"""Processes that write a folder of goldens and are killed, or write at the same time.

A script of its own, `python golden_writers.py kills|steps|writers FOLDER`, since it forks: only the
standard library and `verify.goldens.store`, which imports no torch. It prints what happened as JSON
and refuses to go on after a state that is neither the old nor the new one.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verify.goldens import store

KILLS = 200
WRITERS, EACH = 4, 12


def state(name: str, files: int, size: int) -> tuple[list[store.Entry], dict[str, bytes]]:
    """Entries and files of one state; the last file is the same in every state."""
    entries, contents = [], {}
    for number in range(files):
        mark = f"{name}{number}" if number < files - 1 else "common"
        file = f"case{number}.exact.{mark.encode().hex():0>12}{store.SUFFIX}"
        contents[file] = (f"{mark} ".encode() * size)[:size]
        entries.append(entry(f"case{number}", file, reason=name))
    return entries, contents


def entry(case: str, file: str, reason: str) -> store.Entry:
    return store.Entry(
        case, "exact", None, reason, f"f.py::{case}", file, "", "", {}, {}, {"out": file}
    )


def put(folder: Path, made: tuple[list[store.Entry], dict[str, bytes]]) -> None:
    with store.locked(folder):
        there = {path.name for path in folder.iterdir()}
        new = {name: content for name, content in made[1].items() if name not in there}
        store.write(folder, made[0], new)


def which(folder: Path, states: list[tuple[list[store.Entry], dict[str, bytes]]]) -> int:
    """The number of the state that the folder is in, to the byte. SystemExit if it is in none."""
    index = store.read(folder)
    for number, (entries, contents) in enumerate(states):
        if list(index.entries) == entries:
            for name, content in contents.items():
                if (folder / name).read_bytes() != content:
                    sys.exit(f"{name} of state {number} holds something else")
            return number
    sys.exit(f"neither the old nor the new state: {[one.reason for one in index.entries]}")


def clean(folder: Path, made: tuple[list[store.Entry], dict[str, bytes]]) -> None:
    """A later write of the state that is there removes what a killed one left."""
    put(folder, made)
    left = {path.name for path in folder.iterdir()}
    if left != {store.INDEX, *made[1]}:
        sys.exit(f"left over after a write: {sorted(left - {store.INDEX, *made[1]})}")


def child(work: Callable[[], Any]) -> int:
    """A process that does the work; it never comes back from here."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def kills(folder: Path) -> dict[str, Any]:
    """Kills a process that writes two states in turn, at a random moment, again and again."""
    states = [state("a", 4, 150_000), state("b", 4, 150_000)]
    put(folder, states[0])
    started = time.monotonic()
    for number in (1, 0, 1, 0):
        put(folder, states[number])
    whole = (time.monotonic() - started) / 4
    seen = {"kills": 0, "inside": 0, "old": 0, "new": 0, "leftovers": 0, "partial": 0}
    draw = random.Random(0)
    now = 0
    for number in range(KILLS):
        source, sink = os.pipe()

        def alternate(now: int = now, sink: int = sink) -> None:
            while True:
                os.write(sink, b"b")
                now = 1 - now
                put(folder, states[now])
                os.write(sink, b"e")

        pid = child(alternate)
        os.close(sink)
        told = os.read(source, 1)  # it is about to write
        time.sleep(draw.uniform(0, 1.5 * whole))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while chunk := os.read(source, 4096):
            told += chunk
        os.close(source)
        done, inside = told.count(b"e"), told.endswith(b"b")
        before = (now + done) % 2
        now = which(folder, states)
        if not inside and now != before:
            sys.exit("a write that had ended is gone")
        files = {path.name for path in folder.iterdir()} - {store.INDEX, *states[now][1]}
        seen["kills"] += 1
        seen["inside"] += inside
        seen["old"] += inside and now == before
        seen["new"] += inside and now != before
        seen["leftovers"] += bool(files)
        seen["partial"] += any(name.startswith(".partial-") for name in files)
        if number % 10 == 9:
            clean(folder, states[now])
    return seen


class _Counted:
    """A file of which every write first writes half, counts, and then writes the rest."""

    def __init__(self, file: Any, count: Callable[[], None]) -> None:
        self.file, self.count = file, count

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        half = len(content) // 2
        self.file.write(content[:half])
        self.file.flush()
        self.count()
        self.file.write(content[half:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def first(folder: Path) -> dict[str, Any]:
    """The steps of the first write of all, in a folder that is not there yet."""
    return steps(folder, exists=False)


def steps(folder: Path, *, exists: bool = True) -> dict[str, Any]:
    """Kills a writer at every one of its steps in turn: before and after each call, inside of each
    write. Until the index is renamed it is the old state, from then on the new one."""
    old: tuple[list[store.Entry], dict[str, bytes]] = ([], {})
    states = [state("a", 4, 20_000) if exists else old, state("b", 4, 20_000)]
    outcomes: list[int] = []
    while True:
        last = len(outcomes)
        if exists:
            put(folder, states[0])
        else:
            shutil.rmtree(folder, ignore_errors=True)

        def write(last: int = last) -> None:
            taken = 0

            def step() -> None:
                nonlocal taken
                if taken == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                taken += 1

            def counted(call: Callable[..., Any]) -> Callable[..., Any]:
                def run(*args: Any, **kwargs: Any) -> Any:
                    step()
                    result = call(*args, **kwargs)
                    step()
                    return result

                return run

            for name in ("replace", "fsync", "unlink", "open", "mkdir"):
                setattr(os, name, counted(getattr(os, name)))
            store.open = lambda *args: _Counted(counted(builtins.open)(*args), step)  # type: ignore[attr-defined]
            put(folder, states[1])

        pid = child(write)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status)
        if killed:
            outcomes.append(which(folder, states))
        elif which(folder, states) != 1:
            sys.exit("a writer that nobody killed did not write")
        clean(folder, states[which(folder, states)])
        if not killed:
            return {"steps": len(outcomes), "outcomes": "".join("on"[one] for one in outcomes)}


def writers(folder: Path) -> dict[str, Any]:
    """Several processes that each add entries, one at a time, to what is there."""

    def add(writer: int) -> None:
        for number in range(EACH):
            case = f"w{writer}-{number:02}"
            file = f"{case}.exact.{case.encode().hex()[:12]:0>12}{store.SUFFIX}"
            with store.locked(folder):
                there = store.read(folder).entries
                store.write(folder, [*there, entry(case, file, "")], {file: case.encode()})

    pids = [child(lambda writer=writer: add(writer)) for writer in range(WRITERS)]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    index = store.read(folder)
    wrong = [
        one.case for one in index.entries if (folder / one.file).read_bytes() != one.case.encode()
    ]
    return {"entries": [one.case for one in index.entries], "wrong": wrong, "codes": codes}


if __name__ == "__main__":
    if "torch" in sys.modules or "numpy" in sys.modules:
        sys.exit("verify.goldens.store imports torch or numpy")
    modes = {"kills": kills, "steps": steps, "first": first, "writers": writers}
    print(json.dumps(modes[sys.argv[1]](Path(sys.argv[2]))))
