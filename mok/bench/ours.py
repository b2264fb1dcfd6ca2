"""Our layer as a contender: `mok.moe` with whichever backend runs on the device.

Its weights lie apart ([E, I, H] gate and up), so `prepare` copies them once; gradients are joined
again only to be compared. Refuses nothing that `mok.moe` accepts.
"""

from __future__ import annotations

import importlib.metadata

import torch

from mok.bench.contenders import OURS, Contender, Gradients, Inputs, Prepared, leaf


def _version() -> str:
    try:
        number = importlib.metadata.version("mok-verify")
    except importlib.metadata.PackageNotFoundError:
        number = "uninstalled"
    return f"{number} portable"


def _arrange(gradients: Gradients) -> Gradients:
    return {
        "d_x": gradients["d_x"],
        "d_gate_up": torch.cat((gradients["d_gate"], gradients["d_up"]), 1),
        "d_down": gradients["d_down"],
        "d_router": gradients["d_router"],
    }


def prepare(inputs: Inputs) -> Prepared:
    """mok.moe on the inputs; gate and up gradients apart until they are arranged."""
    from mok.layer import moe

    gate, up = (leaf(half.contiguous()) for half in inputs.w_gate_up.chunk(2, 1))
    x, down, router = (leaf(t) for t in (inputs.x, inputs.w_down, inputs.router_weights))
    leaves = {"d_x": x, "d_gate": gate, "d_up": up, "d_down": down, "d_router": router}

    def forward() -> torch.Tensor:
        return moe(x, inputs.topk_experts, router, gate, up, down, group=inputs.group)

    def backward(out: torch.Tensor, keep: bool) -> Gradients:
        found = torch.autograd.grad(out, list(leaves.values()), inputs.d_out, retain_graph=keep)
        return dict(zip(leaves, found, strict=True))

    return Prepared(forward, backward, _arrange)


def contender() -> Contender:
    """Always there: it needs nothing but torch."""
    return Contender(OURS, _version(), prepare, parallel=True, devices=("cpu", "cuda"))
