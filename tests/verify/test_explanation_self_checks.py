"""A reference that is no float64 computation is told from one that is, and from exact values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from verify.budgets import Reference, reduction
from verify.explanation.self_checks import coarse, moved, precisions, widened
from verify.inputs import generate

Inputs = Mapping[str, Tensor]
NARROW = (torch.float32, torch.bfloat16)


def given(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"x": generate("x", (40, 32), dtype), "w": generate("w", (32, 16), dtype)}


def product(inputs: Inputs, how: Callable[[Tensor], Tensor], out: torch.dtype) -> Reference:
    x, w = inputs["x"], inputs["w"]
    size = x.double().abs() @ w.double().abs()
    return reduction((how(x) @ how(w)).double(), size, 32, out)


def as_they_are(t: Tensor) -> Tensor:
    return t


def as_double(t: Tensor) -> Tensor:
    return t.double()


def as_tf32(t: Tensor) -> Tensor:
    if t.dtype != torch.float32:
        return t
    return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("out", NARROW, ids=str)
@pytest.mark.parametrize("how", [as_they_are, as_tf32])
def test_a_computation_in_its_inputs_precision(
    how: Callable[[Tensor], Tensor], out: torch.dtype
) -> None:
    inputs = given()
    text = moved(product(inputs, how, out), product(widened(inputs), how, out), out)
    assert text is not None
    assert "of 640 elements" in text
    assert "does not compute in float64" in text


@pytest.mark.parametrize("out", [*NARROW, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_float64_computation_does_not_move(dtype: torch.dtype, out: torch.dtype) -> None:
    inputs = given(dtype)
    one, two = product(inputs, as_double, out), product(widened(inputs), as_double, out)
    assert moved(one, two, out) is None
    assert coarse(one, inputs) is None


def test_inner_roundings_of_a_contract_may_move() -> None:
    """`unrounded` may be made by rounding operations; `exact` may not."""
    inputs = given()
    one, two = (product(i, as_double, torch.bfloat16) for i in (inputs, widened(inputs)))
    early = Reference(one.exact, one.budget, one.exact.float().double(), one.margin)
    late = Reference(two.exact, two.budget, two.exact, two.margin)
    assert moved(early, late, torch.bfloat16) is None


def test_what_cannot_be_compared_is_not_judged() -> None:
    one = product(given(), as_double, torch.float32)
    nan = Reference(*(torch.full_like(one.exact, float("nan")) for _ in range(4)))
    assert moved(nan, nan, torch.float32) is None
    other = Reference(*(part[:3] for part in (one.exact, one.budget, one.exact, one.margin)))
    assert moved(one, other, torch.float32) is None


def test_widened_changes_the_dtype_of_floats_alone() -> None:
    before = {
        "f": torch.tensor([0.1]),
        "h": torch.tensor([0.1]).half(),
        "c": torch.tensor([0.1j]),
        "i": torch.tensor([3]),
        "b": torch.tensor([True]),
        "q": torch.ones(2).to(torch.float8_e4m3fn),
    }
    after = widened(before)
    kinds = {name: after[name].dtype for name in after}
    assert kinds == {
        "f": torch.float64,
        "h": torch.float64,
        "c": torch.complex128,
        "i": torch.int64,
        "b": torch.bool,
        "q": torch.float8_e4m3fn,
    }
    assert after["f"].item() == before["f"].item()
    after["i"].zero_()
    assert before["i"].item() == 3


def test_values_that_were_rounded_to_float32() -> None:
    inputs = given()
    stored = product(inputs, as_double, torch.float32)
    stored = Reference(
        stored.exact.float().double(), stored.budget, stored.unrounded, stored.margin
    )
    text = coarse(stored, inputs)
    assert text is not None
    assert "all 640 values have at most 24 significant bits" in text
    one_wide = stored.exact.clone()
    one_wide[3, 3] += 2.0**-40
    parts = (stored.budget, stored.unrounded, stored.margin)
    assert coarse(Reference(one_wide, *parts), inputs) is None


def exact_of(value: Tensor) -> Reference:
    return reduction(value.double(), value.double().abs(), 4, torch.float32)


def test_values_that_are_exact_by_nature() -> None:
    x = given()["x"]
    whole = generate("i", (40, 32), kind="integers", low=-(2**23), high=2**23)
    grid = generate("i", (40, 32), torch.int64, kind="integers", low=-(2**24), high=2**24)
    assert coarse(exact_of(whole), {}) is None
    assert coarse(exact_of(grid.double() / 1024), {}) is None
    assert coarse(exact_of(x), {"x": x}) is None, "a copy"
    assert coarse(exact_of(-4 * x.t()), {"x": x, "ids": torch.arange(3)}) is None, "times 2**n"
    assert coarse(exact_of(torch.relu(x)), {"x": x}) is None
    assert coarse(exact_of(x.bfloat16()), {}) is None
    assert coarse(exact_of(torch.zeros(100)), {}) is None
    assert coarse(exact_of(x[0, :10]), {}) is None, "too few to tell"
    zero = torch.zeros_like(x).double()
    certain = Reference(x.double(), zero, x.double(), zero)
    assert coarse(certain, {}) is None, "without a budget nothing was rounded"


def test_settings_that_lower_precision_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precisions() == ""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert precisions() == "torch.get_float32_matmul_precision() is 'medium'"
