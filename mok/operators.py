"""The layer as two torch.library operators, mok::moe_forward and mok::moe_backward.

Why: torch.compile, opcheck and autograd need an operator with a fake implementation and an autograd
formula. An operator can take neither a process group nor a workspace, so it takes the group's name
("" for one rank) and the knobs as integers. Every output shape follows from input shapes: on one
rank the forward saves g and u in slot order, [T K, I]; on several ranks their number of rows
depends on the routing, so nothing is saved and the backward recomputes them, which changes no bit.
Where device and shapes allow the Hopper backend it saves them in canonical order instead, every
expert padded to 128 rows, on several ranks up to 1.25 times what a balanced routing brings; that
follows from device and shapes, so a fake tensor knows it too. (Ranks that find that they cannot
share memory run the portable backend, and what would have been saved then stays empty.) Refuses
double backward.

A bad expert id of one call is raised at the next call of the same group and device, or at
`mok.functional.get_workspace(...).check()`; with MOK_CHECK=1 at once. On several ranks the Hopper
backend makes no collective after the first call of a kind (mok.workspaces); a portable backward
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok import checks, engine
from mok.agreement import Checked, agree_on_backend
from mok.autocast import DEVICES, autocast_rule
from mok.config import MoKConfig
from mok.dispatch import rows_to_send
from mok.errors import InputError
from mok.hopper.support import backward_wanted
from mok.operator_shapes import (
    backward_fake,
    forward_fake,
    group_of,
    padded_rows,
    room_for,
    saves_padded,
)
from mok.portable import SavedRows
from mok.workspaces import Workspace, get_workspace

if TYPE_CHECKING:
    from mok.hopper.packing import Problem

# What launches kernels is imported by the first call that does: other calls do without it.


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name under which an operator finds a group again; "" for one rank."""
    return "" if group is None else str(group.group_name)


def _workspace(x: Tensor, topk_experts: Tensor, group: str, backend: str) -> Workspace:
    # Wrong dimensions get stand-ins here; the check that follows names the tensor and its shape.
    tokens, hidden = x.shape if x.dim() == 2 else (0, 1)
    return get_workspace(
        MoKConfig(),
        group_of(group),
        device=x.device,
        num_local_tokens=tokens,
        hidden_size=hidden,
        topk=topk_experts.shape[-1] if topk_experts.dim() == 2 else 1,
        backend=backend,
    )


def _check(
    call: str,
    workspace: Workspace,
    rows: dict[str, Tensor],
    topk_experts: Tensor,
    router_weights: Tensor,
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, Tensor | None, Tensor | None],
    limit: float | None,
    minibatch: int,
) -> bool:
    """Whether the Hopper backend runs the call.

    Raises on all ranks together; a forward of a kind that all have agreed on, on this rank alone.
    """
    hidden, device = workspace.hidden_size, workspace.device
    tokens, slots = workspace.num_local_tokens, workspace.topk

    def check() -> Checked:
        any_size = (None, None)
        checks.check_tensor("x", rows["x"], torch.bfloat16, any_size, device, "[T, H]")
        checks.check_tensor("topk_experts", topk_experts, torch.int64, any_size, device, "[T, K]")
        for name, tensor in rows.items():
            checks.check_tensor(name, tensor, torch.bfloat16, (tokens, hidden), device, "[T, H]")
        routes = (tokens, slots)
        checks.check_tensor("topk_experts", topk_experts, torch.int64, routes, device, "[T, K]")
        checks.check_tensor(
            "router_weights", router_weights, torch.float32, routes, device, "[T, K]"
        )
        experts = checks.check_routed(*routed, hidden, device)
        with_shared = checks.check_shared(*shared, hidden, device, True)
        shared_width = shared[0].shape[0] if with_shared and shared[0] is not None else None
        also = {
            "experts per rank": experts,
            "MOK_CHECK": int(checks.validation_wanted(False)),
        }
        return Checked(experts, routed[0].shape[1], shared_width, also)

    return agree_on_backend(call, workspace, check, (routed[0], shared[0]), limit, minibatch)


