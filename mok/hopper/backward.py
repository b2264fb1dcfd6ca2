"""One backward on the device: the schedule again, the entry and the layer, on torch's stream.

It exists beside `forward` and keeps its rules: nothing waits for the device, so a CUDA graph can
record it; records go in by value; the grid changes speed and never bits. It is one more launch of
the forward's workspace, whose epochs and flags it uses. Refuses what backward_problem refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mok.errors import InputError
from mok.hopper import backward_packing, backward_problem, gradient_records, packing, records
from mok.hopper.backward_memory import BackwardMemory
from mok.hopper.backward_problem import BackwardProblem, Gradients
from mok.hopper.forward import (
    SCHEDULE_THREADS,
    grid_size,
    launch_schedule,
    on_device_of,
    staging_size,
)
from mok.hopper.packing import Problem, Results
from mok.hopper.support import capturing
from mok.hopper.workspace import HopperWorkspace


def launch_backward(
    workspace: HopperWorkspace,
    memory: BackwardMemory,
    problem: Problem,
    backward: BackwardProblem,
    *,
    num_sms: int = 0,
) -> Gradients:
    """All gradients of one rank. Collective over the workspace's ranks.

    memory: of ensure_backward. problem: the forward's inputs. num_sms: CTAs, 0 for one on each
    multiprocessor; at most so many are used. Raises InputError for tensors that do not fit, and
    what workspace.raise_pending does; with peers, who wait for this call, RoutingError only when it
    has been launched. Main gradients are written by the device, in this stream's order.
    """
    alone = workspace.sizes.ranks == 1
    workspace.raise_failed()
    bad = workspace.counted_bad()
    if alone:
        workspace.raise_bad(bad)
    packing.check_fits(workspace, problem)
    backward_problem.check_backward(problem, backward)
    grid_size(workspace.num_sms, num_sms, 1)  # what it refuses must not end the workspace
    tokens = problem.x.shape[0]
    with on_device_of(workspace):
        if tokens == 0 and alone:
            return backward_problem.without_rows(problem, backward)
        given, mine = packing.aligned(problem), backward_problem.aligned(backward)
        gradients = backward_problem.make_gradients(given, mine)
        record, grad = backward_packing.pack_backward(workspace, memory, given, mine, gradients)
        ids = (given.topk if tokens else None, None)
        with workspace.launching():
            memory.used_on(workspace.device)
            hold_kept(workspace.device, backward.kept)
            launch_backward_kernels([workspace], record, grad, None, None, ids, num_sms)
    if not alone:
        workspace.raise_bad(bad)
    return gradients


def hold_kept(device: torch.device, kept: Results | None) -> None:
    """Lets the memory of g and u go back to their stream only after what this stream does now.

    The forward may have run on another stream, and its caller, who drops a context, cannot see what
    is in it. A graph's memory stays with the graph, so a capture needs nothing.
    """
    if kept is None or device.type != "cuda" or capturing(device):
        return
    for tensor in (kept.gate, kept.up, kept.shared_gate, kept.shared_up):
        if tensor is not None:
            tensor.record_stream(torch.cuda.current_stream(device))


def launch_backward_kernels(
    workspaces: Sequence[HopperWorkspace],
    one: records.Rank,
    grad: gradient_records.Gradient,
    many: torch.Tensor | None,
    grads: torch.Tensor | None,
    ids: tuple[torch.Tensor | None, torch.Tensor | None],
    num_sms: int,
) -> None:
    """The kernels of one backward of the ranks of `workspaces`, which share the launch.

    many, grads: None, or the records of several ranks on one device as bytes; `one` and `grad` are
    then not read. ids: the expert ids of one rank, or a table of such addresses.
    """
    first, ranks_here = workspaces[0], len(workspaces)
    if first.backward is None:
        raise InputError(
            "a workspace without memory for a backward; allowed: one that ensure_backward was "
            "called for. Call it first."
        )
    kernels = first.backward.kernels
    grid = grid_size(first.num_sms, num_sms, ranks_here)
    launch_schedule(workspaces, one, many, ids, num_sms)
    kernels.enter_backward.launch(
        one, many, grad, grads, grid=(staging_size(first), ranks_here), block=SCHEDULE_THREADS
    )
    kernels.backward.launch(
        one,
        grad,
        many,
        grads,
        ctypes.c_uint32(ranks_here),
        grid=grid,
        block=records.THREADS,
        shared=records.SHARED_BYTES,
    )
