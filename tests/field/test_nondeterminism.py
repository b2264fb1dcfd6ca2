"""Reports of results that differ from run to run: caught, placed and explained; twins clean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from field_table import Field
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

pytestmark = pytest.mark.slow

FIELDS = (
    Field(
        "BUG-01",
        "MoE combine by atomic scatter-add differs every run",
        "bug_01",
        "bug_01_twin",
        claim="repeat",
        reason="bits-differ",
        tensor="out",
        says=[
            "unordered floating-point accumulation",
            r"[0-9]+ of 2000 elements differ",
            "6 executions, 6 different results",
            "equal in all executions of this claim: dk, dv",
        ],
        silent=["first call differs"],
        equal=("dk", "dv"),
    ),
    Field(
        "BUG-02",
        "first call wrong, all later calls equal",
        "bug_02",
        "bug_02_twin",
        claim="repeat",
        reason="bits-differ",
        tensor="out",
        says=[
            "the first call differs from 5 later ones, which agree with each other: warm-up",
            "the base is 3x in all places: accumulated 3 times",
            "inside the reference's budget, so it is the first that is wrong",
            "6 executions, 2 different results",
        ],
        silent=["unordered"],
        clean=("reference",),
    ),
    Field(
        "BUG-02",
        "the first call differs, seen from another claim",
        "bug_02",
        "bug_02_twin",
        claim="history",
        reason="bits-differ",
        tensor="out",
        says=["not a matter of history, see repeat"],
        silent=["state that earlier calls left behind"],
    ),
    Field(
        "BUG-04",
        "rows past the last group are never written",
        "bug_04",
        "bug_04_twin",
        claim="memory",
        reason="bits-differ",
        tensor="out",
        says=[
            "memory read or returned before it was written",
            "every row from 40 on differs",
            "out differs at fill=0xfe, fill=0x80",
        ],
        silent=["unordered"],
    ),
    Field(
        "BUG-04",
        "rows past the last group are read, with weight zero",
        "bug_04_read",
        "bug_04_twin",
        claim="memory",
        reason="bits-differ",
        tensor="total",
        says=["NaN where the (?:base|other) has a number, as soon as new memory is not zero"],
        equal=("norm",),
    ),
    Field(
        "BUG-09",
        "a layer draws from the global generator",
        "bug_09_dropout",
        "bug_09_dropout_twin",
        claim="repeat",
        reason="consumes-global-rng",
        tensor="out",
        says=["global generators drawn from: torch"],
        equal=("norm",),
    ),
)


def test_the_same_numbers_at_every_call_are_noted(
    cases: Mapping[str, Any], counts: Callable[[str, str], None]
) -> None:
    """BUG-11: determinism holds, so it is no failure; that randomness is missing is said."""
    fault, twin = cases["bug_11"], cases["bug_11_twin"]
    assert fault["verdict"] == "VERIFIED"
    assert any("too equal" in note and "draw the same numbers" in note for note in fault["notes"])
    counts("BUG-11", "fault")
    assert twin["verdict"] == "VERIFIED"
    assert not any("too equal" in note for note in twin["notes"])
    counts("BUG-11", "twin")
