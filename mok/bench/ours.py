"""Our layer as contenders: `mok.moe` with the backend that it picks, and with the portable one.

On Hopper `mok` is the kernel's forward with the portable backward, which is many times slower and
would let the card cool for everybody: so there it is timed forward only, unless both directions are
asked for. Its weights lie apart ([E, I, H] gate and up), so `prepare` copies them once; gradients
are joined again only to be compared. Refuses nothing that `mok.moe` accepts.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial

import torch

from mok.bench.contenders import DIRECTIONS, OURS, Contender, Gradients, Inputs, Prepared, leaf

PORTABLE = "mok-portable"
PORTABLE_TFLOPS = {"cuda": 8.0, "cpu": 0.05}
"""Guesses: on CUDA it multiplies in fp32, in tiles of 64 rows."""
HOPPER_TFLOPS = 500.0
"""A guess for the prediction of a run's time, no measurement."""


def _version(backend: str) -> str:
    try:
        number = importlib.metadata.version("mok-verify")
    except importlib.metadata.PackageNotFoundError:
        number = "uninstalled"
    return f"{number} {backend}"


def _arrange(gradients: Gradients) -> Gradients:
    return {
        "d_x": gradients["d_x"],
        "d_gate_up": torch.cat((gradients["d_gate"], gradients["d_up"]), 1),
        "d_down": gradients["d_down"],
        "d_router": gradients["d_router"],
    }


def prepare(inputs: Inputs, backend: str = "auto") -> Prepared:
    """mok.moe on the inputs; gate and up gradients apart until they are arranged."""
    from mok.layer import moe

    gate, up = (leaf(half.contiguous()) for half in inputs.w_gate_up.chunk(2, 1))
    x, down, router = (leaf(t) for t in (inputs.x, inputs.w_down, inputs.router_weights))
    leaves = {"d_x": x, "d_gate": gate, "d_up": up, "d_down": down, "d_router": router}

    def forward() -> torch.Tensor:
        return moe(
            *(x, inputs.topk_experts, router, gate, up, down), group=inputs.group, backend=backend
        )

    def backward(out: torch.Tensor, keep: bool) -> Gradients:
        found = torch.autograd.grad(out, list(leaves.values()), inputs.d_out, retain_graph=keep)
        return dict(zip(leaves, found, strict=True))

    return Prepared(forward, backward, _arrange)


def contender(device: str = "cuda") -> Contender:
    """Always there: it needs nothing but torch. Its version names the backend of this machine."""
    from mok.hopper.support import backend_here

    backend = backend_here()[0] if device == "cuda" else "portable"
    hopper = backend == "hopper"
    guess = _guess(device)
    return Contender(
        OURS,
        _version(backend),
        prepare,
        parallel=True,
        devices=("cpu", "cuda"),
        directions=("forward",) if hopper else DIRECTIONS,
        tflops=guess | {"forward": HOPPER_TFLOPS} if hopper else guess,
    )


def portable(device: str = "cuda") -> Contender:
    """The portable backend where `contender` may be another one; timed only if asked for."""
    return Contender(
        PORTABLE,
        _version("portable"),
        partial(prepare, backend="portable"),
        parallel=True,
        devices=("cpu", "cuda"),
        by_name_only=True,
        tflops=_guess(device),
    )


def _guess(device: str) -> dict[str, float]:
    return dict.fromkeys(DIRECTIONS, PORTABLE_TFLOPS.get(device, PORTABLE_TFLOPS["cpu"]))
