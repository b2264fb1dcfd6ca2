"""The portable backend on CUDA: exact cases bit for bit, alone and over NCCL on two devices."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mok
from mok.exact import ExactCase, exact_case, same_bits
from mok.reference import MoEInputs

ROUTINGS = ("balanced", "skewed", "one-expert", "empty-experts", "k1", "unused-slots")
WEIGHTS = ("w_gate", "w_up", "w_down")
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")


def _case(routing: str, *, clamped: bool = False) -> ExactCase:
    slots = 1 if routing in ("k1", "one-expert") else 2
    return exact_case(96, 64, 32, 8, slots, routing, shared_width=32, clamped=clamped)


def _run(inputs: MoEInputs, d_out: torch.Tensor, group: Any, device: str) -> dict[str, Any]:
    leaves = {
        name: getattr(inputs, name).to(device).requires_grad_()
        for name in ("x", "router_weights", *WEIGHTS)
    }
    assert inputs.shared is not None
    shared = [w.to(device).requires_grad_() for w in inputs.shared]
    out = mok.moe(
        leaves["x"],
        inputs.topk_experts.to(device),
        leaves["router_weights"],
        *(leaves[name] for name in WEIGHTS),
        shared=tuple(shared),
        swiglu_limit=inputs.swiglu_limit,
        group=group,
    )
    named = {**leaves, **dict(zip(SHARED, shared, strict=True))}
    gradients = torch.autograd.grad(out, list(named.values()), d_out.to(device))
    found = {"out": out.detach()} | {f"d_{n}": g for n, g in zip(named, gradients, strict=True)}
    return {name: tensor.cpu() for name, tensor in found.items()}


def _as_stored(name: str, value: torch.Tensor) -> torch.Tensor:
    return value if name == "d_router_weights" else value.bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("clamped", [False, True])
def test_exact_cases_are_bit_equal_on_a_gpu(routing: str, clamped: bool) -> None:
    case = _case(routing, clamped=clamped)
    found = _run(case.inputs, case.d_out, None, "cuda")
    assert found.keys() == case.expected.keys()
    wrong = [n for n, v in found.items() if not same_bits(v, _as_stored(n, case.expected[n]))]
    assert wrong == []


def _rank(rank: int, port: int, routing: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    case = _case(routing)
    rows = slice(0, 37) if rank == 0 else slice(37, 96)
    experts = slice(4 * rank, 4 * rank + 4)
    mine = dataclasses.replace(
        case.inputs,
        x=case.inputs.x[rows],
        topk_experts=case.inputs.topk_experts[rows],
        router_weights=case.inputs.router_weights[rows],
        **{name: getattr(case.inputs, name)[experts].clone() for name in WEIGHTS},
    )
    found = _run(mine, case.d_out[rows], dist.group.WORLD, f"cuda:{rank}")
    for name, value in found.items():
        if name in ("d_w_gate", "d_w_up", "d_w_down"):
            wanted = case.expected[name][experts]
        elif name in ("out", "d_x", "d_router_weights"):
            wanted = case.expected[name][rows]
        else:
            continue  # a rank's own partial sums
        assert same_bits(value, _as_stored(name, wanted)), name
    dist.destroy_process_group()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("routing", ["balanced", "skewed", "unused-slots"])
def test_exact_cases_are_bit_equal_over_nccl(routing: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port, routing), nprocs=2)
