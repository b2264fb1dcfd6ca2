"""The layer on a GPU by the Hopper backend: inputs there, output with gradients, parts of ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from hopper_fakes import sizes_of
from torch import Tensor

import mok
from mok.exact import ExactCase, exact_case, integers, same_bits
from mok.hopper.packing import Problem
from mok.hopper.workspace import HopperWorkspace, Timeouts, open_workspace
from mok.reference import MoEInputs

WEIGHTS = ("w_gate", "w_up", "w_down")
TIMEOUTS = Timeouts(10.0, 10.0)
TRUNCATING = 2.0**-22
"""The accumulation unit of a tensor core; see mok.deviations."""


def on_cuda(inputs: MoEInputs) -> MoEInputs:
    """The same on the current CUDA device."""
    moved: dict[str, Any] = {
        field.name: value.cuda()
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    if inputs.shared is not None:
        moved["shared"] = tuple(weight.cuda() for weight in inputs.shared)
    return dataclasses.replace(inputs, **moved)


@functools.cache
def exact_on_cuda(*args: Any, **options: Any) -> tuple[ExactCase, MoEInputs]:
    """An exact case and its inputs on the device."""
    case = exact_case(*args, **options)
    return case, on_cuda(case.inputs)


def moe_out(inputs: MoEInputs, **options: Any) -> Tensor:
    """The output, by the Hopper backend unless told otherwise."""
    return mok.moe(
        *(inputs.x, inputs.topk_experts, inputs.router_weights),
        *(inputs.w_gate, inputs.w_up, inputs.w_down, inputs.shared, inputs.swiglu_limit),
        **{"backend": "hopper", **options},
    )


def with_leaves(inputs: MoEInputs) -> tuple[MoEInputs, dict[str, Tensor]]:
    """Inputs on the same memory that want gradients, and those by their names."""
    names = ("x", "router_weights", *WEIGHTS)
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
    shared = None
    if inputs.shared is not None:
        shared = tuple(weight.detach().requires_grad_() for weight in inputs.shared)
        leaves |= dict(zip((f"w_shared_{n}" for n in ("gate", "up", "down")), shared, strict=True))
    return dataclasses.replace(inputs, shared=shared, **{n: leaves[n] for n in names}), leaves


def run_layer(inputs: MoEInputs, d_out: Tensor, **options: Any) -> dict[str, Tensor]:
    """out and all gradients, as mok.exact names them."""
    given, leaves = with_leaves(inputs)
    out = moe_out(given, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), d_out.to(out.device))
    return {"out": out.detach()} | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}


def different(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> set[str]:
    """Names of what is not the same bit for bit; weight gradients in the dtype that was found."""
    assert found.keys() == wanted.keys()
    return {
        name for name in found if not same_bits(found[name], wanted[name].to(found[name].dtype))
    }


@functools.cache
def random_inputs() -> MoEInputs:
    """700 tokens of random values, a crowded expert, unused slots and a shared expert."""

    def values(name: str, *shape: int, scale: float = 1.7) -> Tensor:
        steps = torch.from_numpy((integers(name, shape) >> 40).astype("float32")) / 2.0**23 - 1.0
        return steps * scale

    tokens, hidden, width, experts, slots = 700, 256, 320, 16, 4
    keys = torch.from_numpy((integers("routes", (tokens, experts)) >> 1).astype("int64"))
    topk = keys.argsort(dim=1)[:, :slots].contiguous()
    topk[::3, 0] = 5  # a crowded expert
    topk[::3, 1:][topk[::3, 1:] == 5] = -1
    inner, outer = 1.7 * hidden**-0.5, 1.7 * width**-0.5
    return MoEInputs(
        x=values("x", tokens, hidden).bfloat16(),
        topk_experts=topk,
        router_weights=values("router", tokens, slots, scale=0.4) + 0.5,
        w_gate=values("gate", experts, width, hidden, scale=inner).bfloat16(),
        w_up=values("up", experts, width, hidden, scale=inner).bfloat16(),
        w_down=values("down", experts, hidden, width, scale=outer).bfloat16(),
        shared=(
            values("sg", 128, hidden, scale=inner).bfloat16(),
            values("su", 128, hidden, scale=inner).bfloat16(),
            values("sd", hidden, 128, scale=0.1).bfloat16(),
        ),
        swiglu_limit=None,
    )


@functools.cache
def random_upstream() -> Tensor:
    """bf16 d_out for random_inputs, on the CPU."""
    shape = random_inputs().x.shape
    steps = torch.from_numpy((integers("d_out", tuple(shape)) >> 40).astype("float32"))
    return ((steps / 2.0**23 - 1.0) * 1.7).bfloat16()


def open_for(problem: Problem, tokens: int = 0, **options: Any) -> HopperWorkspace:
    """A workspace for a call, and for more tokens if so many are given."""
    sizes = sizes_of(problem, tokens or problem.x.shape[0])
    return open_workspace(sizes, problem.x.device, timeouts=TIMEOUTS, **options)


def parts_of(inputs: MoEInputs, tokens: Sequence[int]) -> list[Problem]:
    """The problem of every rank: its tokens, and an equal share of the experts."""
    experts = inputs.w_gate.shape[0] // len(tokens)
    parts, start = [], 0
    for rank, count in enumerate(tokens):
        mine = slice(start, start + count)
        own = slice(rank * experts, (rank + 1) * experts)
        start += count
        parts.append(
            Problem(
                *(inputs.x[mine], inputs.topk_experts[mine], inputs.router_weights[mine]),
                *(getattr(inputs, name)[own].contiguous() for name in WEIGHTS),
                inputs.shared,
                inputs.swiglu_limit,
            )
        )
    assert start == inputs.x.shape[0]
    return parts
