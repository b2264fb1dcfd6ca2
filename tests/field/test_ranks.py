"""Reports of faults between ranks: which rank, how often, the likely cause; twins clean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from field_table import Field, said
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

pytestmark = pytest.mark.slow

FIELDS = (
    Field(
        "BUG-15",
        "a replicated parameter drifts apart between ranks",
        "bug_15",
        "bug_15_twin",
        claim="rank",
        reason="ranks-differ",
        tensor="router.step1",
        says=[
            "replicated router.step1 differs on ranks \\[1\\] of 2",
            "equal in all executions of this claim: mlp.step1, router.step0",
            "a missing reduction over ranks \\(mlp, x is not the same on all\\)",
            "look for a missing collective",
        ],
        equal=("router.step0", "mlp.step1"),
        clean=("repeat",),
    ),
    Field(
        "BUG-15",
        "the same without a placement",
        "bug_15_unplaced",
        "bug_15_twin",
        claim="rank",
        reason="no-placement",
        says=["placement of mlp.step1, router.step0, .* is not declared"],
        clean=("repeat",),
    ),
    Field(
        "BUG-16",
        "one device drifts, all others are stable",
        "bug_16",
        "bug_16_twin",
        claim="repeat",
        reason="bits-differ",
        tensor="out",
        says=[
            "where: tensor out, rank 2",
            "only rank 2 differs, in 4 of 5 runs",
            "the device or memory of rank 2 is suspected",
            "ranks without any difference to their first result: 0, 1, 3",
            "xor 0x00001000",
            "rank 2: 6 executions, 5 different results",
        ],
        silent=["rank [013]:"],
    ),
    Field(
        "BUG-16",
        "the same, from the ranks' side",
        "bug_16",
        "bug_16_twin",
        claim="rank",
        reason="ranks-differ",
        tensor="out",
        says=["replicated out differs on ranks \\[2\\] of 4", "xor 0x00001000"],
        silent=["it is no race"],
    ),
)


def test_noise_that_is_the_same_on_all_ranks_is_noted(
    cases: Mapping[str, Any], counts: Callable[[str, str], None]
) -> None:
    """BUG-11 over ranks: every rank's own noise has the same bits everywhere."""
    fault, twin = cases["bug_11_ranks"], cases["bug_11_ranks_twin"]
    assert fault["verdict"] == "VERIFIED"
    assert any("too equal: out" in note and "all 2 ranks" in note for note in fault["notes"])
    counts("BUG-11", "fault")
    assert twin["verdict"] == "VERIFIED"
    assert not any("too equal" in note for note in twin["notes"])
    counts("BUG-11", "twin")


def test_a_setting_that_differs_on_one_rank_is_tried_again_on_all(cases: Mapping[str, Any]) -> None:
    """The ranks execute together, so none may go on alone."""
    case, twin = cases["one_rank_s_mode"], cases["one_rank_s_mode_twin"]
    vary = next(claim for claim in case["claims"] if claim["claim"] == "vary")
    assert vary["verdict"] == "MISMATCH"
    assert {finding["rank"] for finding in vary["findings"]} == {1}
    assert [one["executions"] for one in vary["ranks"]] == [3, 3]
    assert "fused=True: 3 runs on rank 1, the same result" in said(case, vary)
    assert twin["verdict"] == "VERIFIED"
    vary = next(claim for claim in twin["claims"] if claim["claim"] == "vary")
    assert [one["executions"] for one in vary["ranks"]] == [1, 1]
