"""From a call's tensors and a workspace to the record that the kernels read.

It exists apart from the launch so that every address, size and map can be tested without a GPU.
Maps of weights and of the workspace come from its cache; a tensor that is not aligned for the copy
engine is cloned. Refuses a call that the workspace was not made for.

Legend: T tokens, K slots, E experts of this rank, H hidden size, I width, S shared width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mok import stages
from mok.errors import InputError
from mok.hopper import maps, records
from mok.hopper.layout import BLOCK
from mok.hopper.workspace import HopperWorkspace


@dataclass(frozen=True)
class Problem:
    """One rank's inputs of a forward; contiguous.

    x bf16 [T, H], topk int64 [T, K] raw ids, router fp32 [T, K], gate and up bf16 [E, I, H], down
    bf16 [E, H, I], shared: (gate, up, down) bf16 [S, H], [S, H], [H, S]. limit: swiglu_limit.
    """

    x: Tensor
    topk: Tensor
    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Results:
    """What a forward writes.

    out bf16 [T, H]. gate, up: g and u rounded to bf16, [saved rows, I], in canonical order with
    every expert padded to 128 rows; rows of padding hold nothing of meaning. shared_gate,
    shared_up: bf16 [T, S]. All but out are None where nothing is kept.
    """

    out: Tensor
    gate: Tensor | None = None
    up: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None


def aligned(problem: Problem) -> Problem:
    """The same with tensors that begin at multiples of 16 bytes; clones those that do not."""

    def fix(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.data_ptr() % maps.ALIGNMENT else tensor

    own = problem.shared
    return Problem(
        fix(problem.x),
        fix(problem.topk),
        fix(problem.router),
        fix(problem.gate),
        fix(problem.up),
        fix(problem.down),
        None if own is None else (fix(own[0]), fix(own[1]), fix(own[2])),
        problem.limit,
    )


def check_fits(workspace: HopperWorkspace, problem: Problem) -> None:
    """Raises InputError when the workspace was made for other sizes than a call has."""
    sizes = workspace.sizes
    tokens, hidden = problem.x.shape
    experts, width = problem.gate.shape[:2]
    shared = 0 if problem.shared is None else problem.shared[0].shape[0]
    given = {
        "H": (hidden, sizes.hidden),
        "K": (problem.topk.shape[1], sizes.slots),
        "E": (experts, sizes.experts),
        "I": (width, sizes.width),
        "shared I": (shared, sizes.shared_width),
    }
    wrong = [f"{name} = {got} (made for {want})" for name, (got, want) in given.items()]
    if any(got != want for got, want in given.values()):
        raise InputError(
            f"the workspace does not fit: {', '.join(wrong)}; allowed: the sizes it was made for. "
            "Make one for these sizes."
        )
    if tokens > sizes.max_tokens:
        raise InputError(
            f"T = {tokens}; allowed: up to {sizes.max_tokens}, what the workspace was made for. "
            "Make it with a larger max_tokens."
        )


def make_results(problem: Problem, saved: int | None) -> Results:
    """Fresh tensors for a call. saved: rows of g and u to keep; None keeps nothing.

    A rank whose experts get no rows still has one block of them: what it saves of the shared expert
    depends on saving at all.
    """
    x = problem.x
    out = torch.empty_like(x)
    if saved is None:
        return Results(out)
    rows = max(saved, BLOCK)
    # Rows beyond the last expert's are never written.
    make = x.new_zeros if stages.heard() else x.new_empty
    gate, up = (make((rows, problem.gate.shape[1])) for _ in range(2))
    if problem.shared is None:
        return Results(out, gate, up)
    shape = (x.shape[0], problem.shared[0].shape[0])
    return Results(out, gate, up, x.new_empty(shape), x.new_empty(shape))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def pack(workspace: HopperWorkspace, problem: Problem, results: Results) -> records.Rank:
    """The record of one call; check_fits and aligned come before."""
    layout, sizes = workspace.layout, workspace.sizes
    tokens = problem.x.shape[0]
    ring_x, hidden = workspace.address("x_ring"), workspace.address("hidden")
    ring_rows = layout.ring_h * BLOCK
    specs = {
        "x_rows": maps.rows_spec(ring_x, layout.ring_x * BLOCK, sizes.hidden, 64),
        "gate": maps.weight_spec(problem.gate, 128),
        "up": maps.weight_spec(problem.up, 128),
        "hidden": maps.rows_spec(hidden, ring_rows, sizes.width, 64),
        "hidden_out": maps.rows_spec(hidden, ring_rows, sizes.width, 16),
        "down": maps.weight_spec(problem.down, 256),
    }
    save = results.gate is not None and results.up is not None
    if save:
        assert results.gate is not None
        assert results.up is not None
        for name, rows in (("saved_gate", results.gate), ("saved_up", results.up)):
            specs[name] = maps.rows_spec(rows.data_ptr(), rows.shape[0], sizes.width, 16)
    if problem.shared is not None and tokens > 0:
        specs |= _shared_specs(workspace, problem, results)
    rank = records.Rank(
        own_x=_pointer(problem.x),
        out=_pointer(results.out),
        router=_pointer(problem.router),
        shared_y=workspace.address("shared_y") if sizes.shared_width else None,
        x_ring=ring_x,
        peers=workspace.address("peers"),
        routes=workspace.address("routes"),
        blocks=workspace.address("blocks"),
        groups=workspace.address("groups"),
        counters=workspace.address("counters"),
        expert_rows=workspace.address("expert_rows"),
        counts=workspace.address("counts"),
        failure=workspace.failure.data_ptr(),
        timeout_enter=int(workspace.timeouts.enter * 1e9),
        timeout=int(workspace.timeouts.inside * 1e9),
        rank=workspace.rank,
        ranks=sizes.ranks,
        experts=sizes.experts,
        slots=sizes.slots,
        tokens=tokens,
        max_tokens=sizes.max_tokens,
        hidden_size=sizes.hidden,
        width=sizes.width,
        shared_width=sizes.shared_width,
        ring_x=layout.ring_x,
        ring_h=layout.ring_h,
        max_blocks=layout.max_blocks,
        max_shared_blocks=layout.max_shared_blocks,
        max_groups=layout.max_groups,
        max_chunks=layout.max_chunks,
        save=int(save),
        segment_least=layout.segments.least,
        segment_most=layout.segments.most,
        limit=math.inf if problem.limit is None else problem.limit,
    )
    for name, spec in specs.items():
        setattr(rank, name, workspace.maps.get(spec))
    return rank


def _shared_specs(
    workspace: HopperWorkspace, problem: Problem, results: Results
) -> dict[str, maps.MapSpec]:
    """Maps of the shared expert, whose rows are the rank's own tokens; T is at least 1."""
    assert problem.shared is not None
    gate, up, down = problem.shared
    sizes, tokens = workspace.sizes, problem.x.shape[0]
    hidden, width = workspace.address("shared_hidden"), sizes.shared_width
    specs = {
        "x": maps.rows_spec(problem.x.data_ptr(), tokens, sizes.hidden, 64),
        "shared_gate": maps.weight_spec(gate[None], 128),
        "shared_up": maps.weight_spec(up[None], 128),
        "shared_hidden": maps.rows_spec(hidden, tokens, width, 64),
        "shared_hidden_out": maps.rows_spec(hidden, tokens, width, 16),
        "shared_down": maps.weight_spec(down[None], 256),
    }
    kept = {"shared_saved_gate": results.shared_gate, "shared_saved_up": results.shared_up}
    for name, rows in kept.items():
        if rows is not None:
            specs[name] = maps.rows_spec(rows.data_ptr(), tokens, width, 16)
    return specs
