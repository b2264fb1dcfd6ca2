"""Reports of stable but wrong numbers as small cases: tails, layouts, scales, strides, and more.

One file, however long, since all its cases are executed by one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import verify

Inputs = Mapping[str, Tensor]
F32 = torch.float32


def product(a: Tensor, b: Tensor, dtype: torch.dtype = F32) -> verify.Reference:
    """The reference of a @ b, of float64 factors that are exact."""
    return verify.reduction(a @ b, a.abs() @ b.abs(), a.shape[-1], dtype)


def of_product(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    return {"out": product(inputs["x"].double(), inputs["w"].double())}


def doubled(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    exact = 2 * inputs["x"].double()
    return {"out": verify.reduction(exact, exact.abs(), 1, F32)}


def measured(reference: Callable[..., Any], **options: Any) -> dict[str, Any]:
    return {"claims": ("reference",), "reference": reference, **options}


# BUG-18: the tail of a tile, the rows past the first tile, an index that is one off


def tail_case(name: str, columns: int, tiles: Callable[[int], int]) -> verify.Case:
    """A kernel with a grid of `tiles(columns)` tiles of 256 columns."""

    def execute(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        end = 256 * tiles(columns)
        out[:, :end] = 2 * x[:, :end]
        return out

    inputs = {"x": verify.normal(17, columns)}
    return verify.case(name=name, inputs=inputs, **measured(doubled))(execute)


def rounded_down(columns: int) -> int:
    return columns // 256


def rounded_up(columns: int) -> int:
    return -(-columns // 256)


bug_18 = tail_case("bug_18", 300, rounded_down)
bug_18_one_more = tail_case("bug_18_one_more", 257, rounded_down)
bug_18_whole = tail_case("bug_18_whole", 256, rounded_down)
bug_18_twin = tail_case("bug_18_twin", 300, rounded_up)
bug_18_short_twin = tail_case("bug_18_short_twin", 255, rounded_up)

TALL = {"x": verify.normal(33, 12), "w": verify.normal(12, 9)}


@verify.case(inputs=TALL, **measured(of_product))
def bug_18_rows(x: Tensor, w: Tensor) -> Tensor:
    """One block of 16 rows is launched."""
    out = torch.zeros(33, 9)
    out[:16] = x[:16] @ w
    return out


@verify.case(inputs=TALL, **measured(of_product))
def bug_18_index(x: Tensor, w: Tensor) -> Tensor:
    """From the entry 3 on, the index is one too high."""
    index = torch.arange(33)
    index[3:] += 1
    return (x @ w)[index.clamp(max=32)]


@verify.case(inputs=TALL, **measured(of_product))
def bug_18_rows_twin(x: Tensor, w: Tensor) -> Tensor:
    """All rows."""
    return x @ w


# BUG-23: layouts of the gate and the up projection


def swiglu_reference(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> verify.Reference:
    """(silu(x gate) * (x up)) down with the errors of both products carried through.

    |silu'| <= 1.1; a product of n terms is off by n u times the sum of their magnitudes.
    """
    unit, hidden, width = 2.0**-24, x.shape[1], gate.shape[1]
    g, u = x @ gate, x @ up
    silu = torch.nn.functional.silu(g)
    g_error, u_error = (hidden * unit * (x.abs() @ w.abs()) for w in (gate, up))
    h = silu * u
    h_error = 1.1 * g_error * u.abs() + silu.abs() * u_error + 8 * unit * h.abs()
    carried = 1.01 * h_error @ down.abs()
    whole = verify.reduction(h @ down, h.abs() @ down.abs() + carried, width, F32)
    return verify.Reference(
        whole.exact, whole.budget + carried, whole.unrounded, whole.margin + carried
    )


def of_mlp(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    names = ("x", "w_gate", "w_up", "w_down")
    return {"out": swiglu_reference(*(inputs[name].double() for name in names))}


def of_stacked(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x, w13, down = (inputs[name].double() for name in ("x", "w13", "w_down"))
    return {"out": swiglu_reference(x, *(half.t() for half in w13.chunk(2)), down)}


MLP = {
    "x": verify.normal(20, 12),
    "w_gate": verify.normal(12, 8),
    "w_up": verify.normal(12, 8),
    "w_down": verify.normal(8, 6),
}
STACKED = {
    "x": verify.normal(20, 12),
    "w13": verify.normal(16, 12),
    "w_down": verify.normal(8, 6),
}
silu = torch.nn.functional.silu


@verify.case(inputs=MLP, **measured(of_mlp))
def bug_23(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The gate is where the up projection should be."""
    return (silu(x @ w_up) * (x @ w_gate)) @ w_down


