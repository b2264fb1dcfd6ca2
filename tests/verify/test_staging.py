"""Inputs of an execution: the batch entries that were asked for, and the layout that they had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import verify
from verify.staging import give, prepare

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "channels last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}


def order_of(value: Tensor) -> list[int]:
    return sorted(range(value.dim()), key=value.stride, reverse=True)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_chosen_entries_keep_the_order_of_dimensions(
    kind: str, dim: int, dtype: torch.dtype
) -> None:
    whole = verify.inputs.generate("x", (5, 6, 7), torch.int64, kind="integers", low=0, high=2)
    value = LAYOUTS[kind](whole.to(dtype))
    case = verify.case(
        name="c", setup=lambda: {"x": value}, batch={"x": dim, "out": dim}, claims=("batch",)
    )(lambda x: x)
    rows = torch.tensor([3, 0, 4])
    chosen = give(prepare(case), 1, 0, rows=rows).tensors["x"]
    assert torch.equal(chosen, value.index_select(dim, rows))
    assert chosen.dtype == dtype
    assert order_of(chosen) == order_of(value)


def test_a_layout_that_sums_otherwise_is_no_dependence_on_the_batch() -> None:
    """Rows of a transposed input are added in another order than those of a contiguous one."""
    seen: list[list[int]] = []

    def function(x: Tensor) -> Tensor:
        if len(x) > 1:  # one entry alone has no order
            seen.append(order_of(x))
        return x * 2

    def setup() -> dict[str, Tensor]:
        return {"x": verify.inputs.generate("x", (40, 9)).t()}

    case = verify.case(name="c", setup=setup, batch={"x": 0, "out": 0}, claims=("batch",))(function)
    assert not verify.check(case).claims[0].findings
    assert len(seen) > 5
    assert all(order == [1, 0] for order in seen), seen
