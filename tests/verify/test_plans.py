"""Plans: what is promised, how often, and the command that makes the same evidence again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import verify
from verify.cases import Case
from verify.errors import CaseError
from verify.placements import replicated, sharded
from verify.plans import RunOptions, plan_of, source_digest, sources_of, with_options
from verify.targets import Found


def layer(x: torch.Tensor) -> torch.Tensor:
    return x * 2


FOUND = Found(
    Case(
        name="layer",
        execute=layer,
        inputs={"x": verify.normal(4)},
        placement={"x": sharded(0), "out": replicated},
        batch={"x": 0},
    ),
    "file name.py::layer",
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "--ranks is 0"),
        ({"runs": 0}, "--runs is 0"),
        ({"processes": -1}, "--processes is -1"),
        ({"timeout": 0}, "--timeout is 0"),
        ({"claims": ("speed",)}, "no claim 'speed'; allowed are repeat"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        RunOptions(**options)


def test_counts_of_executions() -> None:
    plan = plan_of(FOUND, RunOptions(runs=9, processes=4), 1)
    others = {"memory": 3, "threads": 3, "history": 2}
    assert dict(plan.runs) == {**others, "repeat": 9, "process": 4, "batch": 1}
    assert plan.placement == {"x": "sharded(0)", "out": "replicated"}
    assert plan.batch == {"x": 0}


def test_several_ranks_always_claim_rank_unless_claims_were_chosen() -> None:
    plan = plan_of(FOUND, RunOptions(), 4)
    assert plan.claims[-1] == "rank"
    assert (plan.ranks, plan.runs["rank"]) == (4, 2)
    chosen = with_options(FOUND, RunOptions(claims=("process", "repeat")))
    assert list(plan_of(chosen, RunOptions(claims=("process", "repeat")), 4).claims) == [
        "repeat",
        "process",
    ]


def test_a_claim_that_the_case_gives_nothing_for() -> None:
    with pytest.raises(CaseError, match="gives no schedule"):
        with_options(FOUND, RunOptions(claims=("schedule",)))


def test_seed() -> None:
    assert with_options(FOUND, RunOptions(seed=7)).case.seed == 7
    assert with_options(FOUND, RunOptions()).case.seed == 0
    assert with_options(FOUND, RunOptions(seed=0)).case.seed == 0


def test_source_digest_follows_content(tmp_path: Path) -> None:
    other = tmp_path / "kernel.cu"
    other.write_text("one")
    case = replace(FOUND.case, sources=(str(other),))
    before = source_digest(case)
    assert source_digest(case) == before
    assert source_digest(FOUND.case) != before
    other.write_text("two")
    assert source_digest(case) != before
    assert sources_of(case)[-1] == "kernel.cu"
    assert source_digest(replace(FOUND.case, execute=torch.relu)) != source_digest(FOUND.case)
