"""Reports of wrong routing: caught against a reference, placed and explained; twins clean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from field_table import Field, said
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

pytestmark = pytest.mark.slow
ONE_THREAD = True

OVER: dict[str, Any] = {"claim": "reference", "reason": "over-budget"}
EXACT: dict[str, Any] = {"claim": "exact", "reason": "bits-differ"}
NOT_CLEARED = "the reference is exactly 0 in all [0-9]+ places.*neither written nor cleared"
SKIPPED = "scale applied on one side only"

FIELDS = (
    Field(
        "BUG-17",
        "Experts with zero tokens keep garbage weight gradients",
        "bug_17",
        "bug_17_twin",
        **OVER,
        tensor="dw",
        says=[r"wrong in dim 0 at 1, 3 \(2 of 4\)", NOT_CLEARED],
        equal=("dw_shared",),
    ),
    Field(
        "BUG-17",
        "the same without any token",
        "bug_17_none",
        "bug_17_none_twin",
        **OVER,
        tensor="dw",
        says=["wrong in every row and column", NOT_CLEARED],
        silent=["other values altogether"],
        equal=("dw_shared",),
    ),
    Field(
        "BUG-17",
        "the same with one expert that takes all",
        "bug_17_one",
        "bug_17_one_twin",
        **OVER,
        tensor="dw",
        says=[r"wrong in dim 0 at 1\.\.3 \(3 of 4\)", NOT_CLEARED],
        silent=["a bound or an offset"],
        equal=("dw_shared",),
    ),
    Field(
        "BUG-19",
        "-1 (not mine) routing slots are used as an index",
        "bug_19",
        "bug_19_twin",
        **OVER,
        tensor="out",
        says=[
            r"wrong in rows 1, 4, 8 \(3 of 12\)",
            "negative topk_ids used as an index from the end of 4",
            r"every wrong row \(1, 4, 8\) is one in which the input topk_ids holds a negative",
        ],
    ),
    Field(
        "BUG-19",
        "slots of nobody are not written and still added",
        "bug_19_unwritten",
        "bug_19_twin",
        claim="reference",
        reason="non-finite",
        tensor="out",
        says=[
            r"wrong in rows 1, 4, 8 \(3 of 12\)",
            "NaN where the reference has a number: uninitialised memory",
            "the input topk_ids holds a negative number",
        ],
        silent=["fits the reference"],
    ),
    Field(
        "BUG-20",
        "NaN gating makes duplicate expert ids",
        "bug_20",
        "bug_20_twin",
        **EXACT,
        tensor="ids",
        says=[
            r"wrong in row 3 \(1 of 32\)",
            r"same index twice \(row 3: 0, 0, 0\)",
            r"every wrong row \(3\) is one in which the input scores holds NaN or infinity",
        ],
    ),
    Field(
        "BUG-20",
        "an expert named twice counts with both weights",
        "bug_20_twice",
        "bug_20_twice_twin",
        **EXACT,
        tensor="share",
        says=[r"wrong in row 0 \(1 of 2\), column 1 \(1 of 4\)"],
        silent=["suggests: "],
    ),
    Field(
        "BUG-21",
        "top_k = 1 normalises across tokens",
        "bug_21",
        "bug_21_twin",
        **OVER,
        tensor="out",
        says=[
            "24 wrong rows is the reference's times a factor of its own, 0.0[0-9]+ to 0.0[0-9]+",
            "they add up to 1 over the rows: normalised over the wrong axis",
            "every row of the reference adds up to 1, in the output every column does",
        ],
        silent=["other values altogether"],
    ),
    *(
        Field(
            "BUG-22",
            "the routed scaling factor is skipped without renormalisation",
            f"bug_22_plain_2_5_{activation}",
            f"bug_22_plain_2_5_{activation}_twin",
            **OVER,
            tensor="out",
            says=[r"constant ratio 0\.4 \(output / reference, 1 / 2\.5\)", SKIPPED],
        )
        for activation in ("softmax", "sigmoid")
    ),
    Field(
        "BUG-22",
        "raw logits are the weights when there is no renormalisation",
        "bug_22_raw",
        "bug_22_plain_1_softmax_twin",
        **OVER,
        says=[r"reference lies in \[0, 1\], the output in \[-.*a softmax or sigmoid left out"],
    ),
    Field(
        "BUG-24",
        "padding tokens take expert capacity",
        "bug_24",
        "bug_24_twin",
        **OVER,
        tensor="out",
        says=[r"wrong in rows 0\.\.7 \(8 of 12\)", "fits the reference with padding ignored"],
    ),
    Field(
        "BUG-24",
        "the same in the set of tokens that are kept",
        "bug_24",
        "bug_24_twin",
        **EXACT,
        tensor="kept",
        says=[r"wrong in elements 0\.\.7 \(8 of 12\)", "with padding ignored, all False"],
        silent=["rows in another order"],
    ),
    Field(
        "BUG-24",
        "a capacity beyond the number of tokens raises",
        "bug_24_capacity",
        "bug_24_capacity_twin",
        claim="exact",
        reason="case-error",
        says=[r"selected index k out of range \(cases_routing.py, line [0-9]+\)"],
    ),
    Field(
        "aiter-5595",
        "a top-k column is stripped because a mask is present",
        "aiter_5595",
        "aiter_5595_twin",
        **OVER,
        tensor="out",
        says=["fits the reference with the last column of weights left out"],
    ),
    Field(
        "Automodel-3247",
        "recomputation counts expert loads twice",
        "automodel_3247",
        "automodel_3247_twin",
        **EXACT,
        tensor="load",
        says=["2x in all places: accumulated 2 times instead of once"],
    ),
)


def test_a_fault_of_one_setting_is_no_fault_of_the_others(cases: Mapping[str, Any]) -> None:
    """BUG-21 and BUG-22: the faulty code is right for every other k, and every other branch."""
    right = ["bug_21_two", "bug_21_all"]
    right += [n for n in cases if n.startswith("bug_22_") and "plain_2_5" not in n]
    right.remove("bug_22_raw")
    assert len(right) == 2 + 6 + 6
    for name in right:
        case = cases[name]
        assert [c["verdict"] for c in case["claims"]] == ["VERIFIED"], said(case, case["claims"][0])
