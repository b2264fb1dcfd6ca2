"""Whether the Hopper backend can run a call, and why not.

It exists so that `backend="auto"`, `backend="hopper"`, fake tensors and `mok env` give one answer.
It asks for devices, packages and sizes only, never for addresses or values, so the answer is known
before a call runs and is the same for fake tensors. Refuses to fall back where "hopper" was asked
for by name, and a MOK_HOPPER_BACKWARD that is neither 0 nor 1.
"""

from __future__ import annotations

import functools
import os
import types
from typing import Literal, get_args

import torch

from mok import toolchain
from mok.errors import InputError, UnsupportedError

Backend = Literal["auto", "hopper", "portable"]
BACKENDS: tuple[str, ...] = get_args(Backend)
CAPABILITY = (9, 0)
SHAPES = "H and I multiples of 64, K 1 to 16, at most 1024 experts a rank"
BACKWARD_VARIABLE = "MOK_HOPPER_BACKWARD"


def backward_wanted(ranks: int = 1) -> bool:
    """Whether backwards of Hopper forwards run on the Hopper backend too.

    By default they do on one rank. On several they do where MOK_HOPPER_BACKWARD is 1 on all ranks:
    the kernels have run them on ranks that share a GPU, not yet on several GPUs. 0 gives them to
    the portable backend: to compare both, or to rule the kernels out. Raises InputError when the
    variable holds something else.
    """
    given = os.environ.get(BACKWARD_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise InputError(
            f"{BACKWARD_VARIABLE} = {given!r}; allowed: 1 for the kernels' backward, 0 for the "
            "portable one. Unset it for the default, on all ranks."
        )
    return given == "1" or (given == "" and ranks == 1)


def describe_backward() -> str:
    """Who computes backwards of Hopper forwards, for `mok env`, or what is wrong."""
    try:
        alone, together = backward_wanted(), backward_wanted(2)
    except InputError as error:
        return f"not usable, every call is refused: {error}"
    if not alone:
        return f"the portable backend, for {BACKWARD_VARIABLE}=0"
    return "the kernels" if together else "the kernels; with a group the portable backend"


def check_backend(backend: str) -> None:
    """Raises InputError unless it is one of BACKENDS."""
    if backend not in BACKENDS:
        raise InputError(
            f"backend = {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}. Leave it out for "
            "'auto'."
        )


def capturing(device: torch.device) -> bool:
    """Whether torch's current stream is recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str = "a workspace cannot be made") -> None:
    """Raises InputError inside a CUDA graph capture: a replay would clear flags and counters.

    what: that cannot be done there, as the beginning of a sentence.
    """
    if capturing(device):
        raise InputError(
            f"{what} while a CUDA graph is captured; allowed: before it. Call the layer once with "
            "as many tokens, or get_workspace with max_tokens, beforehand; with a group on all "
            "ranks, and without MOK_CHECK=1."
        )


def device_problem(device: torch.device) -> str | None:
    """Why no kernel of the Hopper backend can run on a device; None if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device of compute capability 9.0, not {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_problem(index)


@functools.cache
def _cuda_problem(index: int) -> str | None:
    found = torch.cuda.get_device_capability(index)
    if found != CAPABILITY:
        return (
            f"it needs compute capability 9.0, and {torch.cuda.get_device_name(index)} has "
            f"{found[0]}.{found[1]}"
        )
    return compiler_problem()


def compiler_problem() -> str | None:
    """Why kernels cannot be compiled and loaded here; None if the packages are there."""
    try:
        for name in ("cuda.core", "cuda.bindings.driver"):
            module: types.ModuleType = toolchain.cuda_module(name)
            del module
        toolchain.nvrtc_version()
    except toolchain.JitError as error:
        return str(error)
    return None


def why_not(
    device: torch.device,
    *,
    hidden: int,
    width: int,
    shared_width: int,
    slots: int,
    experts: int,
    tokens: int,
    ranks: int = 1,
) -> str | None:
    """Why the Hopper backend cannot run these sizes on a device; None if it can.

    tokens: of this rank, which decide only where there is one; several ranks agree on the largest
    and refuse it together.
    """
    problem = device_problem(device)
    if problem is not None:
        return problem
    from mok.hopper.layout import size_problem

    return size_problem(
        max_tokens=tokens if ranks == 1 else 0,
        slots=slots,
        experts=experts,
        hidden=hidden,
        width=width,
        shared_width=shared_width,
        ranks=ranks,
    )


def choose(backend: str, problem: str | None) -> bool:
    """Whether a call takes the Hopper backend, from what why_not said.

    Raises InputError for an unknown name, UnsupportedError where "hopper" cannot be had.
    """
    check_backend(backend)
    if backend == "hopper" and problem is not None:
        raise UnsupportedError(
            f"backend='hopper' cannot run this call: {problem}. Pass backend='auto' or 'portable'."
        )
    return backend != "portable" and problem is None


def backend_here() -> tuple[str, str]:
    """The backend that "auto" takes on torch's current device where shapes allow, and why."""
    if not torch.cuda.is_available():
        return "portable", "torch sees no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    problem = device_problem(device)
    if problem is not None:
        return "portable", f"no Hopper backend on {name}: {problem}"
    return "hopper", (
        f"{name}; where shapes allow ({SHAPES}), else portable; backward: {describe_backward()}"
    )
