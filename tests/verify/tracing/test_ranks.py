"""Recording several ranks: a file for each, names without wrappers, and shards that add up."""

from __future__ import annotations

import operator
from functools import reduce
from pathlib import Path

import pytest
import torch
from rank_scripts import run_ranks
from traced_models import events

import verify
from verify.digests import combine
from verify.tracing.files import read_folder

SCRIPT = Path(__file__).parent / "ranks_script.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks recorded; each has seen equal parameters with and without recording."""
    found = tmp_path_factory.mktemp("ranks")
    run_ranks(SCRIPT, 2, found / "store", [Path(verify.__file__).parents[1]])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "sharded"])
def test_ranks(folder: Path, kind: str) -> None:
    ranks = read_folder(folder / kind)
    assert sorted(ranks) == [0, 1]
    for rank, one in ranks.items():
        assert (one.header.rank, one.header.world, one.complete) == (rank, 2, True)
        assert one.skipped == {}
        assert [step.number for step in one.steps] == [-1, 0, 1]
        names = {event.definition.name for event in events(one.steps[1], "output")}
        assert names == {"(root)", "0", "1", "2"}
        assert len(events(one.steps[1], "grad")) == 4
        assert len(events(one.steps[1], "grad_output")) == 4
    last = [ranks[rank].steps[-1] for rank in (0, 1)]
    parameters = {}
    for mine, other in zip(*(events(step, "parameter") for step in last), strict=True):
        assert mine.key == other.key
        name = mine.definition.name
        if kind == "ddp":
            assert mine.digest == other.digest
            parameters[name] = mine.digest
        else:
            assert mine.definition.whole is not None
            parameters[name] = reduce(operator.add, (mine.digest, other.digest))
    assert set(parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert combine(parameters) == (folder / f"{kind}-0.txt").read_text()
