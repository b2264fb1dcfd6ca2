"""Ctrl-C between the start of a process and the note that it runs would leave it to nobody."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

HELD = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Handlers of SIGINT, SIGTERM and SIGHUP in Python run after the block instead of inside it.

    For a block that starts a process and notes it where it will be ended: an exception of a handler
    that strikes inside `subprocess.Popen`, after the fork, would lose the process. Keep the block
    short, since it cannot be interrupted. Signals that the system handles or that are ignored stay
    as they are, and so does everything off the main thread, where no handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    with ExitStack() as after:
        after.callback(_deliver, came)
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler):
                after.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield


def _deliver(came: list[tuple[int, FrameType | None]]) -> None:
    """Each signal once to the handler that is there again, though one before it raises."""
    if not came:
        return
    number, frame = came[0]
    try:
        handler = signal.getsignal(number)
        if callable(handler):
            handler(number, frame)
    finally:
        _deliver([one for one in came if one[0] != number])
