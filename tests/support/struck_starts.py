"""Ctrl-C at the worst moments: inside the start of a process, and inside the wait for its end."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest


def strike_start(
    monkeypatch: pytest.MonkeyPatch, number: int, *, waits: bool = False
) -> list[subprocess.Popen[Any]]:
    """SIGINT to this process right after the fork of the process with this number, from 1 up.

    waits: once more in the first wait for any of them. What has been started so far is in the list
    that is returned.
    """
    started: list[subprocess.Popen[Any]] = []
    struck: list[int] = []

    class Struck(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            if len(started) == number:
                signal.raise_signal(signal.SIGINT)

        def wait(self, timeout: float | None = None) -> int:
            if waits and not struck:
                struck.append(self.pid)
                signal.raise_signal(signal.SIGINT)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Struck)
    return started
