"""Reports of choices that are not unique, or wrong, and of columns that go wrong with a period."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from field_table import Field, check_fault, check_twin, parameters, run_file

pytestmark = pytest.mark.slow

FIELDS = (
    Field(
        "BUG-06",
        "a tie at the border of k",
        "bug_06_border",
        "bug_06_border_twin",
        claim="vary",
        reason="bits-differ",
        tensor="ids",
        says=[
            "chosen of that shape is equal: if these integers are indices chosen by it, a tie",
            "then by lowest index",
        ],
        equal=("chosen",),
        clean=("repeat",),
    ),
    Field(
        "BUG-06",
        "the same set in another order",
        "bug_06_order",
        "bug_06_order_twin",
        claim="repeat",
        reason="bits-differ",
        tensor="out",
        says=[
            "unordered floating-point accumulation",
            "equal in all executions of this claim: chosen, ids",
        ],
        silent=["a tie"],
        equal=("ids", "chosen"),
    ),
    Field(
        "BUG-06",
        "an expert with a lower score is chosen",
        "bug_06_wrong",
        "bug_06_wrong_twin",
        claim="exact",
        reason="bits-differ",
        tensor="chosen",
        says=["1 of 192 elements differ", "first: chosen\\[7,2\\] 3.0 .* vs 1.0"],
        silent=["a tie"],
        clean=("repeat",),
    ),
    Field(
        "TensorRT-LLM-10331",
        "the error repeats every 32 columns",
        "period",
        "period_twin",
        claim="exact",
        reason="bits-differ",
        tensor="out",
        says=["c mod 32 in \\{31\\} differ: period 32"],
        clean=("repeat",),
    ),
)


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Any]:
    return run_file(Path(__file__).with_name("cases_ties.py"))


@pytest.mark.parametrize("field", parameters(FIELDS))
def test_the_fault_is_found(
    field: Field, cases: Mapping[str, Any], counts: Callable[[str, str], None]
) -> None:
    check_fault(field, cases)
    counts(field.id, "fault")


@pytest.mark.parametrize("field", parameters(FIELDS))
def test_the_twin_is_clean(
    field: Field, cases: Mapping[str, Any], counts: Callable[[str, str], None]
) -> None:
    check_twin(field, cases)
    counts(field.id, "twin")
