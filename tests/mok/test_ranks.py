"""Expert parallelism over four gloo processes; all checks are in ranks_worker.py, one start."""

from pathlib import Path

import pytest
from rank_scripts import run_ranks

import mok

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_expert_parallel_over_four_ranks(tmp_path):
    run_ranks(WORKER, 4, tmp_path / "store", [Path(mok.__file__).parent.parent])
