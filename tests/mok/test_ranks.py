"""Expert parallelism over four gloo processes; all checks are in ranks_worker.py, one start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mok

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_expert_parallel_over_four_ranks(tmp_path):
    root = str(Path(mok.__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    environment.pop("MOK_CHECK", None)
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(4)
    ]
    try:
        told = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, text) in enumerate(zip(ranks, told, strict=True)):
        assert rank.returncode == 0, f"rank {number}:\n{text}"
        assert f"rank {number} checked everything" in text
