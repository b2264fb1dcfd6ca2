"""A reference that is no float64 computation is told from one that is, and from exact values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from verify.budgets import Reference, reduction
from verify.explanation.narrow import rounded
from verify.explanation.self_checks import coarse, moved, precisions, weakness, widened
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


Function = Callable[[Tensor, Tensor], Tensor]


def told(function: Function, out: torch.dtype = torch.float32) -> str | None:
    """What is said of `function` of x [40, 32] and w [32, 16] as a reference."""
    inputs = given()

    def reference(of: Inputs) -> Reference:
        exact = function(of["x"], of["w"])
        return reduction(exact, exact.abs(), 32, out)

    return weakness(reference(inputs), reference(widened(inputs)), inputs, out)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """The default of torch's RMSNorm, in float64; small rows, for which epsilon matters."""
    wide = x.double() / 1024
    mean = wide.square().mean(-1, keepdim=True)
    return wide * torch.rsqrt(mean + torch.finfo(x.dtype).eps) @ w.double()


TABLE = generate("table", (40, 16))


def looked_up(x: Tensor, w: Tensor) -> Tensor:
    return TABLE[torch.arange(39, -1, -1)].double()


def chosen_in_float32(x: Tensor, w: Tensor) -> Tensor:
    """Indices are chosen by float32 scores, as the layer does; the values are float64."""
    index = (x @ w).softmax(-1).argmax(-1)
    return rms_norm(x, w) * (1 + index[:, None].double())


def masked(x: Tensor, w: Tensor) -> Tensor:
    """Exact in float32: signs, masks, halves, selections, copies into a buffer."""
    parts = torch.stack([-(x * (x > 0)), 0.5 * x.relu()]).sum(0)
    buffer = torch.zeros(40, 32)
    buffer[:] = parts.detach()
    return rms_norm(parts[torch.arange(40)].contiguous().clone(), w) + 0 * buffer.double().sum()


def of_rounded_terms(x: Tensor, w: Tensor) -> Tensor:
    """Casts are not arithmetic: a contract that rounds to bfloat16, and an epsilon."""
    return rms_norm(x.bfloat16().to(x.dtype), w)


@pytest.mark.parametrize(
    "function", [rms_norm, looked_up, chosen_in_float32, masked, of_rounded_terms]
)
def test_a_float64_reference_is_never_called_weak(function: Function) -> None:
    assert told(function) is None
    assert told(function, torch.bfloat16) is None


def test_the_innocent_ones_would_be_suspected_by_one_check_alone() -> None:
    inputs = given()
    one, two = (rms_norm(**i) for i in (inputs, widened(inputs)))
    parts = (reduction(value, value.abs(), 32, torch.float32) for value in (one, two))
    assert moved(*parts, torch.float32) is not None
    assert coarse(exact_of(looked_up(**inputs)), inputs) is not None


def in_float32(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).double()


def stored(x: Tensor, w: Tensor) -> Tensor:
    return (x.double().float() @ w.double().float()).double()


def finished_in_float64(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh((x @ w).double())


def by_rows(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(40, 16, dtype=torch.float64)
    for row in range(40):
        out[row] = (x[row] @ w).double()
    return torch.tanh(out)


def added_up(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(40, 16, dtype=torch.float64)
    return torch.tanh(out.index_add_(0, torch.arange(40), (x @ w).double()))


def einsum(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ij,jk->ik", x, w).double().exp()


def promoted(x: Tensor, w: Tensor) -> Tensor:
    return (x * 0.1).sum(1, keepdim=True) + torch.zeros(16, dtype=torch.float64) + w[0].double()


def numpy(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() @ w.numpy()).double()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (in_float32, "it moves by"),
        (finished_in_float64, "it moves by"),
        (by_rows, "it moves by"),
        (added_up, "it moves by"),
        (einsum, "it moves by"),
        (promoted, "it moves by"),
        (numpy, "it moves by"),
        (stored, "at most 24 significant bits"),
    ],
)
def test_a_reference_that_rounds_on_its_way_is_called_weak(function: Function, says: str) -> None:
    text = told(function)
    assert text is not None
    assert says in text


def test_nothing_is_said_of_a_reference_that_was_not_called_again() -> None:
    one = product(given(), as_they_are, torch.float32)
    assert weakness(one, None, given(), torch.float32) is None
    text = weakness(one, product(widened(given()), as_they_are, torch.float32), given(), torch.half)
    assert text is None or "it moves" in text


def test_watching_gives_the_numbers_of_float64_and_leaves_inputs_as_they_are() -> None:
    inputs = given()
    for function in (rms_norm, in_float32, by_rows, added_up, einsum, promoted):
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        seen = function(**widened(inputs))
        assert seen.dtype == torch.float64
        if function is not rms_norm:
            assert bool(rounded(seen))
        assert torch.equal(seen.as_subclass(Tensor), function(**wide))
    for tensor in inputs.values():
        assert type(tensor) is Tensor


def test_complex_and_integer_tensors_and_drawn_numbers_are_not_taken_for_rounded() -> None:
    wide = widened({"c": torch.randn(4, dtype=torch.complex64), "x": torch.ones(4)})
    assert rounded(wide["c"] * wide["c"].conj() * 0.1)
    assert not rounded(-wide["c"])
    assert not rounded(wide["x"].long() * 3)
    assert not rounded(torch.rand_like(wide["x"]))
    assert not rounded(wide["x"].double() / 3)
    assert rounded((wide["x"] / 3).double())
    assert not rounded(wide["x"].double().mul_(0.1))
