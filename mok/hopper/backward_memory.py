"""The memory of the Hopper backward on one rank, made at the first backward of a workspace.

It exists apart from the workspace because who only infers never pays for it. It lives in the
workspace (HopperWorkspace.backward) and goes with it. Epochs, flags and the schedule are the
forward's; peers read x where a forward's x was staged, and results of routes come back where the
forward's do. Nothing here outlives a launch, so nothing has to be cleared. Refuses to be made
inside a capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mok.hopper import gradient_records, records
from mok.hopper.backward_layout import BackwardLayout, make_backward_layout
from mok.hopper.layout import Layout, Region, Segments
from mok.hopper.support import capturing
from mok.hopper.workspace import HopperWorkspace, arena, region_of
from mok.launching import Kernel
from mok.loading import load

ENTER_BACKWARD = "moe/enter_backward.cu"
BACKWARD = "moe/backward.cu"
REFUSED = "memory for a backward cannot be made"
"""What a capture refuses, as the beginning of a sentence."""


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of a backward that come after those of the schedule."""

    enter_backward: Kernel
    backward: Kernel


def load_backward_kernels(device: torch.device, *, shared: bool = False) -> BackwardKernels:
    """Compiled and loaded on a device of capability 9.0; memoised. Raises what `load` does.

    shared: for several ranks that share a launch.
    """
    return BackwardKernels(
        enter_backward=load(ENTER_BACKWARD, "enter_backward", device=device),
        backward=load(BACKWARD, "backward", macros={"GROUP": int(shared)}, device=device),
    )


@dataclass(frozen=True, eq=False)
class BackwardMemory:
    """One rank's memory. Made by ensure_backward or open_local_group_backward.

    local, symmetric: uint8 arenas with the layout's regions. bases: address of every rank's
    symmetric arena. keep: what holds memory of peers.
    """

    layout: BackwardLayout
    local: torch.Tensor
    symmetric: torch.Tensor
    bases: tuple[int, ...]
    kernels: BackwardKernels
    keep: object = None
    _seen: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self.layout.nbytes

    def address(self, name: str) -> int:
        """Of a local region."""
        return self.local.data_ptr() + self.layout.local[name].offset

    def optional_address(self, name: str) -> int | None:
        """Of a local region; None if the layout has none of that name."""
        return self.address(name) if name in self.layout.local else None

    def words(self, name: str) -> torch.Tensor:
        """A local region of 4-byte words, as int32."""
        return region_of(self.local, self.layout.local[name]).view(torch.int32)

    def used_on(self, device: torch.device) -> None:
        """Called by a launch, for memory that goes while torch's current stream still runs."""
        if device.type != "cuda" or capturing(device):
            return
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream not in self._seen:
            self._seen.add(stream.cuda_stream)
            for tensor in (self.local, self.symmetric):
                tensor.record_stream(stream)


def back_peers(
    layout: Layout, own: BackwardLayout, bases: Sequence[int], own_bases: Sequence[int]
) -> tuple[gradient_records.BackPeer, ...]:
    """One BackPeer per rank from the addresses of their arenas: the forward's, the backward's."""

    def at(where: Mapping[str, Region], base: int, name: str) -> int | None:
        return base + where[name].offset if name in where else None

    forward, more = layout.symmetric, own.symmetric
    return tuple(
        gradient_records.BackPeer(
            x=at(forward, base, "x"),
            d_out=at(more, own_base, "d_out"),
            router=at(more, own_base, "router"),
            d_x=at(forward, base, "y"),
            d_router=at(more, own_base, "d_router"),
        )
        for base, own_base in zip(bases, own_bases, strict=True)
    )


def assemble_backward(
    workspace: HopperWorkspace,
    layout: BackwardLayout,
    symmetric: torch.Tensor,
    bases: tuple[int, ...],
    kernels: BackwardKernels,
    keep: object = None,
) -> BackwardMemory:
    """Memory on a symmetric arena that is there; allocates the local part.

    The caller has the workspace keep it, with a group once all ranks have theirs: a rank that kept
    it when another failed would not come to the next meeting.
    """
    device = workspace.device
    with workspace.chain.lock:
        if device.type == "cuda":
            workspace.chain.before(torch.cuda.current_stream(device))
        local = arena(layout.local_bytes, device)
        peers = back_peers(workspace.layout, layout, workspace.bases, bases)
        table = torch.frombuffer(bytearray(records.table(peers)), dtype=torch.uint8)
        region_of(local, layout.local["peers"]).copy_(table)
        made = BackwardMemory(layout, local, symmetric, bases, kernels, keep)
        made.used_on(device)
        if device.type == "cuda":  # the first launch may be on another stream than this copy
            workspace.chain.after(torch.cuda.current_stream(device))
    return made


def open_backward(workspace: HopperWorkspace, segments: Segments | None = None) -> BackwardMemory:
    """The memory of one rank alone. Loads the kernels; raises what that raises."""
    layout = make_backward_layout(workspace.layout, segments)
    with torch.inference_mode(False), torch.no_grad():
        symmetric = arena(layout.symmetric_bytes, workspace.device)
        kernels = load_backward_kernels(workspace.device)
        return assemble_backward(workspace, layout, symmetric, (symmetric.data_ptr(),), kernels)
