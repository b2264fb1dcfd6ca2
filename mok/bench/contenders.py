"""What `mok bench layer` needs to know of a contender: a name, a version, forward and backward.

It exists so that every layer is timed on the same inputs and its gradients are compared in one
layout. What a contender needs once (interleaved weights, other index dtypes) happens in `prepare`
and is not timed; what it needs at every call (sorting rows, building a schedule) is its forward.
Refuses to import a contender that was not asked for: adapters load theirs inside `prepare` or while
`available` looks whether it is installed.

Legend: T tokens of this rank, K slots, E experts of this rank, H hidden size, I width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

OURS = "mok"
DIRECTIONS = ("forward", "backward")
GRADIENTS = ("d_x", "d_gate_up", "d_down", "d_router")

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """One rank's part of a problem; all tensors contiguous, on one device, without gradients.

    x [T, H] bf16. w_gate_up [E, 2I, H] bf16: an expert's I gate rows, then its I up rows. w_down
    [E, H, I] bf16. topk_experts [T, K] int64: experts counted over the whole group, no repeated id
    in a token, none unused. router_weights [T, K] fp32, every value representable in bf16. d_out
    [T, H] bf16: the upstream gradient. group: None for one rank; with R ranks, rank r holds experts
    r E .. (r + 1) E - 1.
    """

    x: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    topk_experts: Tensor
    router_weights: Tensor
    d_out: Tensor
    group: dist.ProcessGroup | None = None


def unchanged(gradients: Gradients) -> Gradients:
    """For contenders whose gradients have our layout already."""
    return gradients


def nothing() -> None:
    """For contenders with nothing to give back."""


@dataclass(frozen=True)
class Prepared:
    """A contender with its inputs in place.

    forward() -> out [T, H] bf16 with its autograd graph. backward(out, keep) -> gradients by the
    names in GRADIENTS, in the contender's own layout; with keep the graph survives for another call
    on the same out (it may not be freed by the first). arrange(gradients) -> the same in our layout
    (d_x [T, H], d_gate_up [E, 2I, H], d_down [E, H, I], d_router [T, K]); never timed. close()
    gives back what dropping the record would not. choices() -> what an autotuner picked.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor, bool], Gradients]
    arrange: Callable[[Gradients], Gradients] = unchanged
    close: Callable[[], None] = nothing
    choices: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True)
class Contender:
    """A layer that can be timed here.

    parallel: it accepts inputs with a group of several ranks. by_name_only: it is timed only when
    it is asked for. directions: those that are timed unless the run says which (--direction); a
    contender whose backward is a stand-in names "forward" alone. tflops: guesses by direction, for
    the prediction of a run's time.
    """

    name: str
    version: str
    prepare: Callable[[Inputs], Prepared]
    parallel: bool = False
    devices: tuple[str, ...] = ("cuda",)
    by_name_only: bool = False
    directions: tuple[str, ...] = DIRECTIONS
    tflops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A layer that cannot be timed here, and why, in words that say what to install."""

    name: str
    reason: str


def from_function(
    call: Callable[..., Tensor],
    arguments: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    d_out: Tensor,
    *,
    arrange: Callable[[Gradients], Gradients] = unchanged,
    close: Callable[[], None] = nothing,
    choices: Callable[[], Mapping[str, str]] = dict,
) -> Prepared:
    """A differentiable function of tensors as a contender.

    leaves: the arguments to differentiate by the names in GRADIENTS; they must be leaves that
    require gradients.
    """

    def backward(out: Tensor, keep: bool) -> Gradients:
        found = torch.autograd.grad(out, list(leaves.values()), d_out, retain_graph=keep)
        return dict(zip(leaves, found, strict=True))

    return Prepared(lambda: call(*arguments), backward, arrange, close, choices)


def leaf(tensor: Tensor) -> Tensor:
    """The same memory as a leaf that requires a gradient."""
    return tensor.detach().requires_grad_()


def available(device: str = "cuda") -> list[Contender | Missing]:
    """Every known layer, ours first: ready for a device type, or missing with its reason."""
    from mok.bench import ours, peers

    found: list[Contender | Missing] = [
        ours.contender(device),
        ours.portable(device),
        ours.adding(device),
        *peers.available(),
    ]
    return [
        Missing(entry.name, f"runs on {', '.join(entry.devices)} only, {device} was asked for")
        if isinstance(entry, Contender) and device not in entry.devices
        else entry
        for entry in found
    ]
