"""Runs a script as several ranks that meet in a file store; each must say that it checked all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_ranks(worker: Path, ranks: int, store: Path, folders: Sequence[Path]) -> None:
    """Starts `worker RANK STORE` for every rank with `folders` on its path, and checks each end.

    AssertionError names the rank and what it printed.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders),
    }
    environment.pop("MOK_CHECK", None)
    started = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    try:
        told = [rank.communicate(timeout=150)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
    for number, (rank, text) in enumerate(zip(started, told, strict=True)):
        assert rank.returncode == 0, f"rank {number}:\n{text}"
        assert f"rank {number} checked everything" in text
