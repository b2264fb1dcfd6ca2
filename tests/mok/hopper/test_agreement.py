"""Ranks agree once and then launch: two gloo processes; all checks are in agreement_worker.py."""

from pathlib import Path

import hopper_fakes
import pytest
from rank_scripts import run_ranks

import mok

WORKER = Path(__file__).with_name("agreement_worker.py")


@pytest.mark.slow
def test_a_group_makes_no_collective_after_the_first_call_of_a_kind(tmp_path):
    folders = (Path(mok.__file__).parent.parent, Path(hopper_fakes.__file__).parent)
    run_ranks(WORKER, 2, tmp_path / "store", folders)