def _forward(
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
    """(out, gate, up, shared gate, shared up); the last four are empty unless saved."""
    workspace = _workspace(x, topk_experts, group, backend)
    routed = (w_gate, w_up, w_down)
    shared = (shared_gate, shared_up, shared_down)
    hopper = _check(
        "forward",
        workspace,
        {"x": x},
        topk_experts,
        router_weights,
        routed,
        shared,
        swiglu_limit,
        minibatch_size,
    )
    padded = save and saves_padded(x, topk_experts, w_gate, shared_gate, group, backend)
    rows = padded_rows(topk_experts, w_gate, group) if padded else None
    if hopper:
        problem = _problem(x, topk_experts, router_weights, routed, shared, swiglu_limit)
        return _forward_hopper(workspace, problem, (minibatch_size, num_sms), rows)
    schedule = engine.schedule_routes(
        topk_experts,
        w_gate.shape[0],
        workspace.group,
        workspace.errors,
        checks.validation_wanted(False),
    )
    result = engine.forward_pass(
        x,
        router_weights,
        schedule,
        engine.expert_weights(*routed),
        engine.shared_weights(*shared),
        engine.Settings(workspace.group, swiglu_limit, minibatch_size),
    )
    empty = [x.new_empty((0,)) for _ in range(4)]
    if rows is not None:  # its ranks cannot share memory, but the shapes were promised
        return result.out, *room_for(x, w_gate, shared_gate, rows)
    if not save or group:
        return result.out, empty[0], empty[1], empty[2], empty[3]
    slots = schedule.token_S * workspace.topk + schedule.slot_S
    kept = []
    for in_order in (result.routed.gate, result.routed.up):
        by_slot = in_order.new_zeros((topk_experts.numel(), in_order.shape[1]))
        by_slot[slots] = in_order
        kept.append(by_slot)
    if result.shared is None:
        return result.out, kept[0], kept[1], empty[2], empty[3]
    return result.out, kept[0], kept[1], result.shared.gate, result.shared.up


def _problem(
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, Tensor | None, Tensor | None],
    limit: float | None,
) -> Problem:
    from mok.hopper.packing import Problem

    gate, up, down = shared
    own = None if gate is None or up is None or down is None else (gate, up, down)
    return Problem(x, topk_experts, router_weights, *routed, own, limit)


