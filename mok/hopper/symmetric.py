"""Workspaces of several GPUs: memory that peers map, and the agreement that it needs.

It exists because the kernels read and write peers' memory by plain addresses. Memory comes from
torch's symmetric memory; multicast stays off, since the protocol has flags of its own. Everything
here is collective over the group and happens once for a workspace, never in a call. Refuses two
ranks on one GPU by name: a launch of one would wait for a launch of the other that cannot start.
"""

from __future__ import annotations

import dataclasses
import importlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mok import checks
from mok.errors import InputError, MoKError, UnsupportedError
from mok.hopper import support
from mok.hopper.backward_layout import make_backward_layout
from mok.hopper.backward_memory import (
    REFUSED,
    BackwardMemory,
    assemble_backward,
    load_backward_kernels,
)
from mok.hopper.chains import Chain
from mok.hopper.layout import Segments, Sizes, make_layout
from mok.hopper.timeouts import Timeouts, wanted_timeouts
from mok.hopper.workspace import HopperWorkspace, assemble, clear_symmetric, load_kernels
from mok.variables import variables_set

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_Made = TypeVar("_Made")

_GROUPS: dict[str, list[weakref.ref[Any]]] = {}
"""Groups that had memory, by name: torch gives names again, and never forgets what it knew by one.

Process-wide because torch's own table is.
"""


@dataclass(frozen=True)
class Place:
    """Where a rank runs. device: a name that is the GPU's own, whatever its index here.

    problem: why this rank cannot run the kernels at all, or None.
    """

    host: str
    device: str
    problem: str | None = None


def place_of(device: torch.device) -> Place:
    """This rank's host and GPU."""
    name = str(device)
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return Place(socket.gethostname(), name, support.device_problem(device))


def places_problem(places: Sequence[Place]) -> str | None:
    """Why ranks at these places cannot share memory; None if they can."""
    for rank, place in enumerate(places):
        if place.problem is not None:
            return f"rank {rank} cannot run it: {place.problem}"
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        return f"the group's ranks are on {len(hosts)} hosts ({', '.join(hosts[:4])}); it takes one"
    # On one host a GPU's name is enough.
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


def agree_range(group: dist.ProcessGroup, device: torch.device, value: int) -> tuple[int, int]:
    """The smallest and the largest of the ranks' values. Collective; waits for the device."""
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else device
    sent = torch.tensor([-value, value], dtype=torch.int64, device=where)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    least, most = sent.tolist()
    return -least, most


@contextmanager
def without_multicast() -> Iterator[None]:
    """Symmetric memory that is made inside has no multicast address."""
    with variables_set({_NO_MULTICAST: "1"}):
        yield


def open_symmetric(
    sizes: Sizes,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    segments: Segments | None = None,
    timeouts: Timeouts | None = None,
    chain: Chain | None = None,
) -> HopperWorkspace:
    """The workspace of one rank of a group. Collective; max_tokens becomes the ranks' largest.

    chain: of all launches of groups on this device. Raises UnsupportedError, on all ranks, where
    two ranks share a GPU, not all are on one host, or one of them cannot have its memory.
    """
    support.refuse_capture(device)
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
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        kernels = _together(lambda: load_kernels(device), group, device)
        memory, handle = _shared_memory(symmetric, layout.symmetric_bytes, group, device)

        def assembled() -> HopperWorkspace:
            bases = _bases(memory, handle, dist.get_rank(group))
            clear_symmetric(memory, layout)
            limits = wanted_timeouts(timeouts)
            made = assemble(
                layout,
                device,
                dist.get_rank(group),
                memory,
                bases,
                kernels,
                limits,
                keep=handle,
                chain=chain,
            )
            torch.cuda.synchronize(device)
            return made

        # No peer may write flags before they are cleared, so none goes on before all are here.
        return _together(assembled, group, device)


def open_symmetric_backward(
    workspace: HopperWorkspace, group: dist.ProcessGroup, *, segments: Segments | None = None
) -> BackwardMemory:
    """Memory for backwards of a workspace of open_symmetric. Collective over its group.

    The workspace keeps it. Raises UnsupportedError, on all ranks, where one cannot have it.
    """
    device = workspace.device
    support.refuse_capture(device, REFUSED)
    ranks = dist.get_world_size(group)
    if workspace.sizes.ranks != ranks:
        raise InputError(
            f"a workspace of {workspace.sizes.ranks} ranks in a group of {ranks}; allowed: the "
            "group it was made with. Pass that one."
        )
    layout = make_backward_layout(workspace.layout, segments)
    with torch.inference_mode(False), torch.no_grad():
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        kernels = _together(lambda: load_backward_kernels(device), group, device)
        memory, handle = _shared_memory(symmetric, layout.symmetric_bytes, group, device)

        def assembled() -> BackwardMemory:
            bases = _bases(memory, handle, workspace.rank)
            made = assemble_backward(workspace, layout, memory, bases, kernels, keep=handle)
            torch.cuda.synchronize(device)
            return made

        found = _together(assembled, group, device)
    workspace.keep_backward(found)
    return found


def _shared_memory(
    symmetric: Any, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, Any]:
    """Bytes of this rank that its peers map, and what holds theirs. Collective."""
    with without_multicast():
        memory = _together(
            lambda: symmetric.empty(nbytes, dtype=torch.uint8, device=device), group, device
        )
        return memory, _rendezvous(symmetric, memory, group)


def _together(step: Callable[[], _Made], group: dist.ProcessGroup, device: torch.device) -> _Made:
    """What a rank does by itself while all do: if it fails on one, all raise. Collective."""
    done: list[_Made] = []

    def check() -> None:
        try:
            done.append(step())
        except MoKError:
            raise
        except RuntimeError as error:  # out of memory among them
            raise UnsupportedError(
                f"the Hopper backend's memory could not be made: {error}. Make it for fewer "
                "tokens with get_workspace(..., max_tokens=N), or pass backend='portable'."
            ) from error

    checks.checked("workspace", check, group, device)
    return done[0]


def _rendezvous(symmetric: Any, memory: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Maps the ranks' memory into each other. Collective.

    torch keeps the store of a group by the group's name. A group that was destroyed and made anew
    has the old one's name, and would meet in a store whose ranks are gone: it gets a name of ours.
    """
    name = str(group.group_name)
    known = _GROUPS.setdefault(name, [])
    place = next((i for i, one in enumerate(known) if one() is group), None)
    if place is None:
        place = len(known)
        known.append(weakref.ref(group))
        if place > 0:
            symmetric._SymmetricMemory.set_group_info(
                _own_name(name, place),
                dist.get_rank(group),
                dist.get_world_size(group),
                dist.PrefixStore("mok", distributed_c10d._get_process_group_store(group)),
            )
    if place == 0:
        return symmetric.rendezvous(memory, group)
    return symmetric._SymmetricMemory.rendezvous(memory, _own_name(name, place))


def _own_name(name: str, place: int) -> str:
    return f"mok/{name}/{place}"


def _bases(memory: torch.Tensor, handle: Any, rank: int) -> tuple[int, ...]:
    """The address of every rank's memory as this device sees it."""
    # The tensor may lie inside a larger buffer, at the same place on every rank.
    offset = int(getattr(handle, "offset", 0))
    bases = tuple(int(pointer) + offset for pointer in handle.buffer_ptrs)
    if bases[rank] != memory.data_ptr():
        raise UnsupportedError(
            "torch's symmetric memory gives this rank another address than its tensor has "
            f"({bases[rank]:#x}, {memory.data_ptr():#x}); pass backend='portable'."
        )
    return bases
