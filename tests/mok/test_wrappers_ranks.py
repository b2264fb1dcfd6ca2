"""DDP and checkpoints over two gloo processes; all checks are in wrappers_worker.py, one start."""

import os
import subprocess
import sys
from pathlib import Path

import moe_block
import pytest

import mok

WORKER = Path(__file__).with_name("wrappers_worker.py")


@pytest.mark.slow
def test_replicas_and_expert_parallel_checkpoints(tmp_path):
    folders = (Path(mok.__file__).parent.parent, Path(moe_block.__file__).parent)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders),
    }
    environment.pop("MOK_CHECK", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
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