@verify.case(inputs=MLP, **measured(of_mlp))
def bug_23_both(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The activation on both: no layout explains it."""
    return (silu(x @ w_gate) * silu(x @ w_up)) @ w_down


@verify.case(inputs=MLP, **measured(of_mlp))
def bug_23_twin(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """As it should be."""
    return (silu(x @ w_gate) * (x @ w_up)) @ w_down


@verify.case(inputs=STACKED, **measured(of_stacked))
def bug_23_interleaved(x: Tensor, w13: Tensor, w_down: Tensor) -> Tensor:
    """Rows of gate and up are taken to alternate."""
    return (silu(x @ w13[0::2].t()) * (x @ w13[1::2].t())) @ w_down


@verify.case(inputs=STACKED, **measured(of_stacked))
def bug_23_halves(x: Tensor, w13: Tensor, w_down: Tensor) -> Tensor:
    """The halves are exchanged."""
    up, gate = w13.chunk(2)
    return (silu(x @ gate.t()) * (x @ up.t())) @ w_down


@verify.case(inputs=STACKED, **measured(of_stacked))
def bug_23_stacked_twin(x: Tensor, w13: Tensor, w_down: Tensor) -> Tensor:
    """Gate in the first half, up in the second."""
    gate, up = w13.chunk(2)
    return (silu(x @ gate.t()) * (x @ up.t())) @ w_down


# BUG-25: an offset of 16 bits


def gathered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Twice the rows of x, read at offsets of an integer dtype."""
    start = torch.arange(len(x), dtype=dtype) * x.shape[1]
    offsets = start.long()[:, None] + torch.arange(x.shape[1])
    return 2 * x.flatten()[offsets % x.numel()]


SQUARE = {"x": verify.normal(200, 200)}


@verify.case(inputs=SQUARE, **measured(doubled))
def bug_25(x: Tensor) -> Tensor:
    """row * stride wraps at 2**15."""
    return gathered(x, torch.int16)


@verify.case(inputs=SQUARE, **measured(doubled))
def bug_25_twin(x: Tensor) -> Tensor:
    """Offsets of 64 bits."""
    return gathered(x, torch.int64)


# BUG-26: dead rows that no mean sees

MANY = {"x": verify.normal(1000, 8), "w": verify.normal(8, 16)}


@verify.case(inputs=MANY, **measured(of_product))
def bug_26(x: Tensor, w: Tensor) -> Tensor:
    """17 % of the rows are zero."""
    out = x @ w
    out[:170] = 0
    return out


@verify.case(inputs=MANY, **measured(of_product))
def bug_26_one(x: Tensor, w: Tensor) -> Tensor:
    """One row is."""
    out = x @ w
    out[42] = 0
    return out


@verify.case(inputs=MANY, **measured(of_product))
def bug_26_twin(x: Tensor, w: Tensor) -> Tensor:
    """All rows are there."""
    return x @ w


# BUG-27: a selection bias in too few bits


def close_biases() -> dict[str, Tensor]:
    return {"bias": torch.linspace(6.817, 7.063, 238)}


def selected(scores: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The eight best as a set: their indices, ascending."""
    order = torch.argsort(scores + bias, dim=1, descending=True, stable=True)
    return {"experts": order[:, :8].sort(dim=1).values}


def best(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    return selected(inputs["scores"], inputs["bias"])


SELECTION: dict[str, Any] = {
    "inputs": {"scores": verify.uniform(512, 238, low=0)},
    "setup": close_biases,
    "claims": ("exact",),
    "exact": best,
}


@verify.case(**SELECTION)
def bug_27(scores: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The bias went through bfloat16."""
    return selected(scores, bias.bfloat16())


@verify.case(**SELECTION)
def bug_27_twin(scores: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The bias stays in float32."""
    return selected(scores, bias)


class Router(torch.nn.Module):
    """Scores with a bias that is stored in some dtype."""

    bias: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("bias", close_biases()["bias"].to(dtype))

    def forward(self, scores: Tensor) -> Tensor:
        return selected(scores, self.bias)["experts"]


def best_of_trained(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    """With the bias as it was trained."""
    return {"out": selected(inputs["scores"], close_biases()["bias"])["experts"]}


def router_case(name: str, dtype: torch.dtype) -> verify.Case:
    def execute(scores: Tensor, router: torch.nn.Module) -> Tensor:
        return router(scores)

    return verify.case(
        name=name,
        inputs=SELECTION["inputs"],
        setup=lambda: {"router": Router(dtype)},
        claims=("exact",),
        exact=best_of_trained,
    )(execute)


bug_27_stored = router_case("bug_27_stored", torch.bfloat16)
bug_27_stored_twin = router_case("bug_27_stored_twin", F32)


# BUG-29: strides ignored


def stored_otherwise(kind: str) -> Callable[[], dict[str, Tensor]]:
    """A setup that gives x as a view of 16 rows and 12 columns."""

    def setup() -> dict[str, Tensor]:
        big = verify.inputs.generate("big", (24, 32))
        views = {
            "contiguous": big[:16, :12].contiguous(),
            "transposed": big[:12, :16].contiguous().t(),
            "strided": big[:16, :24].contiguous()[:, ::2],
            "expanded": big[:1, :12].contiguous().expand(16, 12),
            "offset": big.flatten()[5 : 5 + 192].view(16, 12),
        }
        return {"x": views[kind]}

    return setup


def column_sums(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x = inputs["x"].double()
    return {"out": verify.reduction(x.sum(0), x.abs().sum(0), 16, F32)}


def in_storage_order(x: Tensor) -> Tensor:
    """Sums rows as if they were contiguous."""
    size = x.untyped_storage().nbytes() // 4
    flat = torch.empty(0).set_(x.untyped_storage(), x.storage_offset(), (min(size, x.numel()),))
    return flat.view(x.shape).sum(0)


def by_strides(x: Tensor) -> Tensor:
    """Sums rows wherever they are."""
    return x.sum(0)


def view_case(name: str, function: Callable[..., Tensor], kind: str) -> verify.Case:
    def execute(x: Tensor) -> Tensor:
        return function(x)

    return verify.case(name=name, setup=stored_otherwise(kind), **measured(column_sums))(execute)


bug_29 = view_case("bug_29", in_storage_order, "transposed")
bug_29_strided = view_case("bug_29_strided", in_storage_order, "strided")
bug_29_contiguous = view_case("bug_29_contiguous", in_storage_order, "contiguous")
bug_29_offset = view_case("bug_29_offset", in_storage_order, "offset")
bug_29_twin = view_case("bug_29_twin", by_strides, "transposed")
bug_29_strided_twin = view_case("bug_29_strided_twin", by_strides, "strided")
bug_29_expanded_twin = view_case("bug_29_expanded_twin", by_strides, "expanded")


# BUG-30: accumulated gradients, a mean of means


def token_gradients(
    x: Tensor, w: Tensor, lengths: tuple[int, ...], scale: Callable[[int], float]
) -> dict[str, Tensor]:
    """Gradients of a sum of losses w x_t, each micro-batch scaled by a function of its length."""
    grads, start = torch.zeros_like(w), 0
    tokens = torch.empty_like(x)
    for length in lengths:
        part = x[start : start + length].clone().requires_grad_()
        leaf = w.clone().requires_grad_()
        ((part @ leaf).sum() * scale(length)).backward()
        assert leaf.grad is not None
        assert part.grad is not None
        grads += leaf.grad
        tokens[start : start + length] = part.grad
        start += length
    return {"w": grads, "x": tokens}


def of_mean(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x, w = inputs["x"].double(), inputs["w"].double()
    value, size = x.mean(0), x.abs().mean(0)
    each = (w / 12).expand(12, 6).contiguous()
    return {
        "w": verify.reduction(value, size, 18, F32),
        "x": verify.reduction(each, each.abs(), 4, F32),
    }


TOKENS = {"x": verify.normal(12, 6), "w": verify.normal(6)}


@verify.case(inputs=TOKENS, **measured(of_mean))
def bug_30(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """A mean of the means of 3 and of 9 tokens."""
    return token_gradients(x, w, (3, 9), lambda length: 1 / (2 * length))


@verify.case(inputs=TOKENS, **measured(of_mean))
def bug_30_equal(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """The same with equal lengths, where it does not show."""
    return token_gradients(x, w, (6, 6), lambda length: 1 / (2 * length))


@verify.case(inputs=TOKENS, **measured(of_mean))
def bug_30_scaled(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """Scaled by the number of micro-batches once more."""
    return token_gradients(x, w, (3, 9), lambda length: 2 / 12)


@verify.case(inputs=TOKENS, **measured(of_mean))
def bug_30_twin(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """Divided by the number of all tokens."""
    return token_gradients(x, w, (3, 9), lambda length: 1 / 12)


LONG = {"x": verify.normal(12, 200), "w": verify.normal(200)}


def of_long_mean(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x = inputs["x"].double()
    return {"w": verify.reduction(x.mean(0), x.abs().mean(0), 18, F32)}


@verify.case(
    inputs=LONG,
    claims=("reference", "vary"),
    reference=of_long_mean,
    vary={"accumulation": [1, 4]},
)
def bug_30_order(x: Tensor, w: Tensor, accumulation: int = 2) -> dict[str, Tensor]:
    """Right for every accumulation, in another order."""
    lengths = {1: (12,), 2: (5, 7), 4: (2, 3, 3, 4)}[accumulation]
    return {"w": token_gradients(x, w, lengths, lambda length: 1 / 12)["w"]}


# BUG-32: a reference that is less exact than the kernel

FLAGS = {"reduced": True}


def flagged_product(a: Tensor, b: Tensor) -> Tensor:
    """A helper with a flag as TF32 is one: float32 products keep ten bits of their factors."""
    if FLAGS["reduced"] and a.dtype == F32:
        a, b = ((t.contiguous().view(torch.int32) & ~0x1FFF).view(F32) for t in (a, b))
    return a @ b


def of_flagged(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x, w = inputs["x"], inputs["w"]
    sizes = x.double().abs() @ w.double().abs()
    return {"out": verify.reduction(flagged_product(x, w).double(), sizes, 12, F32)}


def of_widened(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x, w = inputs["x"].double(), inputs["w"].double()
    return {"out": verify.reduction(flagged_product(x, w), x.abs() @ w.abs(), 12, F32)}


def of_stored(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    """A result of float32 from somewhere else, widened; the inputs' dtype does not matter."""
    x, w = inputs["x"].double(), inputs["w"].double()
    stored = x.float() @ w.float()
    return {"out": verify.reduction(stored.double(), x.abs() @ w.abs(), 12, F32)}


def of_narrow(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    """Not even widened."""
    x, w = inputs["x"], inputs["w"]
    return {"out": verify.reduction(x @ w, x.abs() @ w.abs(), 12, F32)}


def kernel(x: Tensor, w: Tensor) -> Tensor:
    """There is nothing wrong with it."""
    return x @ w


bug_32 = verify.case(name="bug_32", inputs=TALL, **measured(of_flagged))(kernel)
bug_32_stored = verify.case(name="bug_32_stored", inputs=TALL, **measured(of_stored))(kernel)
bug_32_narrow = verify.case(name="bug_32_narrow", inputs=TALL, **measured(of_narrow))(kernel)
bug_32_twin = verify.case(name="bug_32_twin", inputs=TALL, **measured(of_widened))(kernel)
WHOLE = {
    "x": verify.integers(33, 12, low=-1500, high=1500, dtype=F32),
    "w": verify.integers(12, 9, low=-400, high=400, dtype=F32),
}
bug_32_whole_twin = verify.case(name="bug_32_whole_twin", inputs=WHOLE, **measured(of_product))(
    kernel
)


# BUG-56: NaN passes a gate that looks for what is too large


def logarithm(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    exact = inputs["x"].double().log()
    size = torch.where(exact.isinf(), 0.0, exact.abs())
    parts = verify.reduction(size, size, 4, F32)
    return {"out": verify.Reference(exact, parts.budget, exact, parts.margin)}


def with_zeros() -> dict[str, Tensor]:
    x = verify.inputs.generate("x", (8, 8), kind="uniform", low=1, high=9)
    x[2, 3], x[5] = 0.0, 0.0
    return {"x": x}


@verify.case(setup=with_zeros, **measured(logarithm))
def bug_56(x: Tensor) -> Tensor:
    """NaN everywhere."""
    return torch.full_like(x, float("nan"))


@verify.case(setup=with_zeros, **measured(logarithm))
def bug_56_one(x: Tensor) -> Tensor:
    """One NaN."""
    out = x.log()
    out[4, 1] = float("nan")
    return out


@verify.case(setup=with_zeros, **measured(logarithm))
def bug_56_twin(x: Tensor) -> Tensor:
    """Infinite where the reference is."""
    return x.log()


# More reports: a period, scales in another order, subnormals, packed sequences

WIDE = {"x": verify.normal(10, 24), "w": verify.normal(24, 128)}


@verify.case(inputs=WIDE, **measured(of_product))
def tensorrt_10331(x: Tensor, w: Tensor) -> Tensor:
    """One column of 32 is dequantised wrongly."""
    out = x @ w
    out[:, 5::32] *= 1.5
    return out


@verify.case(inputs=WIDE, **measured(of_product))
def tensorrt_10331_twin(x: Tensor, w: Tensor) -> Tensor:
    """No column is."""
    return x @ w


def dequantised(q: Tensor, scales: Tensor) -> Tensor:
    """Blocks of 4 by 8 share a scale."""
    return q * scales.repeat_interleave(4, 0).repeat_interleave(8, 1)


def of_blocks(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    w = dequantised(inputs["q"].double(), inputs["scales"].double())
    return {"out": product(inputs["x"].double(), w)}


BLOCKS = {
    "x": verify.normal(10, 24),
    "q": verify.integers(24, 64, low=-7, high=8, dtype=F32),
    "scales": verify.uniform(6, 8, low=1, high=3, dtype=torch.bfloat16),
}


@verify.case(inputs=BLOCKS, **measured(of_blocks))
def vllm_42118(x: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    """The scales lie in memory column by column, and are read row by row."""
    return x @ dequantised(q, scales.t().reshape(6, 8).float())


@verify.case(inputs=BLOCKS, **measured(of_blocks))
def vllm_42118_twin(x: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    """Scales where they belong."""
    return x @ dequantised(q, scales.float())


def small_and_normal() -> dict[str, Tensor]:
    x = verify.inputs.generate("x", (8, 32), kind="uniform", low=1, high=3)
    x[:, 16:] = (x[:, 16:].double() * 2.0**-130).float()
    return {"x": x}


def halved(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    exact = inputs["x"].double() / 2
    return {"out": verify.reduction(exact, exact.abs(), 1, F32)}


@verify.case(setup=small_and_normal, **measured(halved))
def llvm_57589(x: Tensor) -> Tensor:
    """A library turned on flush-to-zero for this thread."""
    torch.set_flush_denormal(True)
    try:
        return x / 2
    finally:
        torch.set_flush_denormal(False)


@verify.case(setup=small_and_normal, **measured(halved))
def llvm_57589_twin(x: Tensor) -> Tensor:
    """Subnormal numbers stay."""
    return x / 2


def attention(q: Tensor, k: Tensor, v: Tensor, together: Tensor) -> Tensor:
    scores = (q @ k.t()).masked_fill(~together, -float("inf"))
    return torch.softmax(scores, dim=1) @ v


def of_packed(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    """Errors of the scores become relative errors of the weights."""
    q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
    segments, unit = inputs["segments"], 2.0**-24
    together = segments[:, None] == segments
    exact, size = attention(q, k, v, together), attention(q, k, v.abs(), together)
    scores = (q.abs() @ k.abs().t()).amax(dim=1, keepdim=True)
    relative = 2 * (8 * unit * scores + 16 * unit)
    whole = verify.reduction(exact, size, 24, F32)
    return {
        "out": verify.Reference(
            exact, whole.budget + relative * size, exact, whole.margin + relative * size
        )
    }


def packed() -> dict[str, Tensor]:
    return {"segments": torch.arange(24) // 7}


PACKED: dict[str, Any] = {
    "inputs": {name: verify.normal(24, 8) for name in "qkv"},
    "setup": packed,
    **measured(of_packed),
}


@verify.case(**PACKED)
def nemo_4167(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    """Tokens look across the borders of their sequences."""
    return attention(q, k, v, torch.ones(24, 24, dtype=torch.bool))


@verify.case(**PACKED)
def nemo_4167_twin(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    """Tokens look at their own sequence."""
    return attention(q, k, v, segments[:, None] == segments)


# BUG-28: a compiled rotary embedding that keeps its products in fp32

BF16 = torch.bfloat16
ROTARY = {name: verify.normal(16, 64, dtype=BF16) for name in ("q", "cos", "sin")}


def half_turned(q: Tensor) -> Tensor:
    first, second = q.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def of_rotary(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    """Eager's contract: both products are rounded to bf16, then their sum."""
    q, cos, sin = (inputs[name].double() for name in ("q", "cos", "sin"))
    terms = [q * cos, half_turned(q) * sin]
    unrounded = sum(term.to(BF16).double() for term in terms)
    assert isinstance(unrounded, Tensor)
    budget = 2.0**-7 * (terms[0].abs() + terms[1].abs())
    return {
        "out": verify.Reference(
            sum(terms),
            budget,
            unrounded,
            2.0**-23 * unrounded.abs(),
            plain=rotary(**inputs),
        )
    }


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every operation rounds to bf16."""
    return q * cos + half_turned(q) * sin


@verify.case(inputs=ROTARY, **measured(of_rotary))
def bug_28(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As a compiler fuses it."""
    return (q.float() * cos.float() + half_turned(q).float() * sin.float()).to(BF16)


@verify.case(inputs=ROTARY, **measured(of_rotary))
def bug_28_twin(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary(q, cos, sin)


# BUG-31: a fused optimizer that rounds otherwise, and one that keeps the loss scale

ADAM = {"parameter": verify.normal(40, 8), "gradients": verify.normal(20, 40, 8)}
RATE, BETAS, EPS, SCALE = 1e-3, (0.9, 0.999), 1e-8, 65536.0


def adam(
    parameter: Tensor, gradients: Tensor, fused: bool, scale: float = 1.0
) -> dict[str, Tensor]:
    """Twenty steps; scale: what the gradients still carry."""
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients * scale, start=1):
        if fused:
            first = first + (1 - BETAS[0]) * (gradient - first)
            second = second + (1 - BETAS[1]) * (gradient * gradient - second)
        else:
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
        root = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
        parameter = parameter - RATE * (first / (1 - BETAS[0] ** step)) / root
    return {"parameter": parameter, "exp_avg": first, "exp_avg_sq": second}


def of_adam(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    exact = adam(inputs["parameter"].double(), inputs["gradients"].double(), fused=False)
    sizes = {
        "parameter": inputs["parameter"].double().abs() + 20 * RATE,
        "exp_avg": inputs["gradients"].double().abs().amax(0),
        "exp_avg_sq": exact["exp_avg_sq"],
    }
    return {name: verify.reduction(exact[name], sizes[name], 8 * 20, F32) for name in exact}


def adam_case(name: str, **how: Any) -> verify.Case:
    def execute(parameter: Tensor, gradients: Tensor) -> dict[str, Tensor]:
        return adam(parameter, gradients, **how)

    return verify.case(name=name, inputs=ADAM, **measured(of_adam))(execute)


bug_31 = adam_case("bug_31", fused=True, scale=SCALE)
bug_31_twin = adam_case("bug_31_twin", fused=True)
bug_31_plain_twin = adam_case("bug_31_plain_twin", fused=False)
