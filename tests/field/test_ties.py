"""Reports of choices that are not unique, or wrong, and of columns that go wrong with a period."""

from __future__ import annotations

import pytest
from field_table import Field
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

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
