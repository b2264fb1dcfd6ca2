"""One forward on the device: the schedule, the entry and the layer, on torch's current stream.

It exists so that every way into the Hopper backend launches the same six kernels in the same order.
Nothing here waits for the device, so a CUDA graph can record it; the rank's record goes in by
value. The grid changes speed and never bits. Refuses what packing refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from mok.errors import InputError
from mok.hopper import packing, records
from mok.hopper.packing import Problem, Results
from mok.hopper.workspace import HopperWorkspace

SCHEDULE_THREADS = 256
"""Threads of a CTA of the kernels before `forward` (csrc/moe/schedule.cuh)."""


LEFT_FREE = 20
"""Multiprocessors beside the kernel that waits for peers to come; NCCL takes up to 32 blocks, and
they may come one after another."""


def launch(
    workspace: HopperWorkspace,
    problem: Problem,
    *,
    saved: int | None,
    num_sms: int = 0,
    count_bad: bool = True,
) -> Results:
    """out, and g and u of one rank. Collective over the workspace's ranks.

    saved: rows of g and u to keep (layout.saved_rows), None for nothing. num_sms: CTAs, 0 for one
    on each multiprocessor; at most so many are used. count_bad: False for ids that were counted
    before. Raises InputError for other sizes than the workspace's, and what workspace.raise_pending
    does; with peers, who wait for this call, RoutingError only when it has been launched.
    """
    alone = workspace.sizes.ranks == 1
    workspace.raise_failed()
    bad = workspace.counted_bad()
    if alone:
        workspace.raise_bad(bad)
    packing.check_fits(workspace, problem)
    grid_size(workspace.num_sms, num_sms, 1)  # what it refuses must not end the workspace
    given = packing.aligned(problem)
    tokens = given.x.shape[0]
    with on_device_of(workspace):
        results = packing.make_results(given, saved)
        if tokens == 0 and alone:
            return results
        record = packing.pack(workspace, given, results)
        ids = (given.topk if tokens else None, None)
        with workspace.launching():
            launch_kernels([workspace], record, None, ids, num_sms)
            if count_bad:
                count_bad_ids(workspace)
    if not alone:
        workspace.raise_bad(bad)
    return results


def on_device_of(workspace: HopperWorkspace) -> AbstractContextManager[object]:
    """Makes the workspace's device the current one."""
    if workspace.device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(workspace.device)


def launch_kernels(
    workspaces: Sequence[HopperWorkspace],
    one: records.Rank,
    many: torch.Tensor | None,
    ids: tuple[torch.Tensor | None, torch.Tensor | None],
    num_sms: int,
) -> None:
    """The kernels of one forward of the ranks of `workspaces`, which share the launch.

    many: None, or the records of several ranks on one device as bytes; `one` is then not read. ids:
    the expert ids of one rank, or a table of such addresses.
    """
    first, ranks_here = workspaces[0], len(workspaces)
    grid = grid_size(first.num_sms, num_sms, ranks_here)
    launch_schedule(workspaces, one, many, ids, num_sms)
    first.kernels.enter.launch(
        one, many, grid=(staging_size(first), ranks_here), block=SCHEDULE_THREADS
    )
    first.kernels.forward.launch(
        one,
        many,
        ctypes.c_uint32(ranks_here),
        grid=grid,
        block=records.THREADS,
        shared=records.SHARED_BYTES,
    )


def launch_schedule(
    workspaces: Sequence[HopperWorkspace],
    one: records.Rank,
    many: torch.Tensor | None,
    ids: tuple[torch.Tensor | None, torch.Tensor | None],
    num_sms: int,
) -> None:
    """The kernels that build the schedule, which come first in every launch; see launch_kernels."""
    first, ranks_here = workspaces[0], len(workspaces)
    kernels, sizes, layout = first.kernels, first.sizes, first.layout
    # One CTA per chunk of 128 tokens of a rank, or per expert; other grids give the same tables.
    chunks, own_chunks = layout.max_chunks, layout.max_chunks // sizes.ranks
    block = SCHEDULE_THREADS
    kernels.publish.launch(one, many, *ids, grid=(own_chunks, ranks_here), block=block)
    # It waits until all peers have come to this launch, which they may do only after a collective
    # that needs room here. What comes later waits for nobody who has not come.
    counting = min(chunks, max(1, (num_sms or first.num_sms) - LEFT_FREE))
    if sizes.ranks == ranks_here:
        counting = chunks
    kernels.count.launch(one, many, grid=(counting, ranks_here), block=block)
    kernels.scan.launch(one, many, grid=(sizes.experts, ranks_here), block=block)
    kernels.place.launch(one, many, grid=(chunks, ranks_here), block=block)


def staging_size(workspace: HopperWorkspace) -> int:
    """CTAs a rank of the kernel before the last.

    Several ranks copy rows where peers can read them; one has only counters to clear.
    """
    sms = workspace.num_sms
    return 2 * sms if workspace.sizes.ranks > 1 else min(sms, 8)


def grid_size(sms: int, num_sms: int, ranks_here: int) -> int:
    """CTAs of `forward`: one a multiprocessor or fewer, and at least one a rank.

    Raises InputError where that is not possible: CTAs that wait for one that is not resident would
    wait for ever.
    """
    if num_sms < 0:
        raise InputError(f"num_sms = {num_sms}; allowed: 0 (all) or more. Leave it out.")
    grid = min(num_sms or sms, sms)
    if ranks_here > sms:
        raise InputError(
            f"{ranks_here} ranks share one launch on {sms} multiprocessors; allowed: at most one "
            "rank a multiprocessor. Use fewer ranks."
        )
    return max(grid, ranks_here)


def count_bad_ids(workspace: HopperWorkspace) -> None:
    """Adds this launch's bad ids to those so far and sends the sum to the host, unwaited for.

    A sum, because a later launch may end before the host looks.
    """
    found = workspace.words("counters")[records.PLAN_BAD : records.PLAN_BAD + 1]
    total, on_host = workspace.bad
    total.add_(found)
    on_host.copy_(total, non_blocking=True)
