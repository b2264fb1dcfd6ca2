"""Which shapes the operators return, from device and sizes alone: their fake implementations.

It exists apart from mok.operators because a fake tensor, a compiler and the real call must give one
answer, and none of it looks at a value, launches anything or asks other ranks. Refuses what the
choice of a backend refuses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mok.hopper.layout import group_saved_rows, one_rank_saved_rows
from mok.hopper.support import choose, why_not


def group_of(name: str) -> dist.ProcessGroup | None:
    """The group of this name; None for "", one rank."""
    if not name:
        return None
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def saves_padded(
    x: Tensor,
    topk_experts: Tensor,
    w_gate: Tensor,
    shared_gate: Tensor | None,
    group: str,
    backend: str,
) -> bool:
    """Whether the forward saves what the Hopper backend saves; from device and sizes alone."""
    if backend == "portable":
        return False
    whole = group_of(group)
    problem = why_not(
        x.device,
        hidden=x.shape[1],
        width=w_gate.shape[1],
        shared_width=0 if shared_gate is None else shared_gate.shape[0],
        slots=topk_experts.shape[1],
        experts=w_gate.shape[0],
        tokens=x.shape[0],
        ranks=1 if whole is None else dist.get_world_size(whole),
    )
    return choose(backend, problem)


def padded_rows(topk_experts: Tensor, w_gate: Tensor, group: str) -> int:
    """Rows of g and u that a forward saves then; plain arithmetic on sizes, symbolic ones too."""
    tokens, slots = topk_experts.shape
    rows = group_saved_rows if group else one_rank_saved_rows
    return rows(tokens, slots, w_gate.shape[0])


def room_for(
    x: Tensor, w_gate: Tensor, shared_gate: Tensor | None, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors for `rows` rows of g and u, and for those of the shared expert."""
    routed = (rows, w_gate.shape[1])
    shared = (0,) if shared_gate is None else (x.shape[0], shared_gate.shape[0])
    shapes = (routed, routed, shared, shared)
    gate, up, own_gate, own_up = (x.new_empty(shape) for shape in shapes)
    return gate, up, own_gate, own_up


def forward_fake(
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    swiglu_limit: float | None,
    group: str,
    minibatch_size: int,
    save: bool,
    num_sms: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What mok::moe_forward returns, without values."""
    out = torch.empty_like(x)
    padded = saves_padded(x, topk_experts, w_gate, shared_gate, group, backend)
    if save and padded:
        return out, *room_for(x, w_gate, shared_gate, padded_rows(topk_experts, w_gate, group))
    if save and not group:
        routes = topk_experts.shape[0] * topk_experts.shape[1]
        return out, *room_for(x, w_gate, shared_gate, routes)
    gate, up, own_gate, own_up = (x.new_empty((0,)) for _ in range(4))
    return out, gate, up, own_gate, own_up


def backward_fake(
    d_out: Tensor,
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    saved: list[Tensor],
    swiglu_limit: float | None,
    group: str,
    minibatch_size: int,
    need_routed: bool,
    need_shared: bool,
    num_sms: int = 0,
    backend: str = "auto",
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What mok::moe_backward returns, without values."""

    def like(weight: Tensor | None, needed: bool) -> Tensor:
        shape = weight.shape if needed and weight is not None else (0,)
        return torch.empty(shape, dtype=weight_dtype, device=x.device)

    return (
        torch.empty_like(x),
        torch.empty_like(router_weights),
        like(w_gate, need_routed),
        like(w_up, need_routed),
        like(w_down, need_routed),
        like(shared_gate, need_shared),
        like(shared_up, need_shared),
        like(shared_down, need_shared),
    )
