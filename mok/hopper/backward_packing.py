"""From a backward's tensors, a workspace and its memory to the records that the kernels read.

It exists apart from the launch so that every address, size and map can be tested without a GPU.
Maps of weights and rings come from the workspace's cache. Refuses nothing: backward_problem has
checked the tensors and cloned those that are not aligned for the copy engine.

Legend: T tokens, H hidden size, I width, S shared width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok.hopper import gradient_records, maps, packing, records
from mok.hopper.backward_memory import BackwardMemory
from mok.hopper.backward_problem import BackwardProblem, Gradients, wanted_weights, wants_of
from mok.hopper.layout import BLOCK
from mok.hopper.packing import Problem, Results
from mok.hopper.workspace import HopperWorkspace


def pack_backward(
    workspace: HopperWorkspace,
    memory: BackwardMemory,
    problem: Problem,
    backward: BackwardProblem,
    gradients: Gradients,
) -> tuple[records.Rank, gradient_records.Gradient]:
    """The two records of one call; the checks and `aligned` of both problems come before."""
    layout, kept = memory.layout, backward.kept
    # A rank that keeps nothing; where it would write its output nobody looks.
    rank = packing.pack(workspace, problem, Results(problem.x))
    rank.out = None
    rank.segment_least, rank.segment_most = layout.segments.least, layout.segments.most
    tokens = problem.x.shape[0]
    saved = 0 if kept is None or kept.gate is None else kept.gate.shape[0]
    shared_again = problem.shared is not None and (kept is None or kept.shared_gate is None)
    grad = gradient_records.Gradient(
        own_d_out=_pointer(backward.d_out),
        d_x=_pointer(gradients.d_x),
        d_router=_pointer(gradients.d_router),
        ring=layout.ring,
        saved_blocks=saved // BLOCK,
        shared_again=int(shared_again),
        wants=backward.wants,
        uncut=layout.uncut,
        max_groups=layout.max_groups,
    )
    for name in (*gradient_records.WORK, *gradient_records.TABLES):
        setattr(grad, name, memory.optional_address(name))
    specs = _routed_specs(workspace, memory, problem, kept)
    if problem.shared is not None and tokens > 0:
        specs |= _shared_specs(workspace, memory, problem, backward)
    for name, weight in wanted_weights(problem, backward):
        main, own = getattr(backward.main, name), getattr(gradients, f"d_{name}")
        prefix, plain = ("shared_", name[7:]) if weight.dim() == 2 else ("", name)
        if main is not None:
            setattr(grad, f"{prefix}main_{plain}", main.data_ptr())
        elif own.dtype == torch.float32:
            setattr(grad, f"{prefix}main_{plain}", own.data_ptr())
            grad.fresh |= wants_of(**{name: True})
        else:
            specs[f"{prefix}w_{plain}_out"] = maps.weight_spec(_experts(own), 16)
    for name, spec in specs.items():
        setattr(grad, name, workspace.maps.get(spec))
    return rank, grad


def _pointer(tensor: Tensor) -> int | None:
    return tensor.data_ptr() if tensor.numel() else None


def _experts(weight: Tensor) -> Tensor:
    """The shared expert's weights as those of one expert among experts."""
    return weight[None] if weight.dim() == 2 else weight


def _in_and_out(name: str, pointer: int, rows: int, columns: int) -> dict[str, maps.MapSpec]:
    """Maps to load and to store rows of the workspace."""
    return {
        name: maps.rows_spec(pointer, rows, columns, 64),
        f"{name}_out": maps.rows_spec(pointer, rows, columns, 16),
    }


def _routed_specs(
    workspace: HopperWorkspace, memory: BackwardMemory, problem: Problem, kept: Results | None
) -> dict[str, maps.MapSpec]:
    sizes, rows = workspace.sizes, memory.layout.ring * BLOCK
    specs = {
        "d_rows": maps.rows_spec(memory.address("d_ring"), rows, sizes.hidden, 64),
        "x_rows": maps.rows_spec(memory.address("x_ring"), rows, sizes.hidden, 64),
    }
    for name in ("d_gate", "d_up", "weighted"):
        specs |= _in_and_out(name, memory.address(name), rows, sizes.width)
    for name in ("gate", "up", "down"):
        specs[name] = maps.weight_spec(getattr(problem, name), 64)
    if kept is not None and kept.gate is not None and kept.up is not None and len(kept.gate):
        for name, tensor in (("saved_gate", kept.gate), ("saved_up", kept.up)):
            specs[name] = maps.rows_spec(tensor.data_ptr(), len(tensor), sizes.width, 64)
    return specs


def _shared_specs(
    workspace: HopperWorkspace, memory: BackwardMemory, problem: Problem, backward: BackwardProblem
) -> dict[str, maps.MapSpec]:
    """Maps of the shared expert, whose rows are the rank's own tokens; T is at least 1."""
    assert problem.shared is not None
    sizes, tokens, kept = workspace.sizes, problem.x.shape[0], backward.kept
    width = sizes.shared_width
    specs = {
        "d_out": maps.rows_spec(backward.d_out.data_ptr(), tokens, sizes.hidden, 64),
        "x": maps.rows_spec(problem.x.data_ptr(), tokens, sizes.hidden, 64),
    }
    for name in ("shared_d_gate", "shared_d_up", "shared_weighted"):
        specs |= _in_and_out(name, memory.address(name), tokens, width)
    for name, weight in zip(("gate", "up", "down"), problem.shared, strict=True):
        specs[f"shared_{name}"] = maps.weight_spec(weight[None], 64)
    if kept is not None and kept.shared_gate is not None and kept.shared_up is not None:
        for name, tensor in (("gate", kept.shared_gate), ("up", kept.shared_up)):
            specs[f"shared_saved_{name}"] = maps.rows_spec(tensor.data_ptr(), tokens, width, 64)
    return specs
