"""A result that leaves its reference: where, how large, and what rounding does not hide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verify.budgets import Reference, judge, reduction, round_to
from verify.explanation import reference_errors
from verify.explanation.reference_errors import explain_errors, places, ranges
from verify.inputs import generate

DTYPES = (torch.float32, torch.bfloat16)


def right(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Reference]:
    a, b = generate("a", (rows, 20)).double(), generate("b", (20, columns)).double()
    exact, size = a @ b, a.abs() @ b.abs()
    return round_to(exact, dtype).to(dtype), reduction(exact, size, 20, dtype)


def explained(actual: Tensor, reference: Reference) -> dict[str, Any]:
    return explain_errors("out", actual, judge("out", actual, reference))


def hints(actual: Tensor, reference: Reference) -> str:
    return "\n".join(explained(actual, reference)["suggests"])


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return round_to(value, dtype).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_result_is_not_explained(dtype: torch.dtype) -> None:
    assert explained(*right(30, 12, dtype)) == {"lines": [], "suggests": []}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_inside_the_budget_do_not_hide_a_tail_of_zeros(dtype: torch.dtype) -> None:
    a, b = generate("a", (30, 20)), generate("b", (20, 140))
    _, reference = right(30, 140, dtype)
    result = (a @ b).to(dtype)  # rounded otherwise than the reference in many places
    result[:, 128:] = 0
    found = explained(result, reference)
    assert found["lines"][0] == "wrong in columns 128..139 (12 of 140)"
    text = "\n".join(found["suggests"])
    assert "the output has exact zeros in all 360 places" in text
    assert "128 is the last multiple of 128: a tail tile" in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.4, 1.5, -0.25, 3.0])
def test_a_constant_factor(dtype: torch.dtype, factor: float) -> None:
    _, reference = right(30, 12, dtype)
    text = hints(rounded(factor * reference.exact, dtype), reference)
    assert ("the output is 3x" if factor == 3 else f"constant ratio {factor:.4g}") in text
    assert "factor of its own" not in text
    some = rounded(reference.exact, dtype)
    some[:, 3] = rounded(factor * reference.exact, dtype)[:, 3]
    assert "in column 3" in explained(some, reference)["lines"][0]
    assert ("is 3x" if factor == 3 else "constant ratio") in hints(some, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_factor_is_made_up(dtype: torch.dtype) -> None:
    _, reference = right(30, 12, dtype)
    noise = 1 + 0.1 * generate("noise", (30, 12)).double()
    for value in (reference.exact * noise, reference.exact + 1, generate("o", (30, 12)).double()):
        text = hints(rounded(value, dtype), reference)
        assert "ratio" not in text
        assert "factor" not in text
        assert "is 3x" not in text
    wide = Reference(reference.exact, 5 + 0 * reference.budget, reference.exact, reference.margin)
    assert "ratio" not in hints(rounded(2 * reference.exact, dtype), wide), "the budget hides it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor_for_every_group_of_rows(dtype: torch.dtype) -> None:
    _, reference = right(12, 14, dtype)
    factors = torch.ones(12, 1).double()
    factors[:3], factors[7:9] = 2.0, 0.5
    text = hints(rounded(factors * reference.exact, dtype), reference)
    assert "each of the 5 wrong rows" in text
    assert "(rows 0..2: 2; rows 7..8: 0.5)" in text


def test_factors_that_add_up_to_one_over_the_rows() -> None:
    _, reference = right(12, 14, torch.float32)
    shares = torch.softmax(generate("s", (12, 1)).double(), 0)
    text = hints(rounded(shares * reference.exact, torch.float32), reference)
    assert "they add up to 1 over the rows: normalised over the wrong axis" in text
    text = hints(rounded(2 * shares * reference.exact, torch.float32), reference)
    assert "a scale or a normalisation of the rows" in text
    assert "wrong axis" not in text


def softmax_along(dim: int) -> tuple[Tensor, Reference]:
    scores = generate("scores", (12, 12)).double() * 2
    exact = torch.softmax(scores, 1)
    return torch.softmax(scores, dim).float(), reduction(exact, exact, 20, torch.float32)


def test_a_softmax_along_the_wrong_axis() -> None:
    text = hints(*softmax_along(0))
    assert "every row of the reference adds up to 1, in the output every column does" in text
    wrong, reference = softmax_along(1)
    wrong[3, 4] += 0.25
    assert "wrong axis" not in hints(wrong, reference)


def test_raw_scores_where_shares_are_expected() -> None:
    _, reference = softmax_along(1)
    text = hints(generate("scores", (12, 12)) * 2, reference)
    assert "the reference lies in [0, 1], the output in [-" in text
    assert "softmax or sigmoid left out" in text
    assert "other values altogether" not in text
    assert "[0, 1]" not in hints(*softmax_along(0))


def test_something_where_nothing_should_be() -> None:
    result, reference = right(30, 12, torch.float32)
    mask = torch.ones(30, 1).double()
    mask[4:7] = 0
    parts = (reference.exact, reference.budget, reference.unrounded, reference.margin)
    masked = Reference(*(part * mask for part in parts))
    text = hints(result, masked)
    assert "the reference is exactly 0 in all 36 places" in text
    assert "neither written nor cleared" in text
    assert "has exact zeros" not in text
    result[0, 0] += 1
    assert "exactly 0" not in hints(result, masked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_the_reference_in_another_order(dtype: torch.dtype) -> None:
    _, reference = right(30, 12, dtype)
    result = (generate("a", (30, 20)) @ generate("b", (20, 12))).to(dtype)
    assert "all moved by 2" in hints(result.roll(2, 0), reference)
    index = torch.arange(30)
    index[3:29] += 1
    text = hints(result[index], reference)
    assert "a row of the reference from elsewhere (row 3 holds row 4)" in text
    assert "no bijection" in text
    changed = result[index].clone()
    changed[5] += 1
    assert "bijection" not in hints(changed, reference)


def test_nan_and_few_ulps() -> None:
    result, reference = right(30, 12, torch.float32)
    spoilt = result.clone()
    spoilt[4:6] = float("nan")
    found = explained(spoilt, reference)
    assert found["lines"][0] == "wrong in rows 4..5 (2 of 30)"
    assert "24 NaN where the reference has a number" in found["suggests"][0]
    tight = Reference(
        reference.exact, reference.budget / 64, reference.exact, reference.margin / 64
    )
    steps = generate("steps", (30, 12), torch.int32, kind="integers", low=4, high=9)
    nudged = (result.view(torch.int32) + steps).view(torch.float32)
    text = hints(nudged, tight)
    assert "rounded at another place, or accumulated in lower precision" in text
    assert "unordered" not in text


def test_one_number_for_the_whole_tensor_beside_its_rows() -> None:
    result, reference = right(1000, 12, torch.float32)
    result[:170] = 0
    said = explained(result, reference)["lines"]
    assert said[0] == "wrong in rows 0..169 (170 of 1000)"
    assert said[1].startswith("relative error of the wrong rows 1 to 1, of all others at most ")
    exact, wrong = reference.exact, result.double()
    relative = float((wrong - exact).norm() / exact.norm())
    alike = 1 - 2 * float((wrong * exact).sum() / (wrong.square() + exact.square()).sum())
    assert said[1].endswith(
        f"would be {relative:.3g} (relative L2) or {alike:.3g} (1 - 2xy / (xx + yy))"
    )
    assert 0.05 < alike < 0.15, "a limit of 0.1 or so would let it pass"


def test_known_causes_come_first_and_take_the_place_of_vague_ones() -> None:
    _, reference = right(30, 12, torch.float32)
    other = generate("o", (30, 12))
    judged = judge("out", other, reference)
    assert "other values altogether" in explain_errors("out", other, judged)["suggests"][-1]
    assert explain_errors("out", other, judged, ["known"])["suggests"] == ["known"]


def test_places() -> None:
    mask = torch.zeros(4, 5, 6, dtype=torch.bool)
    mask[1, :, 2:4] = True
    assert places(mask) == ["wrong in dim 0 at 1 (1 of 4), dim 2 at 2..3 (2 of 6)"]
    assert places(~torch.zeros(3, 3, dtype=torch.bool)) == ["wrong in every row and column"]
    assert places(torch.tensor([False, True])) == ["wrong in element 1 (1 of 2)"]
    assert places(torch.tensor(True)) == []
    assert places(torch.zeros(3, dtype=torch.bool)) == []


def mask_of(indices: list[int], size: int = 50) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[indices] = True
    return mask


def test_ranges() -> None:
    assert ranges(mask_of([0, 1, 2, 3])) == "0..3"
    assert ranges(mask_of([1, 3, 7, 8, 9])) == "1, 3, 7..9"
    assert ranges(mask_of(list(range(0, 40, 2)))) == "0, 2, 4, 6, 8, 10 and 14 more"
    assert ranges(mask_of([])) == ""
    assert ranges(mask_of([4, 48, 49])) == "4, 48..49"
    assert ranges(mask_of([], 0)) == ""
    assert ranges(mask_of([0], 1)) == "0"


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_ranges_in_blocks_are_those_of_all_indices(bits: list[bool], block: int) -> None:
    runs: list[list[int]] = []
    for index, bit in enumerate(bits):
        if bit and runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        elif bit:
            runs.append([index])
    shown = [f"{r[0]}..{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs[:6]]
    more = f" and {len(runs) - 6} more" if len(runs) > 6 else ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference_errors, "_BLOCK", block)
        assert ranges(torch.tensor(bits, dtype=torch.bool)) == ", ".join(shown) + more


def test_only_indices_that_are_shown_become_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector of a billion wrong elements is no list of a billion numbers."""
    listed, tolist = [], Tensor.tolist

    def counted(value: Tensor) -> Any:
        listed.append(value.numel())
        return tolist(value)

    monkeypatch.setattr(Tensor, "tolist", counted)
    wrong = torch.arange(50_000) % 3 != 0
    said = places(wrong)
    assert said == [
        "wrong in elements 1..2, 4..5, 7..8, 10..11, 13..14, 16..17 and 16661 more (33333 of 50000)"
    ]
    assert 0 < sum(listed) < 50


def test_one_element_outside_is_no_softmax_that_was_left_out() -> None:
    wrong, reference = softmax_along(1)
    wrong[3, 4] = -0.5
    text = hints(wrong, reference)
    assert "[0, 1]" not in text
    many = wrong.clone()
    many[3] = generate("scores", (12, 12))[3] * 5 - 1
    assert "[0, 1]" in hints(many, reference), "a row of which most is outside"
    single = Reference(
        *(
            part[:, :1]
            for part in (reference.exact, reference.budget, reference.unrounded, reference.margin)
        )
    )
    assert "[0, 1]" not in hints(wrong[:, :1] - 1.0 * (torch.arange(12)[:, None] == 3), single)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 2, 3)])
def test_every_dtype_and_shape_gets_through(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    exact = torch.ones(shape, dtype=torch.float64)
    zero = torch.zeros_like(exact)
    found = explained(torch.zeros(shape).to(dtype), Reference(exact, zero, exact, zero))
    assert set(found) == {"lines", "suggests"}
