"""DDP and checkpoints over two gloo processes; all checks are in wrappers_worker.py, one start."""

from pathlib import Path

import moe_block
import pytest
from rank_scripts import run_ranks

import mok

WORKER = Path(__file__).with_name("wrappers_worker.py")


@pytest.mark.slow
def test_replicas_and_expert_parallel_checkpoints(tmp_path):
    folders = (Path(mok.__file__).parent.parent, Path(moe_block.__file__).parent)
    run_ranks(WORKER, 2, tmp_path / "store", folders)
