"""A Hopper backward that the portable backend computes, so that what surrounds it runs on a CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mok import engine
from mok.dispatch import Schedule, clean_topk, dispatch, make_schedule, rows_to_send
from mok.hopper.backward_memory import BackwardMemory
from mok.hopper.backward_problem import BackwardProblem, Gradients, check_backward
from mok.hopper.gradient_records import WANT_ROUTED
from mok.hopper.packing import Problem, check_fits
from mok.hopper.saved import padded_rows
from mok.hopper.workspace import HopperWorkspace
from mok.main_gradients import NAMES, add_to_main
from mok.portable import SavedRows


def simulated_backward(
    workspace: HopperWorkspace,
    memory: BackwardMemory,
    problem: Problem,
    backward: BackwardProblem,
    *,
    num_sms: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Gradients:
    """The kernels' results: of rows that were kept it reads those, the others it computes again."""
    del num_sms
    workspace.raise_failed()
    check_fits(workspace, problem)
    check_backward(problem, backward)
    experts = problem.gate.shape[0]
    topk, _ = clean_topk(problem.topk, experts * workspace.sizes.ranks)
    schedule = make_schedule(topk, experts, group)
    settings = engine.Settings(group, problem.limit, 4096)
    own = problem.shared
    pair = None if own is None else own[:2]
    again = engine.recompute_pass(problem.x, schedule, (problem.gate, problem.up), pair, settings)
    shared = again[2]
    kept = backward.kept
    if kept is not None and kept.shared_gate is not None and kept.shared_up is not None:
        shared = SavedRows(kept.shared_gate, kept.shared_up)
    saved = engine.Saved(
        dispatch(rows_to_send(problem.x, schedule), schedule, group),
        _kept_rows(backward, again[1], schedule),
        shared,
    )
    found = engine.backward_pass(
        *(backward.d_out, problem.x, problem.router, schedule, saved),
        engine.expert_weights(problem.gate, problem.up, problem.down),
        engine.shared_weights(*(own or (None, None, None))),
        settings,
    )
    wanted: list[Tensor | None] = [
        gradient if backward.wants >> bit & 1 else None
        for bit, gradient in enumerate((*found.routed, *found.shared))
    ]
    assert backward.wants & WANT_ROUTED or not any(w is not None for w in wanted[:3])
    rest = add_to_main(backward.main, wanted)
    return Gradients(
        found.d_x,
        found.d_router,
        **{
            f"d_{name}": gradient.to(backward.dtype)
            for name, gradient in zip(NAMES, rest, strict=True)
            if gradient is not None
        },
    )


def _kept_rows(backward: BackwardProblem, again: SavedRows, schedule: Schedule) -> SavedRows:
    """Rows that the forward kept where it did, else those computed again; in canonical order."""
    kept = backward.kept
    if kept is None or kept.gate is None or kept.up is None:
        return again
    rows = padded_rows(schedule.rows_E, again.gate.device)
    inside = rows < kept.gate.shape[0]
    gate, up = again.gate.clone(), again.up.clone()
    gate[inside], up[inside] = kept.gate[rows[inside]], kept.up[rows[inside]]
    assert not torch.isnan(gate).any()
    return SavedRows(gate, up)
