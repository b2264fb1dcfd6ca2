"""What is the same for every peer: its needs in a frozen record, and how it becomes a contender.

A peer is a differentiable function of (x, gate and up weights, down weights, expert ids, router
weights) in its own dtypes and row order. Converting the inputs happens once, untimed; gradients are
brought back to our layout only to be compared. Nothing of a peer is imported before it is loaded,
so that `mok` never needs one. Refuses routing that a peer would read out of bounds with: its
kernels do not check.

Legend: T tokens, K slots, E experts of this rank, H hidden size, I width.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.bench.contenders import (
    Contender,
    Gradients,
    Inputs,
    Missing,
    Prepared,
    from_function,
    leaf,
    unchanged,
)
from mok.errors import InputError

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], gate and up [E, 2I, H], down [E, H, I], ids [T, K], weights [T, K]) -> [T, H]."""


@dataclass(frozen=True)
class Loaded:
    """An imported peer. choices() -> what its autotuners have picked so far, by kernel."""

    layer: Layer
    choices: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True)
class Peer:
    """What a peer is called, what it needs, and how its arguments look.

    distribution: the installed package whose version is reported. modules: what must be importable.
    install: the command that brings it. least: the lowest version that has what is called here.
    interleaved: an expert's gate and up rows alternate (gate 0, up 0, gate 1, ...). parallel: timed
    with NCCL all-to-all around it when there are several ranks.
    """

    name: str
    distribution: str
    modules: tuple[str, ...]
    install: str
    load: Callable[[], Loaded]
    index_dtype: torch.dtype = torch.int64
    score_dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    parallel: bool = False
    devices: tuple[str, ...] = ("cuda",)
    least: tuple[int, ...] = ()


def interleave(gate_up: Tensor) -> Tensor:
    """[E, 2I, H] with I gate rows, then I up rows -> the rows in turn, gate first; a copy."""
    experts, rows, hidden = gate_up.shape
    halves = gate_up.reshape(experts, 2, rows // 2, hidden)
    return halves.transpose(1, 2).reshape(experts, rows, hidden).contiguous()


def deinterleave(gate_up: Tensor) -> Tensor:
    """The inverse of `interleave`; a copy."""
    experts, rows, hidden = gate_up.shape
    pairs = gate_up.reshape(experts, rows // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(experts, rows, hidden).contiguous()


def version_of(distribution: str) -> str:
    """The installed version, or "" when the package's record is not there."""
    if distribution == "torch":  # its record may leave out which CUDA it was built for
        return str(torch.__version__)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def absence(
    modules: tuple[str, ...], distribution: str, install: str, least: tuple[int, ...] = ()
) -> str:
    """Why a peer cannot be loaded here, with what to do; "" when it can, as far as files tell."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"the module {module} is not installed; install it: {install}"
    version = version_of(distribution)
    numbers = tuple(int(part) for part in version.split(".")[: len(least)] if part.isdigit())
    if least and numbers < least:
        wanted = ".".join(map(str, least))
        given = version or "of unknown version"
        return f"{distribution} {given} is too old, {wanted} or later is needed: {install}"
    return ""


def contender_of(peer: Peer) -> Contender | Missing:
    """The peer as a contender of the benchmark, or why it is missing."""
    why = absence(peer.modules, peer.distribution, peer.install, peer.least)
    if why:
        return Missing(peer.name, why)

    def prepare(inputs: Inputs) -> Prepared:
        return prepare_peer(peer, inputs)

    version = version_of(peer.distribution) or "of unknown version"
    return Contender(peer.name, version, prepare, parallel=peer.parallel, devices=peer.devices)


def prepare_peer(peer: Peer, inputs: Inputs) -> Prepared:
    """Loads the peer and converts the inputs. Raises InputError for routing that it cannot take,
    and whatever the peer's own import raises."""
    ranks = 1 if inputs.group is None else inputs.group.size()
    experts = inputs.w_gate_up.shape[0]
    if ranks > 1 and not peer.parallel:
        raise InputError(
            f"{peer.name} runs on one rank, {ranks} were given; leave it out, or use one rank"
        )
    check_routing(peer.name, inputs.topk_experts, ranks * experts)
    loaded = peer.load()
    layer = loaded.layer
    if inputs.group is not None and ranks > 1:
        from mok.bench.peers.nccl import spread

        layer = spread(layer, inputs.group, experts, peer.index_dtype)
    gate_up = interleave(inputs.w_gate_up) if peer.interleaved else inputs.w_gate_up
    leaves = {
        "d_x": leaf(inputs.x),
        "d_gate_up": leaf(gate_up),
        "d_down": leaf(inputs.w_down),
        "d_router": leaf(inputs.router_weights.to(peer.score_dtype)),
    }
    x, gate_up, down, router = leaves.values()
    ids = inputs.topk_experts if ranks > 1 else inputs.topk_experts.to(peer.index_dtype)
    return from_function(
        layer,
        (x, gate_up, down, ids.contiguous(), router),
        leaves,
        inputs.d_out,
        arrange=arrange_interleaved if peer.interleaved else unchanged,
        choices=loaded.choices,
    )


def arrange_interleaved(gradients: Gradients) -> Gradients:
    """Gradients of a peer with interleaved rows in our layout."""
    return {**gradients, "d_gate_up": deinterleave(gradients["d_gate_up"])}


def check_routing(name: str, topk_experts: Tensor, experts: int) -> None:
    """Raises InputError unless all ids are experts. It waits for the device; `prepare` may."""
    if topk_experts.numel() == 0:
        raise InputError(f"{name} was given no tokens; allowed: 1 or more. Raise T.")
    low, high = (int(bound) for bound in torch.aminmax(topk_experts))
    if low < 0 or high >= experts:
        raise InputError(
            f"{name} was given expert ids from {low} to {high}; allowed: 0 to {experts - 1}, since "
            "peers know no unused slots. Use a routing without them, or leave this peer out."
        )
