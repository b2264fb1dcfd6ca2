"""Error of a contender against float64: relative L2, of the whole problem or of a sample of it.

The reference is written here, dense by expert and by hand in float64, and shares no code with any
contender; mok.reference, which bounds every element, judges our own bits elsewhere. A sample is
some tokens (for out, d_x and d_router, which need only these rows) and some experts (for the weight
gradients, which need all of an expert's rows). Refuses to judge: it gives numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mok.bench.contenders import Inputs

OUTPUTS = ("out", "d_x", "d_gate_up", "d_down", "d_router")
_BY_TOKEN = ("out", "d_x", "d_router")


@dataclass(frozen=True)
class Selection:
    """Which tokens and which experts are compared: int64 indices, ascending, of this rank."""

    tokens: Tensor
    experts: Tensor

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The compared part of an output."""
        return tensor[self.tokens if name in _BY_TOKEN else self.experts]


def everything(inputs: Inputs) -> Selection:
    """All tokens and all experts."""
    device = inputs.x.device
    return Selection(
        torch.arange(inputs.x.shape[0], device=device),
        torch.arange(inputs.w_down.shape[0], device=device),
    )


def sample(inputs: Inputs, tokens: int, experts: int) -> Selection:
    """Evenly spread tokens, and experts likewise; all of them if there are not more."""
    whole = everything(inputs)

    def spread(all_of: Tensor, count: int) -> Tensor:
        step = max(all_of.numel() / max(count, 1), 1.0)
        return all_of[[int(place * step) for place in range(min(count, all_of.numel()))]]

    return Selection(spread(whole.tokens, tokens), spread(whole.experts, experts))


def reference(inputs: Inputs, selection: Selection) -> dict[str, Tensor]:
    """float64 outputs by name, only the selected tokens and experts; for one rank's whole problem.

    d_gate_up is [experts, 2I, H] with gate rows first.
    """
    tokens, hidden = inputs.x.shape
    experts, width = inputs.w_down.shape[0], inputs.w_down.shape[2]
    device, float64 = inputs.x.device, torch.float64
    wanted = torch.zeros(tokens, dtype=torch.bool, device=device)
    wanted[selection.tokens] = True
    whole_experts = set(selection.experts.tolist())
    out = torch.zeros(tokens, hidden, dtype=float64, device=device)
    d_x = torch.zeros_like(out)
    d_router = torch.zeros(inputs.topk_experts.shape, dtype=float64, device=device)
    d_gate_up, d_down = [], []
    for expert in range(experts):
        here = inputs.topk_experts == expert
        if expert not in whole_experts:
            here = here & wanted[:, None]
        token, slot = here.nonzero(as_tuple=True)
        if not token.numel() and expert not in whole_experts:
            continue
        gate_up, down = inputs.w_gate_up[expert].double(), inputs.w_down[expert].double()
        x, d_y = inputs.x[token].double(), inputs.d_out[token].double()
        weight = inputs.router_weights[token, slot].double()[:, None]
        gate, up = (x @ gate_up.t()).split(width, 1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        h = silu * up
        out.index_add_(0, token, weight * (h @ down.t()))
        d_h = d_y @ down
        d_router[token, slot] = (d_h * h).sum(1)
        d_h = weight * d_h
        d_rows = torch.cat((d_h * up * (sigmoid + silu * (1 - sigmoid)), d_h * silu), 1)
        d_x.index_add_(0, token, d_rows @ gate_up)
        if expert in whole_experts:
            d_gate_up.append(d_rows.t() @ x)
            d_down.append(d_y.t() @ (weight * h))
    return {
        "out": out[selection.tokens],
        "d_x": d_x[selection.tokens],
        "d_gate_up": torch.stack(d_gate_up),
        "d_down": torch.stack(d_down),
        "d_router": d_router[selection.tokens],
    }


def relative_l2(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| over all elements; NaN in got gives infinity."""
    difference = float((got.detach().double() - expected).norm() / expected.norm())
    return difference if difference == difference else float("inf")


def errors(
    outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], selection: Selection
) -> dict[str, float]:
    """Relative L2 by output; `outputs` are whole, in our layout."""
    return {
        name: relative_l2(selection.of(name, outputs[name]), expected[name]) for name in OUTPUTS
    }


def gathered(inputs: Inputs) -> Inputs:
    """The whole group's problem on every rank: tokens and experts in rank order, no group."""
    if inputs.group is None:
        return inputs
    group, ranks = inputs.group, dist.get_world_size(inputs.group)

    def all_of(tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(parts, tensor, group=group)
        return torch.cat(parts)

    names = ("x", "w_gate_up", "w_down", "topk_experts", "router_weights", "d_out")
    return replace(inputs, group=None, **{name: all_of(getattr(inputs, name)) for name in names})


def own_part(inputs: Inputs, rank: int) -> Selection:
    """A rank's tokens and experts inside the gathered problem; `inputs` are the rank's own."""
    own = everything(inputs)
    return Selection(
        own.tokens + rank * own.tokens.numel(), own.experts + rank * own.experts.numel()
    )
