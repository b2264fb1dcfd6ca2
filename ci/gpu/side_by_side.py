"""Commands as processes of their own, several at a time: what waits for a host runs side by side.

One that fails ends them all, since others may wait for it, and time on a GPU is dear. Refuses to
judge: it tells exit codes, and leaves what commands wrote to who asked.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Sequence

from verify.interrupts import interrupts_held

PATIENCE = 300.0  # seconds for all of them together
POLL = 0.05  # seconds between two looks at what runs


def grown(seconds: float, ranks: int) -> float:
    """Time for so many ranks that wait for each other: half as much again for every doubling, as
    the host starts more of them and the slowest of more is slower."""
    return seconds * (1 + 0.5 * math.log2(ranks))


def run_side_by_side(
    commands: Sequence[Sequence[str]], at_once: int, patience: float = PATIENCE
) -> None:
    """Runs commands in their order, at most `at_once` at a time, until all have ended with 0.

    Their standard output is dropped, errors are shown. Raises RuntimeError when one ends otherwise
    or all are not done within `patience` seconds. What still runs then is killed, and likewise
    when an exception strikes.
    """
    until = time.monotonic() + patience
    waiting = list(commands)
    started: list[subprocess.Popen[bytes]] = []
    try:
        while True:
            codes = [one.poll() for one in started]  # one look: what failed leaves no room
            for one, code in zip(started, codes, strict=True):
                if code:
                    raise RuntimeError(f"exit code {code} of {_words(one)}; must be 0")
            running = codes.count(None)
            if not waiting and not running:
                return
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{len(commands)} commands, {at_once} at once, were not done after "
                    f"{patience:g} s"
                )
            for command in waiting[: at_once - running]:
                with interrupts_held():
                    started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            del waiting[: at_once - running]
            time.sleep(POLL)
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.wait()


def _words(one: subprocess.Popen[bytes]) -> str:
    given = one.args
    return given if isinstance(given, str) else " ".join(map(str, given))  # type: ignore[arg-type]
