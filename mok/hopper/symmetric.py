"""Workspaces of several GPUs: memory that peers map, and the agreement that it needs.

It exists because the kernels read and write peers' memory by plain addresses. Memory comes from
torch's symmetric memory; multicast stays off, since the protocol has flags of its own. Everything
here is collective over the group and happens once for a workspace, never in a call. Refuses two
ranks on one GPU by name: a launch of one would wait for a launch of the other that cannot start.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mok.errors import InputError, UnsupportedError
from mok.hopper.layout import Segments, Sizes, make_layout
from mok.hopper.workspace import (
    HopperWorkspace,
    Timeouts,
    assemble,
    clear_symmetric,
    load_kernels,
    refuse_capture,
)

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class Place:
    """Where a rank runs. device: a name that is the GPU's own, whatever its index here."""

    host: str
    device: str


def place_of(device: torch.device) -> Place:
    """This rank's host and GPU."""
    name = str(device)
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return Place(socket.gethostname(), name)


def places_problem(places: Sequence[Place]) -> str | None:
    """Why ranks at these places cannot share memory; None if they can."""
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        return f"the group's ranks are on {len(hosts)} hosts ({', '.join(hosts[:4])}); it takes one"
    first: dict[Place, int] = {}
    for rank, place in enumerate(places):
        if place in first:
            return (
                f"ranks {first[place]} and {rank} share one GPU ({place.device}); it takes a GPU "
                "for each rank"
            )
        first[place] = rank
    return None


def group_problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of a group cannot share memory; the same on all. Collective."""
    places: list[Place | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, place_of(device), group=group)
    return places_problem([place for place in places if place is not None])


def agree_most(group: dist.ProcessGroup, device: torch.device, value: int) -> int:
    """The largest of the ranks' values. Collective; waits for the device."""
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else device
    sent = torch.tensor([value], dtype=torch.int64, device=where)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    return int(sent.item())


@contextmanager
def without_multicast() -> Iterator[None]:
    """Symmetric memory that is made inside has no multicast address."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def open_symmetric(
    sizes: Sizes,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    segments: Segments | None = None,
    timeouts: Timeouts | None = None,
) -> HopperWorkspace:
    """The workspace of one rank of a group. Collective; max_tokens becomes the ranks' largest.

    Raises UnsupportedError, on all ranks, where two ranks share a GPU or not all are on one host.
    """
    refuse_capture(device)
    ranks = dist.get_world_size(group)
    if sizes.ranks != ranks:
        raise InputError(
            f"sizes for {sizes.ranks} ranks in a group of {ranks}; allowed: the group's size. "
            "Set ranks."
        )
    problem = group_problem(group, device)
    if problem is not None:
        raise UnsupportedError(f"the Hopper backend cannot run here: {problem}.")
    most = agree_most(group, device, sizes.max_tokens)
    layout = make_layout(dataclasses.replace(sizes, max_tokens=most), segments)
    with torch.inference_mode(False), torch.no_grad():
        kernels = load_kernels(device)
        memory, bases, handle = _share(layout.symmetric_bytes, group, device)
        clear_symmetric(memory, layout)
        made = assemble(
            layout,
            device,
            dist.get_rank(group),
            memory,
            bases,
            kernels,
            timeouts or Timeouts(),
            keep=handle,
        )
        # No peer may write flags before they are cleared.
        torch.cuda.synchronize(device)
        dist.barrier(group)
    return made


def _share(
    nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, tuple[int, ...], object]:
    """This rank's bytes, the address of every rank's here, and what keeps them mapped."""
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    with without_multicast():
        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group)
    # The tensor may lie inside a larger buffer, at the same place on every rank.
    offset = int(getattr(handle, "offset", 0))
    bases = tuple(int(pointer) + offset for pointer in handle.buffer_ptrs)
    if bases[dist.get_rank(group)] != memory.data_ptr():
        raise UnsupportedError(
            "torch's symmetric memory gives this rank another address than its tensor has "
            f"({bases[dist.get_rank(group)]:#x}, {memory.data_ptr():#x}); pass backend='portable'."
        )
    return memory, bases, handle
