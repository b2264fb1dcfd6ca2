"""A plain torch pipeline around `torch._grouped_mm`: sort, gather, two grouped GEMMs, weighted sum.

It is what one writes with torch alone when speed matters and nothing is fused: eager, without
torch.compile. Gathers have backward passes of their own that gather again, since torch's backward
of an indexed gather adds with atomics on CUDA. Intermediate results are bf16, as autograd keeps
them.

Legend: T tokens, K slots, S = T K routes in expert order, E experts, H hidden size, I width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mok.bench.contenders import Inputs
from mok.bench.peers.adapting import Loaded, Peer
from mok.bench.peers.gemms import GroupedGemm

GROUPED_MM = "_grouped_mm"


class GatherTokens(torch.autograd.Function):
    """Row s is token order[s] // K; backward gathers by `inverse` and adds the K slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.slots = slots
        return x.index_select(0, torch.div(order, slots, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0].index_select(0, inverse)
        return rows.view(-1, ctx.slots, *rows.shape[1:]).sum(1), None, None, None


class Reorder(torch.autograd.Function):
    """Row i is y[order[i]]; backward gathers by `inverse`, the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return y.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def sort_routes(topk_experts: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order [S], its inverse [S], and the end of each expert's rows (int32 [E]); no host sync."""
    ids, order = torch.sort(topk_experts.reshape(-1), stable=True)
    numbers = torch.arange(order.numel(), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, numbers)
    borders = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, borders, right=True, out_int32=True)
    return order, inverse, ends


def layer(x: Tensor, gate_up: Tensor, down: Tensor, topk_experts: Tensor, router: Tensor) -> Tensor:
    """The layer; see `adapting.Layer` for shapes. router has x's dtype."""
    tokens, slots = topk_experts.shape
    grouped_mm = getattr(torch, GROUPED_MM)
    order, inverse, ends = sort_routes(topk_experts, gate_up.shape[0])
    rows = GatherTokens.apply(x, order, inverse, slots)
    gate, up = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    y = grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    y = Reorder.apply(y, inverse, order).view(tokens, slots, -1)
    return (y * router.unsqueeze(-1)).sum(1)


def load() -> Loaded:
    """Raises RuntimeError where this torch has no grouped GEMM."""
    if not hasattr(torch, GROUPED_MM):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.{GROUPED_MM}; torch 2.10 or later has it"
        )
    return Loaded(layer)


PEER = Peer(
    name="torch",
    distribution="torch",
    modules=("torch",),
    install="pip install torch",
    load=load,
    parallel=True,
    devices=("cpu", "cuda"),
)


def grouped_gemms(inputs: Inputs) -> list[GroupedGemm]:
    """`torch._grouped_mm` alone on unpadded routed rows: forward, input and weight gradients.

    Only the routing and the weights of `inputs` are used; rows are random. One rank.
    """
    experts, width, hidden = inputs.w_gate_up.shape
    grouped_mm = getattr(torch, GROUPED_MM)
    routes = inputs.topk_experts.numel()
    _, _, ends = sort_routes(inputs.topk_experts, experts)
    random = partial(torch.randn, dtype=inputs.x.dtype, device=inputs.x.device)
    x, h = random(routes, hidden), random(routes, width // 2)
    d_gate_up, d_y = random(routes, width), random(routes, hidden)
    gate_up, down = inputs.w_gate_up, inputs.w_down
    wide = 2 * routes * hidden * width
    version = str(torch.__version__)

    def named(what: str, left: Tensor, right: Tensor, flops: int) -> GroupedGemm:
        return GroupedGemm(
            f"torch._grouped_mm {what}", version, lambda: grouped_mm(left, right, offs=ends), flops
        )

    return [
        named("up", x, gate_up.transpose(1, 2), wide),
        named("down", h, down.transpose(1, 2), wide // 2),
        named("dx", d_gate_up, gate_up, wide),
        named("d_gate_up", d_gate_up.t(), x, wide),
        named("d_down", d_y.t(), h, wide // 2),
    ]
