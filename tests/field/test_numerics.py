"""Reports of stable but wrong numbers: caught, placed and explained; twins clean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from field_table import Field, said
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

pytestmark = pytest.mark.slow
ONE_THREAD = True

OVER: dict[str, Any] = {"claim": "reference", "reason": "over-budget", "tensor": "out"}
WEAK: dict[str, Any] = {"claim": "reference", "reason": "weak-reference"}
ALTOGETHER = "other values altogether"

FIELDS = (
    Field(
        "BUG-18",
        "the tail of a tile is dropped",
        "bug_18",
        "bug_18_twin",
        **OVER,
        says=[
            r"wrong in columns 256\.\.299 \(44 of 300\)",
            "the output has exact zeros in all 748 places",
            "256 is the last multiple of 256: a tail tile not launched",
        ],
    ),
    Field(
        "BUG-18",
        "a tail of one column",
        "bug_18_one_more",
        "bug_18_short_twin",
        **OVER,
        says=[r"wrong in column 256 \(1 of 257\)", "a tail tile not launched"],
    ),
    Field(
        "BUG-18",
        "rows past the first block are never visited",
        "bug_18_rows",
        "bug_18_rows_twin",
        **OVER,
        says=[r"wrong in rows 16\.\.32 \(17 of 33\)", "only the first tile was processed"],
    ),
    Field(
        "BUG-18",
        "an index is one off from some entry on",
        "bug_18_index",
        "bug_18_rows_twin",
        **OVER,
        says=[r"row of the reference from elsewhere \(row 3 holds row 4\).*no bijection"],
    ),
    Field(
        "BUG-23",
        "gate and up projection exchanged",
        "bug_23",
        "bug_23_twin",
        **OVER,
        says=[r"fits the reference with w_gate and w_up exchanged \(worst error / budget 0\.0"],
        silent=[ALTOGETHER],
    ),
    Field(
        "BUG-23",
        "interleaved rows read as halves",
        "bug_23_interleaved",
        "bug_23_stacked_twin",
        **OVER,
        says=["fits the reference with interleaved rows of dim 0 of w13 taken for halves"],
    ),
    Field(
        "BUG-23",
        "the halves exchanged",
        "bug_23_halves",
        "bug_23_stacked_twin",
        **OVER,
        says=["fits the reference with the halves of dim 0 of w13 exchanged"],
    ),
    Field(
        "BUG-23",
        "the activation on both, which no layout explains",
        "bug_23_both",
        "bug_23_twin",
        **OVER,
        silent=["fits the reference"],
    ),
    Field(
        "BUG-25",
        "an offset overflows",
        "bug_25",
        "bug_25_twin",
        **OVER,
        says=[
            r"wrong in rows 164\.\.199 \(36 of 200\)",
            r"every row from 164 on differs \(of 200\), none before",
            r"offset 164 \* 200 passes 2\*\*15: overflow",
        ],
    ),
    Field(
        "BUG-26",
        "a mean over the tensor hides dead rows",
        "bug_26",
        "bug_26_twin",
        **OVER,
        says=[
            r"wrong in rows 0\.\.169 \(170 of 1000\)",
            "relative error of the wrong rows 1 to 1, of all others at most [0-9.]+e-0[78]",
            r"one number .* would be 0\.398 \(relative L2\) or 0\.0862 \(1 - 2xy",
            "exact zeros in all 2720 places",
        ],
    ),
    Field(
        "BUG-26",
        "one dead row",
        "bug_26_one",
        "bug_26_twin",
        **OVER,
        says=[r"wrong in row 42 \(1 of 1000\)", r"worst error / budget: .*\(row 42: "],
    ),
    Field(
        "BUG-27",
        "a selection bias in bf16 collapses to a few values",
        "bug_27",
        "bug_27_twin",
        claim="exact",
        reason="bits-differ",
        tensor="experts",
        says=[
            r"wrong in rows .* \(244 of 512\)",
            "with bias rounded to bfloat16: 238 distinct values become 9",
        ],
    ),
    Field(
        "BUG-27",
        "the bias is a buffer in bf16",
        "bug_27_stored",
        "bug_27_stored_twin",
        claim="exact",
        reason="bits-differ",
        tensor="out",
        says=[
            r"wrong in rows .* \(244 of 512\)",
            r"router\.bias holds 9 distinct values in 238 elements, a spread of 8 steps",
        ],
        silent=["is what is expected with"],
    ),
    Field(
        "BUG-29",
        "strides of a transposed view are ignored",
        "bug_29",
        "bug_29_twin",
        **OVER,
        says=["fits the reference with x read in storage order, its strides ignored"],
    ),
    Field(
        "BUG-29",
        "strides of a slice are ignored",
        "bug_29_strided",
        "bug_29_strided_twin",
        **OVER,
        says=["fits the reference with x read in storage order, its strides ignored"],
    ),
    Field(
        "BUG-29",
        "and what is right for an expanded view is clean",
        "bug_29",
        "bug_29_expanded_twin",
        **OVER,
    ),
    Field(
        "BUG-30",
        "accumulated gradients are a mean of means",
        "bug_30",
        "bug_30_twin",
        claim="reference",
        reason="over-budget",
        says=[
            r"rows 0\.\.2: 2; rows 3\.\.11: 0\.667\): a scale or a normalisation by group of rows"
        ],
    ),
    Field(
        "BUG-30",
        "scaled by the number of steps once more",
        "bug_30_scaled",
        "bug_30_equal",
        claim="reference",
        reason="over-budget",
        says=["the output is 2x in all places: accumulated 2 times instead of once"],
    ),
    Field(
        "BUG-30",
        "pure effects of order are told apart",
        "bug_30_order",
        "bug_30_twin",
        claim="vary",
        reason="bits-differ",
        tensor="w",
        says=["another order of accumulation"],
        silent=["2x", "factor of its own"],
        clean=("reference",),
    ),
    Field(
        "BUG-28",
        "a compiler keeps a product wider than eager",
        "bug_28",
        "bug_28_twin",
        claim="reference",
        reason="wrong-rounding",
        tensor="out",
        says=[
            r"rounded away from every rounding border",
            r"its error against float64 is 0\.[67][0-9] of that of a plain low-precision run: "
            "not less exact; a rounding that the contract asks for is missing",
        ],
        silent=["outside the error budget"],
    ),
    Field(
        "BUG-31",
        "a fused optimizer keeps the loss scale, and its parameters look right",
        "bug_31",
        "bug_31_twin",
        claim="reference",
        reason="over-budget",
        tensor="exp_avg",
        says=[
            r"exp_avg: 320 of 320 elements",
            r"the output is 2\^16 times as large in all places: a loss scale",
            r"the output is 2\^32 times as large in all places: a loss scale that was not divided",
        ],
        silent=[r"parameter: \d+ of 320 elements \(\d+ %\) outside"],
        equal=("parameter",),
    ),
    Field(
        "BUG-31",
        "fused and plain round otherwise, both within their budgets",
        "bug_31",
        "bug_31_plain_twin",
        claim="reference",
        reason="over-budget",
        tensor="exp_avg",
    ),
    Field(
        "BUG-32",
        "a flag lowers the precision of the reference",
        "bug_32",
        "bug_32_twin",
        **WEAK,
        says=[
            r"reference of out: it moves by 0\.000[0-9]+ \(relative L2; 297 of 297",
            "does not compute in float64",
        ],
        silent=["over-budget", "wrong-rounding"],
    ),
    Field(
        "BUG-32",
        "a stored float32 result serves as reference",
        "bug_32_stored",
        "bug_32_whole_twin",
        **WEAK,
        says=["all 297 values have at most 24 significant bits", "computed or stored in float32"],
    ),
    Field(
        "BUG-32",
        "a reference that is not even widened",
        "bug_32_narrow",
        "bug_32_twin",
        claim="reference",
        reason="case-error",
        says=["exact is float32, it must be float64; widen the inputs"],
    ),
    Field(
        "BUG-56",
        "NaN everywhere",
        "bug_56",
        "bug_56_twin",
        claim="reference",
        reason="non-finite",
        tensor="out",
        says=[
            "55 of 64 elements",
            r"first at \[0, 0\]: nan",
            "NaN where the reference has a number",
        ],
        twin_says=["holds NaN or infinity: out"],
    ),
    Field(
        "BUG-56",
        "one NaN",
        "bug_56_one",
        "bug_56_twin",
        claim="reference",
        reason="non-finite",
        tensor="out",
        says=[
            "1 of 64 elements",
            r"first at \[4, 1\]: nan",
            r"wrong in row 4 \(1 of 8\), column 1",
        ],
    ),
    Field(
        "TensorRT-LLM-10331",
        "the error repeats every 32 columns",
        "tensorrt_10331",
        "tensorrt_10331_twin",
        **OVER,
        says=[r"columns c with c mod 32 in \{5\} differ: period 32", "constant ratio 1.5"],
    ),
    Field(
        "vllm-42118",
        "block scales arrive in the wrong order",
        "vllm_42118",
        "vllm_42118_twin",
        **OVER,
        says=["fits the reference with scales read in column-major order"],
    ),
    Field(
        "llvm-57589",
        "flush-to-zero is on",
        "llvm_57589",
        "llvm_57589_twin",
        **OVER,
        says=[r"wrong in columns 16\.\.31 \(16 of 32\)", "flush-to-zero is on"],
        silent=["dropped or masked out"],
    ),
    Field(
        "NeMo-RL-4167",
        "packed sequences attend across borders",
        "nemo_4167",
        "nemo_4167_twin",
        **OVER,
        says=["fits the reference with segments ignored"],
    ),
)


@pytest.mark.parametrize(
    "name", ["bug_18_whole", "bug_29_contiguous", "bug_29_offset", "bug_30_equal"]
)
def test_a_fault_that_these_inputs_do_not_provoke_is_clean(
    name: str, cases: Mapping[str, Any]
) -> None:
    case = cases[name]
    assert [c["verdict"] for c in case["claims"]] == ["VERIFIED"], said(case, case["claims"][0])
