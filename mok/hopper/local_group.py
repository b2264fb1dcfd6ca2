"""LocalGroup: several ranks on one GPU in one launch, with the protocol of real ranks.

It exists for tests: expert parallelism of degree 4, 8, 16 or 64 can be run, and its bits compared,
on one device. Every rank has its own memory, flags and epochs; only their records lie in one table
in global memory. Refuses to be a process group: nothing but this module takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mok.errors import InputError
from mok.hopper import backward_packing, backward_problem, packing, records
from mok.hopper.backward import launch_backward_kernels
from mok.hopper.backward_layout import make_backward_layout
from mok.hopper.backward_memory import (
    REFUSED,
    BackwardKernels,
    BackwardMemory,
    assemble_backward,
    load_backward_kernels,
)
from mok.hopper.backward_problem import BackwardProblem, Gradients
from mok.hopper.forward import count_bad_ids, grid_size, launch_kernels, on_device_of
from mok.hopper.layout import Segments, Sizes, make_layout, saved_rows
from mok.hopper.packing import Problem, Results
from mok.hopper.workspace import (
    HopperWorkspace,
    Kernels,
    Timeouts,
    arena,
    assemble,
    clear_symmetric,
    load_kernels,
    refuse_capture,
)


@dataclass(frozen=True)
class LocalGroup:
    """A test-only group: `ranks` ranks that share one GPU."""

    ranks: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= records.MAX_RANKS:
            raise InputError(
                f"LocalGroup({self.ranks}); allowed: 1 to {records.MAX_RANKS} ranks. Change it."
            )


def open_local_group(
    group: LocalGroup,
    sizes: Sizes,
    device: torch.device,
    *,
    segments: Segments | None = None,
    timeouts: Timeouts | None = None,
    kernels: Kernels | None = None,
) -> tuple[HopperWorkspace, ...]:
    """One workspace per rank on one device. sizes: of one rank; its `ranks` is replaced."""
    refuse_capture(device)
    layout = make_layout(dataclasses.replace(sizes, ranks=group.ranks), segments)
    with torch.inference_mode(False), torch.no_grad():
        loaded = kernels or load_kernels(device, shared=True)
        arenas = [arena(layout.symmetric_bytes, device) for _ in range(group.ranks)]
        for symmetric in arenas:
            clear_symmetric(symmetric, layout)
        bases = tuple(symmetric.data_ptr() for symmetric in arenas)
        return tuple(
            assemble(
                layout, device, rank, arenas[rank], bases, loaded, timeouts or Timeouts(), arenas
            )
            for rank in range(group.ranks)
        )


def launch_local_group(
    workspaces: Sequence[HopperWorkspace],
    problems: Sequence[Problem],
    *,
    save: bool,
    num_sms: int = 0,
) -> list[Results]:
    """One forward of all ranks in one launch; T may differ between them and be 0."""
    _check_ranks(workspaces, problems)
    device = workspaces[0].device
    grid_size(workspaces[0].num_sms, num_sms, len(workspaces))  # before `begin`
    results, packed = [], []
    with on_device_of(workspaces[0]):
        given = []
        for workspace, problem in zip(workspaces, problems, strict=True):
            workspace.raise_pending()
            packing.check_fits(workspace, problem)
            given.append(packing.aligned(problem))
            rows = saved_rows(problem.x.shape[0], workspace.sizes) if save else None
            results.append(packing.make_results(given[-1], rows))
            packed.append(packing.pack(workspace, given[-1], results[-1]))
        many = on_device(records.table(packed), device)
        ids = _addresses(given, device)
        for workspace in workspaces:
            workspace.begin()
        launch_kernels(workspaces, packed[0], many, (None, ids), num_sms)
        for workspace in workspaces:
            count_bad_ids(workspace)
            workspace.end()
    return results


def open_local_group_backward(
    workspaces: Sequence[HopperWorkspace],
    *,
    segments: Segments | None = None,
    kernels: BackwardKernels | None = None,
) -> tuple[BackwardMemory, ...]:
    """Memory for backwards of all ranks; the workspaces keep it."""
    first = workspaces[0]
    refuse_capture(first.device, REFUSED)
    layout = make_backward_layout(first.layout, segments)
    with torch.inference_mode(False), torch.no_grad():
        loaded = kernels or load_backward_kernels(first.device, shared=True)
        arenas = [arena(layout.symmetric_bytes, first.device) for _ in workspaces]
        bases = tuple(symmetric.data_ptr() for symmetric in arenas)
        made = tuple(
            assemble_backward(workspace, layout, arenas[rank], bases, loaded, arenas)
            for rank, workspace in enumerate(workspaces)
        )
    for workspace, memory in zip(workspaces, made, strict=True):
        workspace.keep_backward(memory)
    return made


def launch_local_group_backward(
    workspaces: Sequence[HopperWorkspace],
    problems: Sequence[Problem],
    backwards: Sequence[BackwardProblem],
    *,
    num_sms: int = 0,
) -> list[Gradients]:
    """One backward of all ranks in one launch, after open_local_group_backward."""
    _check_ranks(workspaces, problems)
    _check_ranks(workspaces, backwards)
    device = workspaces[0].device
    grid_size(workspaces[0].num_sms, num_sms, len(workspaces))  # before `begin`
    gradients, packed, grads, held, memories = [], [], [], [], []
    with on_device_of(workspaces[0]):
        for workspace, problem, backward in zip(workspaces, problems, backwards, strict=True):
            workspace.raise_pending()
            memory = workspace.backward
            if memory is None:
                raise InputError(
                    f"rank {workspace.rank} has no memory for a backward; allowed: ranks that "
                    "open_local_group_backward was called for. Call it first."
                )
            memories.append(memory)
            packing.check_fits(workspace, problem)
            backward_problem.check_backward(problem, backward)
            given, mine = packing.aligned(problem), backward_problem.aligned(backward)
            held.append((given, mine))
            gradients.append(backward_problem.make_gradients(given, mine))
            rank, grad = backward_packing.pack_backward(
                workspace, memory, given, mine, gradients[-1]
            )
            packed.append(rank)
            grads.append(grad)
        many, more = (on_device(records.table(table), device) for table in (packed, grads))
        ids = _addresses([given for given, _ in held], device)
        for workspace, memory in zip(workspaces, memories, strict=True):
            workspace.begin()
            memory.used_on(device)
        launch_backward_kernels(workspaces, packed[0], grads[0], many, more, (None, ids), num_sms)
        for workspace in workspaces:
            workspace.end()
    return gradients


def _check_ranks(
    workspaces: Sequence[HopperWorkspace], problems: Sequence[Problem] | Sequence[BackwardProblem]
) -> None:
    if len(workspaces) != len(problems) or len(workspaces) != workspaces[0].sizes.ranks:
        raise InputError(
            f"{len(workspaces)} workspaces and {len(problems)} problems for "
            f"{workspaces[0].sizes.ranks} ranks; allowed: one of each per rank. Pass all of them."
        )


def _addresses(problems: Sequence[Problem], device: torch.device) -> torch.Tensor:
    """A table of where each rank's expert ids lie."""
    return torch.tensor([p.topk.data_ptr() for p in problems], dtype=torch.int64).to(device)


def on_device(data: bytes, device: torch.device) -> torch.Tensor:
    """Bytes as a uint8 tensor; waits for the copy, which is why a graph cannot record it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
