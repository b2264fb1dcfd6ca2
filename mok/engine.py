"""One pass of the layer on one rank: dispatch, experts, combine; no checks, no caches.

It exists so that the functional API and the torch.library operators run the same code: both check
first and then call these functions. Refuses nothing; its callers did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mok import checks
from mok.dispatch import (
    Schedule,
    clean_topk,
    combine,
    dispatch,
    give_back,
    make_schedule,
    rows_to_send,
)
from mok.portable import (
    ExpertWeights,
    RowGradients,
    SavedRows,
    expert_backward,
    expert_forward,
    expert_recompute,
)
from mok.stages import Tell, teller
from mok.tiles import require_ieee_matmul


@dataclass(frozen=True)
class Settings:
    """group None: one rank. minibatch: rows per piece of work, which changes no bit."""

    group: dist.ProcessGroup | None
    limit: float | None
    minibatch: int
    need_routed_weights: bool = True
    need_shared_weights: bool = True


@dataclass(frozen=True)
class Saved:
    """Rows kept from forward: x [R, H], and g and u of routed and shared experts, all bf16."""

    x_rows: torch.Tensor
    routed: SavedRows
    shared: SavedRows | None


@dataclass(frozen=True)
class ForwardResult:
    """out [T, H] bf16 and the saved rows."""

    out: torch.Tensor
    x_rows: torch.Tensor
    routed: SavedRows
    shared: SavedRows | None


@dataclass(frozen=True)
class Gradients:
    """d_x bf16 [T, H], d_router fp32 [T, K], weight gradients fp32 or None if not needed."""

    d_x: torch.Tensor
    d_router: torch.Tensor
    routed: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    shared: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    def in_order(self) -> tuple[torch.Tensor | None, ...]:
        """In the order that the functional API returns."""
        return (self.d_x, self.d_router, *self.routed, *self.shared)


def canonical_device(device: torch.device | str) -> torch.device:
    """A device with its index: "cuda" means the current CUDA device."""
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where


def expert_weights(gate: object, up: object, down: object) -> ExpertWeights:
    """Checked routed weights, detached from autograd."""
    assert isinstance(gate, torch.Tensor)
    assert isinstance(up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    return ExpertWeights(gate.detach(), up.detach(), down.detach())


def shared_weights(gate: object, up: object, down: object) -> ExpertWeights | None:
    """Checked shared weights as one expert, or None."""
    if gate is None:
        return None
    flat = expert_weights(gate, up, down)
    return ExpertWeights(flat.gate[None], flat.up[None], flat.down[None])


def check_routes(
    topk_TK: torch.Tensor,
    num_local_experts: int,
    group: dist.ProcessGroup | None,
    errors: checks.ErrorRecord,
) -> None:
    """Raises RoutingError for bad ids at once, on all ranks; waits for the device."""
    num_experts = num_local_experts * (1 if group is None else dist.get_world_size(group))
    _, bad = clean_topk(topk_TK, num_experts)
    if bool(bad.any()):
        errors.set(checks.routing_message(bad, topk_TK, num_experts))
    checks.checked("routing", errors.raise_pending, group, topk_TK.device)


def schedule_routes(
    topk_TK: torch.Tensor,
    num_local_experts: int,
    group: dist.ProcessGroup | None,
    errors: checks.ErrorRecord,
    at_once: bool,
) -> Schedule:
    """The schedule of raw ids. Bad ones become unused and are recorded, or raised at once."""
    num_experts = num_local_experts * (1 if group is None else dist.get_world_size(group))
    cleaned, bad = clean_topk(topk_TK, num_experts)
    if bool(bad.any()):
        errors.set(checks.routing_message(bad, topk_TK, num_experts))
    if at_once:
        checks.checked("routing", errors.raise_pending, group, topk_TK.device)
    return make_schedule(cleaned, num_local_experts, group)


@torch.no_grad()
def forward_pass(
    x_TH: torch.Tensor,
    router_TK: torch.Tensor,
    schedule: Schedule,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    settings: Settings,
) -> ForwardResult:
    """out = bf16(shared + sum_k w_k y_k). Collective over the group."""
    require_ieee_matmul(x_TH.device)
    tell, tell_shared = teller(x_TH), teller(x_TH, prefix="shared_")
    with torch.autocast(x_TH.device.type, enabled=False):
        if tell is not None:
            _tell_routes(tell, schedule, router_TK)
        x_rows = dispatch(rows_to_send(x_TH, schedule), schedule, settings.group)
        if tell is not None:
            tell("dispatched", x_rows)
        y_rows, saved = expert_forward(
            x_rows, schedule.rows_E, routed, settings.limit, settings.minibatch, tell
        )
        y_sent = give_back(y_rows, schedule, settings.group)
        if tell is not None:
            tell("route_output", y_sent)
        start, saved_shared = None, None
        if shared is not None:
            rows = (x_TH.shape[0],)
            start, saved_shared = expert_forward(
                x_TH, rows, shared, settings.limit, settings.minibatch, tell_shared
            )
        if tell_shared is not None:
            tell_shared("output", start)
        out = combine(start, y_sent, schedule, router_TK)
        if tell is not None:
            tell("combined", out)
    return ForwardResult(out, x_rows, saved, saved_shared)


def _tell_routes(tell: Tell, schedule: Schedule, router_TK: torch.Tensor) -> None:
    rows_E = torch.tensor(schedule.rows_E, dtype=torch.int64)
    tell("route_table", schedule.topk_TK, "experts")
    tell("route_table", rows_E, "rows")
    tell("router_weights", router_TK)


@torch.no_grad()
def recompute_pass(
    x_TH: torch.Tensor,
    schedule: Schedule,
    routed: tuple[torch.Tensor, torch.Tensor],
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    settings: Settings,
) -> tuple[torch.Tensor, SavedRows, SavedRows | None]:
    """The saved rows of forward_pass again. routed, shared: (gate, up)."""
    require_ieee_matmul(x_TH.device)
    with torch.autocast(x_TH.device.type, enabled=False):
        x_rows = dispatch(rows_to_send(x_TH, schedule), schedule, settings.group)
        saved = expert_recompute(x_rows, schedule.rows_E, *routed, settings.minibatch)
        saved_shared = None
        if shared is not None:
            gate, up = shared
            rows = (x_TH.shape[0],)
            saved_shared = expert_recompute(x_TH, rows, gate[None], up[None], settings.minibatch)
    tell = teller(x_TH, backward=True, prefix="again_")
    if tell is not None:
        tell("gate", saved.gate)
        tell("up", saved.up)
    return x_rows, saved, saved_shared


@torch.no_grad()
def backward_pass(
    d_out_TH: torch.Tensor,
    x_TH: torch.Tensor,
    router_TK: torch.Tensor,
    schedule: Schedule,
    saved: Saved,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    settings: Settings,
) -> Gradients:
    """All gradients of this rank. Collective over the group, whatever is needed locally."""
    require_ieee_matmul(x_TH.device)
    tell = teller(x_TH, backward=True)
    tell_shared = teller(x_TH, backward=True, prefix="shared_")
    with torch.autocast(x_TH.device.type, enabled=False):
        group = settings.group
        d_out_rows = dispatch(rows_to_send(d_out_TH, schedule), schedule, group)
        if tell is not None:
            tell("combined", d_out_TH)
            tell("route_output", d_out_rows)
        route_S = schedule.token_S * router_TK.shape[1] + schedule.slot_S
        weight_S = router_TK.reshape(-1).index_select(0, route_S)
        rows = expert_backward(
            d_out_rows,
            saved.x_rows,
            saved.routed,
            dispatch(weight_S, schedule, group),
            schedule.rows_E,
            routed,
            settings.limit,
            settings.minibatch,
            settings.need_routed_weights,
            tell,
        )
        d_x_sent = give_back(rows.d_x, schedule, group)
        d_router_sent = give_back(rows.d_router, schedule, group)
        d_router_TK = torch.zeros(router_TK.shape, dtype=torch.float32, device=router_TK.device)
        d_router_TK.view(-1).scatter_(0, route_S, d_router_sent)
        own: RowGradients | None = None
        if shared is not None and saved.shared is not None:
            ones = torch.ones(x_TH.shape[0], dtype=torch.float32, device=x_TH.device)
            own = expert_backward(
                d_out_TH,
                x_TH,
                saved.shared,
                ones,
                (x_TH.shape[0],),
                shared,
                settings.limit,
                settings.minibatch,
                settings.need_shared_weights,
                tell_shared,
            )
        d_x_TH = combine(None if own is None else own.d_x, d_x_sent, schedule, None)
        if tell is not None:
            tell("dispatched", rows.d_x)
            tell_gradients(tell, d_x_TH, d_router_TK, _weights_of(rows), _weights_of(own))
    return Gradients(
        d_x_TH,
        d_router_TK,
        _weights_of(rows),
        (None, None, None) if own is None else _without_expert_axis(own),
    )


def _weights_of(
    rows: RowGradients | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    return (None, None, None) if rows is None else (rows.d_gate, rows.d_up, rows.d_down)


def tell_gradients(
    tell: Tell,
    d_x: torch.Tensor | None,
    d_router: torch.Tensor | None,
    routed: Sequence[torch.Tensor | None],
    shared: Sequence[torch.Tensor | None],
) -> None:
    """Tells what a backward gives (mok.stages); None is not told."""
    tell("router_weights", d_router)
    for prefix, gradients in (("w_", routed), ("shared_w_", shared)):
        for name, gradient in zip(("gate", "up", "down"), gradients, strict=True):
            tell(prefix + name, gradient)
    tell("x", d_x)


def _without_expert_axis(
    own: RowGradients,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if own.d_gate is None or own.d_up is None or own.d_down is None:
        return None, None, None
    return own.d_gate[0], own.d_up[0], own.d_down[0]