def _forward_hopper(
    workspace: Workspace, problem: Problem, knobs: tuple[int, int], rows: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from mok.hopper.passes import Knobs, run_forward

    if checks.validation_wanted(False):
        experts = problem.gate.shape[0]
        engine.check_routes(problem.topk, experts, workspace.group, workspace.errors)
    found = run_forward(
        workspace.pool, workspace.group, problem, Knobs(*knobs), save=rows is not None, rows=rows
    )
    saved = (found.gate, found.up, found.shared_gate, found.shared_up)
    gate, up, own_gate, own_up = (
        problem.x.new_empty((0,)) if tensor is None else tensor for tensor in saved
    )
    return found.out, gate, up, own_gate, own_up


def _backward(
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
    """Gradients in functional order; weight gradients in weight_dtype, empty where not needed.

    num_sms, backend: the forward's. weight_dtype: float32, or bfloat16, rounded once.
    """
    workspace = _workspace(x, topk_experts, group, backend)
    routed = (w_gate, w_up, w_down)
    shared = (shared_gate, shared_up, shared_down)
    rows = {"d_out": d_out, "x": x}
    hopper = _check(
        "backward",
        workspace,
        rows,
        topk_experts,
        router_weights,
        routed,
        shared,
        swiglu_limit,
        minibatch_size,
    )
    if hopper:
        from mok.hopper.packing import Results
        from mok.hopper.passes import Knobs, run_backward, saved_for_backward

        problem = _problem(x, topk_experts, router_weights, routed, shared, swiglu_limit)
        knobs = Knobs(minibatch_size, num_sms)
        padded = Results(x, *(tensor if tensor.dim() == 2 else None for tensor in saved))
        if backward_wanted(workspace.num_ranks):
            d_x, d_router, *found = run_backward(
                *(workspace.pool, workspace.group, problem, d_out, padded, knobs),
                needs=(need_routed, need_shared),
                dtype=weight_dtype,
            )
            assert d_x is not None
            assert d_router is not None
            return _outputs(d_x, d_router, found, weight_dtype)
    # The forward call has reported bad ids; here they only become unused slots again.
    schedule = engine.schedule_routes(
        topk_experts, w_gate.shape[0], workspace.group, checks.ErrorRecord(), False
    )
    settings = engine.Settings(
        workspace.group, swiglu_limit, minibatch_size, need_routed, need_shared
    )
    if hopper:
        context = saved_for_backward(
            workspace.pool, workspace.group, schedule, problem, padded, knobs
        )
    elif saved[0].dim() == 2 and not group:
        slots = schedule.token_S * workspace.topk + schedule.slot_S
        own = None if shared_gate is None else SavedRows(saved[2], saved[3])
        kept = SavedRows(saved[0][slots], saved[1][slots])
        context = engine.Saved(rows_to_send(x, schedule), kept, own)
    else:
        pair = None if shared_gate is None or shared_up is None else (shared_gate, shared_up)
        context = engine.Saved(*engine.recompute_pass(x, schedule, (w_gate, w_up), pair, settings))
    gradients = engine.backward_pass(
        d_out,
        x,
        router_weights,
        schedule,
        context,
        engine.expert_weights(*routed),
        engine.shared_weights(*shared),
        settings,
    )
    weights = (*gradients.routed, *gradients.shared)
    return _outputs(gradients.d_x, gradients.d_router, weights, weight_dtype)


def _outputs(
    d_x: Tensor, d_router: Tensor, weights: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the operator returns: empty tensors for gradients that are not there."""
    gate, up, down, own_gate, own_up, own_down = (
        torch.empty(0, dtype=dtype, device=d_x.device) if grad is None else grad.to(dtype)
        for grad in weights
    )
    return d_x, d_router, gate, up, down, own_gate, own_up, own_down


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[object, ...],
    output: tuple[Tensor, ...],
) -> None:
    tensors, (limit, group, minibatch, save, num_sms, backend) = inputs[:9], inputs[9:]
    if not save:
        ctx.knobs = None  # type: ignore[attr-defined]
        return
    ctx.knobs = (limit, group, minibatch, num_sms, backend)  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])  # type: ignore[arg-type]


def _autograd(
    ctx: torch.autograd.function.FunctionCtx, d_out: Tensor, *unused: Tensor
) -> tuple[Tensor | None, ...]:
    if ctx.knobs is None:  # type: ignore[attr-defined]
        raise InputError("moe_forward was called with save=False; pass save=True for a backward.")
    limit, group, minibatch, num_sms, backend = ctx.knobs  # type: ignore[attr-defined]
    kept = ctx.saved_tensors  # type: ignore[attr-defined]
    tensors, saved = kept[:9], list(kept[9:])
    needs = ctx.needs_input_grad  # type: ignore[attr-defined]
    gradients = moe_backward(
        d_out.contiguous(),
        *tensors,
        saved,
        limit,
        group,
        minibatch,
        any(needs[3:6]),
        any(needs[6:9]),
        num_sms,
        backend,
        tensors[3].dtype,
    )
    d_x, d_router, weights = gradients[0], gradients[1], gradients[2:]
    by_weight = [
        grad.to(tensor.dtype) if tensor is not None and need else None
        for grad, tensor, need in zip(weights, tensors[3:9], needs[3:9], strict=True)
    ]
    return (
        d_x if needs[0] else None,
        None,
        d_router if needs[2] else None,
        *by_weight,
        *(None,) * 6,
    )


# Compiled graphs are not recorded with these inside (mode="reduce-overhead"): memory that the
# Hopper backend keeps, made in a warm-up, would lie in a pool that the recording thinks its own.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)


def _define(name: str, implementation: Any, fake: Any) -> Any:
    """An operator of the namespace, callable.

    torch.library.custom_op would do the same, but its first call imports torch._dynamo, which costs
    over a second in every process.
    """
    schema = torch.library.infer_schema(implementation, mutates_args=())
    _LIBRARY.define(name + schema, tags=_TAGS)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mok::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mok, name).default


_LIBRARY = torch.library.Library("mok", "DEF")
moe_forward = _define("moe_forward", _forward, forward_fake)
moe_backward = _define("moe_backward", _backward, backward_fake)
torch.library.register_autograd(
    "mok::moe_forward", _autograd, setup_context=_setup_context, lib=_LIBRARY
)
for _device in DEVICES:
    _LIBRARY.impl("moe_forward", autocast_rule(moe_forward, _device), f"Autocast{_device.upper()}")
