"""Our layer as contenders: `mok.moe` with the backend that it picks, and with the portable one.

On Hopper `mok` is the kernels in both directions. With MOK_HOPPER_BACKWARD=0, and with a group that
does not ask for them, its backward is the portable one, which is many times slower and would let
the card cool for everybody: so there it is timed forward only, unless both are asked for. Its
weights lie apart ([E, I, H] gate and up), so `prepare` copies them once; gradients, in bf16 as
autograd gives them, are joined again only to be compared. `mok-main` adds gradients of weights to
fp32 tensors instead, as trainers that accumulate do. Refuses nothing that `mok.moe` accepts.
"""

from __future__ import annotations

import importlib.metadata
import threading
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from mok.bench.contenders import DIRECTIONS, OURS, Contender, Gradients, Inputs, Prepared, leaf

PORTABLE = "mok-portable"
MAIN = "mok-main"
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


def prepare_main(inputs: Inputs) -> Prepared:
    """mok.functional, whose backward adds gradients of weights to fp32 tensors.

    Every forward puts zeros there, so that what one backward leaves can be compared; a second one
    of the same forward, which is timed, adds to it.
    """
    from mok import functional
    from mok.config import MoKConfig

    config = MoKConfig()
    x, router = inputs.x, inputs.router_weights
    gate, up = (half.contiguous() for half in inputs.w_gate_up.chunk(2, 1))
    weights = (None, None, None, gate, up, inputs.w_down)
    workspace = functional.get_workspace(
        *(config, inputs.group),
        device=x.device,
        num_local_tokens=x.shape[0],
        hidden_size=x.shape[1],
        topk=router.shape[1],
    )
    kept = [torch.zeros_like(one, dtype=torch.float32) for one in (gate, up, inputs.w_down)]
    main = functional.MainGradients(*kept)
    contexts: list[functional.ForwardContext] = []
    schedules: list[functional.AnySchedule] = []

    def forward() -> torch.Tensor:
        contexts.clear()
        schedules[:] = [
            functional.build_schedule(
                workspace, config, inputs.topk_experts, num_local_experts=gate.shape[0]
            )
        ]
        out, context = functional.forward(config, workspace, schedules[0], x, router, *weights)
        contexts.append(context)
        for total in kept:
            total.zero_()
        return out

    def backward(out: torch.Tensor, keep: bool) -> Gradients:
        del out, keep
        # Timed again and again on one forward, which a context does not allow.
        context = replace(contexts[0], consumed=threading.Event())
        given = (config, workspace, schedules[0], context, inputs.d_out, x, router, *weights)
        d_x, d_router, *_ = functional.backward(*given, main_grads=main)
        assert d_x is not None
        assert d_router is not None
        gradients = dict(zip(("d_gate", "d_up", "d_down"), kept, strict=True))
        return {"d_x": d_x, "d_router": d_router, **gradients}

    return Prepared(forward, backward, _arrange)


def contender(device: str = "cuda") -> Contender:
    """Always there: it needs nothing but torch. Its version names the backend of this machine."""
    backend, directions, guess = _backend(device)
    return Contender(
        OURS,
        _version(backend),
        prepare,
        parallel=True,
        devices=("cpu", "cuda"),
        directions=directions,
        tflops=guess,
    )


def adding(device: str = "cuda") -> Contender:
    """`contender` with main gradients, timed in the backward alone and only if asked for."""
    backend, _, guess = _backend(device)
    return Contender(
        MAIN,
        _version(f"{backend}, fp32 main gradients"),
        prepare_main,
        parallel=True,
        devices=("cpu", "cuda"),
        by_name_only=True,
        directions=("backward",),
        tflops=guess,
    )


def _backend(device: str) -> tuple[str, tuple[str, ...], dict[str, float]]:
    """What "auto" takes on this machine, the directions worth timing, guesses of their speed."""
    from mok.hopper.support import backend_here, backward_wanted

    backend, guess = "portable", _guess(device)
    if device == "cuda":
        backend = backend_here()[0]
    if backend != "hopper":
        return backend, DIRECTIONS, guess
    if backward_wanted(dist.get_world_size() if dist.is_initialized() else 1):
        return backend, DIRECTIONS, dict.fromkeys(DIRECTIONS, HOPPER_TFLOPS)
    backend = "hopper forward, portable backward"
    return backend, ("forward",), guess | {"forward": HOPPER_TFLOPS}


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
