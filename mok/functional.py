"""The functional API: workspace, schedule, forward, backward, recompute.

Names, argument order and shapes are those that users of Mixture-of-Kittens know; a shared expert
may be left out (None) or have its own width, and a group may have any size that divides the number
of experts (None: one rank). Every function is called by all ranks of the workspace's group, in one
order. Where the Hopper backend runs the forward, that forward builds the schedule on the device;
the host's is made when a portable backward asks for it. Refuses MXFP8 weight tuples, and a second
backward from one context.

Checks have one outcome on all ranks, by a collective. On the Hopper backend with a group that holds
for the first call of every kind; later ones (build_schedule, forward, recompute_forward_context)
make no collective and read nothing on the host. Then an error is raised by the rank that meets it,
which does not launch, and its peers give up after Timeouts.enter with an ExchangeError that names
it. With MOK_CHECK=1, on all ranks, every call has the collective.

Launches of groups on one device run in the order in which the host makes them, whatever streams
they are on, so all ranks have to make them in one order. A collective on another stream, which one
rank waits for before its layer and another makes after it, ends all the same: until all ranks have
come, 20 multiprocessors are left free; then a launch waits only for its own group, and takes all of
them unless MoKConfig.num_sms leaves some to others. Where a replayed CUDA graph holds launches, its
place among them is the caller's to order.

After an ExchangeError results are not to be used, main gradients hold sums of which parts are
missing, and every further call of the group is refused.
To go on: all ranks that are left call clear_workspace_cache(), and use the group if nobody is
missing, else a new one. A process that was started anew can join if the others were, too: torch's
symmetric memory counts its meetings by process.

Above 400 lines because these rules for groups belong beside the calls that they are rules for.

Legend: T local tokens, K slots, E local experts, H hidden size, I width, R rows of local experts.
x [T, H] bf16, router_weights [T, K] fp32, gate and up [E, I, H] bf16, down [E, H, I] bf16; shared
gate and up [I_shared, H], down [H, I_shared]. Weight gradients are accumulated in fp32 from zero;
they are returned in fp32, or rounded to bf16 once, or added once to fp32 main gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mok import checks, engine
from mok.agreement import Checked, agree_on_backend
from mok.config import MoKConfig
from mok.dispatch import Schedule
from mok.errors import ContextError, InputError
from mok.hopper.deferred import DeferredSchedule, on_host
from mok.hopper.support import backward_wanted, device_problem
from mok.hopper.timeouts import Timeouts
from mok.main_gradients import MainGradients, add_to_main, check_main_gradients, count_changes
from mok.portable import SavedRows
from mok.workspaces import Workspace, clear_workspace_cache, create_workspace, get_workspace

if TYPE_CHECKING:
    from mok.hopper.packing import Problem, Results
    from mok.hopper.passes import Knobs

Weight = torch.Tensor | tuple[torch.Tensor, ...] | None
AnySchedule = Schedule | DeferredSchedule


@dataclass(frozen=True)
class ForwardContext:
    """What backward needs of one forward pass; good for one backward.

    x_rows: bf16 [R, H] in canonical order; None after a Hopper forward, whose backward dispatches x
    again. routed, shared: g and u rounded to bf16; after a Hopper forward every expert's rows of
    `routed` are padded to a multiple of 128.
    """

    schedule: AnySchedule
    x_rows: torch.Tensor | None
    routed: SavedRows
    shared: SavedRows | None
    consumed: threading.Event = field(default_factory=threading.Event, repr=False)


def build_schedule(
    workspace: Workspace,
    config: MoKConfig,
    topk_experts: torch.Tensor,
    *,
    num_local_experts: int,
    validate: bool = False,
) -> AnySchedule:
    """Which row goes where. topk_experts: int64 [T, K], global expert ids, -1 for an unused slot.

    A bad id (out of range, or repeated inside its token) becomes an unused slot and is raised as
    RoutingError at the next call or workspace.check(); with validate=True or MOK_CHECK=1 at once.
    A group's ranks must agree on validate.
    """
    del config

    at_once = checks.validation_wanted(validate)

    def check() -> dict[str, int]:
        workspace.raise_pending()
        if num_local_experts < 1:
            raise InputError(f"num_local_experts = {num_local_experts}; allowed: 1 or more.")
        shape = (workspace.num_local_tokens, workspace.topk)
        checks.check_tensor(
            "topk_experts", topk_experts, torch.int64, shape, workspace.device, "[T, K]"
        )
        return {"experts per rank": num_local_experts, "validate or MOK_CHECK": int(at_once)}

    workspace.meet()
    kind = (num_local_experts, at_once)
    workspace.agree(
        "schedule", kind, check, lambda: not at_once and workspace.could_run(num_local_experts)
    )
    if workspace.backend != "portable" and device_problem(workspace.device) is None:
        if at_once:
            engine.check_routes(topk_experts, num_local_experts, workspace.group, workspace.errors)
        return DeferredSchedule(topk_experts.clone(), num_local_experts, workspace.group)
    return engine.schedule_routes(
        topk_experts, num_local_experts, workspace.group, workspace.errors, at_once
    )


def _check_call(
    call: str,
    workspace: Workspace,
    schedule: AnySchedule,
    inputs: Mapping[str, tuple[object, torch.dtype, tuple[int, ...], str]],
    routed: tuple[Weight, Weight, Weight],
    shared: tuple[Weight, Weight, Weight],
    limit: float | None,
    with_down: bool,
    minibatch: int,
    context: ForwardContext | None = None,
    also: Callable[[], None] | None = None,
) -> bool:
    """Whether the Hopper backend runs the call.

    Raises on all ranks together; a call of a kind that all have agreed on, on this rank alone.
    """
    hidden, device = workspace.hidden_size, workspace.device
    workspace.meet()

    def check() -> Checked:
        for name, (tensor, dtype, shape, legend) in inputs.items():
            checks.check_tensor(name, tensor, dtype, shape, device, legend)
        down = routed[2] if with_down else None
        experts = checks.check_routed(routed[0], routed[1], down, hidden, device)
        if with_down and down is None:
            raise InputError("w_routed_down is None; allowed: a bf16 tensor [E, H, I]. Pass it.")
        if experts * workspace.num_ranks != schedule.num_experts:
            raise InputError(
                f"w_routed_gate has {experts} experts on each of {workspace.num_ranks} rank(s); "
                f"the schedule was built for {schedule.num_experts} experts in all. Build the "
                "schedule with num_local_experts = w_routed_gate.shape[0]."
            )
        width = _tensor(routed[0]).shape[1]
        with_shared = checks.check_shared(*shared, hidden, device, with_down)
        if context is not None:
            _check_context(context, schedule, width, with_shared)
        if also is not None:
            also()
        shared_width = _tensor(shared[0]).shape[0] if with_shared else None
        # A schedule of the host was made by a workspace that never runs Hopper.
        deferred = isinstance(schedule, DeferredSchedule)
        return Checked(experts, width, shared_width, deferred=deferred)

    return agree_on_backend(call, workspace, check, (routed[0], shared[0]), limit, minibatch)


def _check_context(
    context: ForwardContext, schedule: AnySchedule, width: int, with_shared: bool
) -> None:
    if context.consumed.is_set():
        raise ContextError(
            "this forward context was already used by a backward; allowed: one backward per "
            "forward context. Run forward or recompute_forward_context again."
        )
    if context.schedule is not schedule:
        raise ContextError(
            "the forward context was made with another schedule; allowed: the schedule that "
            "forward got. Pass that one."
        )
    if context.routed.gate.shape[1] != width or (context.shared is not None) != with_shared:
        raise ContextError(
            f"the forward context has width {context.routed.gate.shape[1]} and shared expert = "
            f"{context.shared is not None}; the weights given have {width} and {with_shared}. "
            "Pass the weights that forward got."
        )


def _bf16_rows(workspace: Workspace) -> tuple[torch.dtype, tuple[int, ...], str]:
    return torch.bfloat16, (workspace.num_local_tokens, workspace.hidden_size), "[T, H]"


def _router(workspace: Workspace) -> tuple[torch.dtype, tuple[int, ...], str]:
    return torch.float32, (workspace.num_local_tokens, workspace.topk), "[T, K]"


def forward(
    config: MoKConfig,
    workspace: Workspace,
    schedule: AnySchedule,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w_shared_gate: Weight,
    w_shared_up: Weight,
    w_shared_down: Weight,
    w_routed_gate: Weight,
    w_routed_up: Weight,
    w_routed_down: Weight,
    swiglu_limit: float | None = None,
) -> tuple[torch.Tensor, ForwardContext]:
    """out [T, H] bf16 and the context of its one backward. Raises InputError."""
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    shared = (w_shared_gate, w_shared_up, w_shared_down)
    inputs = {
        "x": (x, *_bf16_rows(workspace)),
        "router_weights": (router_weights, *_router(workspace)),
    }
    minibatch = config.minibatch_size
    if _check_call(
        "forward", workspace, schedule, inputs, routed, shared, swiglu_limit, True, minibatch
    ):
        from mok.hopper.passes import run_forward

        problem = _problem(x, schedule, router_weights, routed, shared, swiglu_limit)
        found = run_forward(workspace.pool, workspace.group, problem, _knobs(config), save=True)
        return found.out, _context_of(schedule, found)
    result = engine.forward_pass(
        x,
        router_weights,
        on_host(schedule, workspace.errors),
        engine.expert_weights(*routed),
        engine.shared_weights(*shared),
        engine.Settings(workspace.group, swiglu_limit, config.minibatch_size),
    )
    return result.out, ForwardContext(schedule, result.x_rows, result.routed, result.shared)


def recompute_forward_context(
    config: MoKConfig,
    workspace: Workspace,
    schedule: AnySchedule,
    x: torch.Tensor,
    w_shared_gate: Weight,
    w_shared_up: Weight,
    w_routed_gate: Weight,
    w_routed_up: Weight,
    swiglu_limit: float | None = None,
) -> ForwardContext:
    """The context of forward, bit for bit, from x and the gate and up weights alone."""
    routed = (w_routed_gate, w_routed_up, None)
    shared = (w_shared_gate, w_shared_up, None)
    inputs = {"x": (x, *_bf16_rows(workspace))}
    minibatch = config.minibatch_size
    if _check_call(
        "recompute", workspace, schedule, inputs, routed, shared, swiglu_limit, False, minibatch
    ):
        from mok.hopper.passes import recompute

        problem = _problem(x, schedule, None, routed, shared, swiglu_limit)
        found = recompute(workspace.pool, workspace.group, problem, None, _knobs(config))
        return _context_of(schedule, found)
    settings = engine.Settings(workspace.group, swiglu_limit, config.minibatch_size)
    x_rows, routed_rows, shared_rows = engine.recompute_pass(
        x,
        on_host(schedule),
        (_tensor(w_routed_gate), _tensor(w_routed_up)),
        None if w_shared_gate is None else (_tensor(w_shared_gate), _tensor(w_shared_up)),
        settings,
    )
    return ForwardContext(schedule, x_rows, routed_rows, shared_rows)


def backward(
    config: MoKConfig,
    workspace: Workspace,
    schedule: AnySchedule,
    forward_context: ForwardContext,
    d_output: torch.Tensor,
    x: torch.Tensor,
    router_weights: torch.Tensor,
    w_shared_gate: Weight,
    w_shared_up: Weight,
    w_shared_down: Weight,
    w_routed_gate: Weight,
    w_routed_up: Weight,
    w_routed_down: Weight,
    swiglu_limit: float | None = None,
    *,
    weight_dtype: torch.dtype = torch.float32,
    main_grads: MainGradients | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """(d_x, d_router_weights, d_w_routed_gate, _up, _down, d_w_shared_gate, _up, _down).

    d_x [T, H] bf16, d_router_weights [T, K] fp32 (0 in unused slots), weight gradients in
    weight_dtype, float32 or bfloat16; the shared expert's are this rank's own partial sums, None
    without one. main_grads: fp32 tensors that a weight's gradient is added to instead, once, and
    None is returned for it. Raises ContextError when the context was used before.
    """
    routed: tuple[Weight, Weight, Weight] = (w_routed_gate, w_routed_up, w_routed_down)
    shared: tuple[Weight, Weight, Weight] = (w_shared_gate, w_shared_up, w_shared_down)
    inputs = {
        "d_output": (d_output, *_bf16_rows(workspace)),
        "x": (x, *_bf16_rows(workspace)),
        "router_weights": (router_weights, *_router(workspace)),
    }
    main = main_grads or MainGradients()

    def also() -> None:
        if weight_dtype not in (torch.float32, torch.bfloat16):
            raise InputError(
                f"weight_dtype = {weight_dtype}; allowed: torch.float32 or torch.bfloat16."
            )
        check_main_gradients(main, [w if isinstance(w, torch.Tensor) else None for w in weights])

    weights = (*routed, *shared)
    hopper = _check_call(
        "backward",
        workspace,
        schedule,
        inputs,
        routed,
        shared,
        swiglu_limit,
        True,
        config.minibatch_size,
        context=forward_context,
        also=also,
    )
    forward_context.consumed.set()
    saved, shared_rows = forward_context.routed, forward_context.shared
    if hopper:
        from mok.hopper.packing import Results
        from mok.hopper.passes import run_backward, saved_for_backward

        kept = Results(x, saved.gate, saved.up)
        if shared_rows is not None:
            kept = Results(x, saved.gate, saved.up, shared_rows.gate, shared_rows.up)
        problem = _problem(x, schedule, router_weights, routed, shared, swiglu_limit)
        if backward_wanted(workspace.num_ranks):
            try:
                return run_backward(
                    workspace.pool,
                    workspace.group,
                    problem,
                    d_output.detach(),
                    kept,
                    _knobs(config),
                    dtype=weight_dtype,
                    main=main,
                )
            finally:  # an error may come when kernels are under way
                count_changes(main)
        context = saved_for_backward(
            workspace.pool, workspace.group, on_host(schedule), problem, kept, _knobs(config)
        )
    else:
        assert forward_context.x_rows is not None
        context = engine.Saved(forward_context.x_rows, saved, shared_rows)
    gradients = engine.backward_pass(
        d_output,
        x,
        router_weights,
        on_host(schedule),
        context,
        engine.expert_weights(*routed),
        engine.shared_weights(*shared),
        engine.Settings(workspace.group, swiglu_limit, config.minibatch_size),
    )
    d_x, d_router, *found = gradients.in_order()
    rest = add_to_main(main, found)
    return d_x, d_router, *(None if grad is None else grad.to(weight_dtype) for grad in rest)


def _knobs(config: MoKConfig) -> Knobs:
    from mok.hopper.passes import Knobs

    return Knobs(config.minibatch_size, config.num_sms)


def _problem(
    x: torch.Tensor,
    schedule: AnySchedule,
    router_weights: torch.Tensor | None,
    routed: tuple[Weight, Weight, Weight],
    shared: tuple[Weight, Weight, Weight],
    limit: float | None,
) -> Problem:
    """One rank's call for the Hopper backend; down weights and a router may be missing."""
    from mok.hopper.packing import Problem
    from mok.hopper.passes import stand_in_down

    topk = schedule.topk_TK
    router = (
        torch.zeros_like(topk, dtype=torch.float32) if router_weights is None else router_weights
    )

    def down_of(gate: torch.Tensor, down: Weight) -> torch.Tensor:
        return stand_in_down(gate) if down is None else _tensor(down).detach()

    gate, up = _tensor(routed[0]).detach(), _tensor(routed[1]).detach()
    own = None
    if shared[0] is not None:
        own_gate, own_up = _tensor(shared[0]).detach(), _tensor(shared[1]).detach()
        own = (own_gate, own_up, down_of(own_gate, shared[2]))
    return Problem(x.detach(), topk, router, gate, up, down_of(gate, routed[2]), own, limit)


def _context_of(schedule: AnySchedule, found: Results) -> ForwardContext:
    """The context of a Hopper forward that saved."""
    assert found.gate is not None
    assert found.up is not None
    own = None
    if found.shared_gate is not None and found.shared_up is not None:
        own = SavedRows(found.shared_gate, found.shared_up)
    return ForwardContext(schedule, None, SavedRows(found.gate, found.up), own)


def _tensor(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


__all__ = [
    "DeferredSchedule",
    "ForwardContext",
    "MainGradients",
    "Schedule",
    "Timeouts",
    "Workspace",
    "backward",
    "build_schedule",
    "clear_workspace_cache",
    "create_workspace",
    "forward",
    "get_workspace",
    "recompute_forward_context",
]
