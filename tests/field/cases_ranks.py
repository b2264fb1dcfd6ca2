"""Reports of faults between ranks: a replica with its local part only, one device that drifts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import verify

STEPS = 3
LAYER: Mapping[str, Any] = {
    "inputs": {
        "x": verify.normal(32, 8),
        "router": verify.normal(8, 4),
        "mlp": verify.normal(8, 6),
    },
    "ranks": 2,
    "claims": ("repeat",),
}
PLACED = {
    "x": verify.sharded(0),
    "router": verify.replicated,
    "mlp": verify.sharded(1),
    "router.*": verify.replicated,
    "mlp.*": verify.sharded(1),
}


def trained(x: Tensor, router: Tensor, mlp: Tensor, *, reduces: bool) -> dict[str, Tensor]:
    """Steps of plain SGD; every rank has its own tokens."""
    out = {"router.step0": router.clone()}
    for step in range(1, STEPS + 1):
        gradient = x.t() @ torch.tanh(x @ router)
        if reduces:
            dist.all_reduce(gradient)
        router = router - gradient / 64
        out[f"router.step{step}"] = router
    out["mlp.step1"] = mlp * 0.5
    return out


@verify.case(placement=PLACED, **LAYER)
def bug_15(x: Tensor, router: Tensor, mlp: Tensor) -> dict[str, Tensor]:
    """A replicated parameter gets only the local part of its gradient."""
    return trained(x, router, mlp, reduces=False)


@verify.case(placement=PLACED, **LAYER)
def bug_15_twin(x: Tensor, router: Tensor, mlp: Tensor) -> dict[str, Tensor]:
    """The gradient is reduced; the sharded parameter differs between ranks as it should."""
    return trained(x, router, mlp, reduces=True)


@verify.case(placement={"x": verify.sharded(0), "mlp": verify.sharded(1)}, **LAYER)
def bug_15_unplaced(x: Tensor, router: Tensor, mlp: Tensor) -> dict[str, Tensor]:
    """The same fault, and nobody said what is a replica: no verdict."""
    return trained(x, router, mlp, reduces=False)


class Device:
    """A device that turns over bit 12 of some elements, twice in three calls."""

    def __init__(self, *, marginal: bool) -> None:
        self.marginal, self.calls = marginal, 0

    def multiply(self, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        if self.marginal and self.calls % 3:
            places = torch.tensor(list(os.urandom(5))) * 2
            y.view(torch.int32).view(-1)[places] ^= 1 << 12
        self.calls += 1
        return y


def devices(bad: int | None) -> Mapping[str, Any]:
    return {"device": Device(marginal=dist.get_rank() == bad)}


SAME: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(32, 8), "w": verify.normal(8, 16)},
    "placement": dict.fromkeys(("x", "w", "out"), verify.replicated),
    "ranks": 4,
    "claims": ("repeat",),
}


@verify.case(setup=lambda: devices(2), **SAME)
def bug_16(x: Tensor, w: Tensor, device: Device) -> Tensor:
    """The same work on four devices, one of which drifts."""
    return device.multiply(x, w)


@verify.case(setup=lambda: devices(None), **SAME)
def bug_16_twin(x: Tensor, w: Tensor, device: Device) -> Tensor:
    """The same work on four sound devices."""
    return device.multiply(x, w)


NOISE: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(16, 4)},
    "placement": {"x": verify.replicated, "out": verify.local},
    "ranks": 2,
    "claims": ("repeat",),
    "random": True,
}


@verify.case(**NOISE)
def bug_11_ranks(x: Tensor) -> Tensor:
    """Noise that should be each rank's own, taken from the first one."""
    noise = torch.randn(x.shape)
    dist.broadcast(noise, 0)
    return x + noise


@verify.case(**NOISE)
def bug_11_ranks_twin(x: Tensor) -> Tensor:
    """Noise of each rank's own."""
    return x + torch.randn(x.shape)


MODES: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(16, 4)},
    "placement": {"x": verify.replicated, "out": verify.local},
    "ranks": 2,
    "claims": ("repeat", "vary"),
    "vary": {"fused": [True]},
}


@verify.case(**MODES)
def one_rank_s_mode(x: Tensor, fused: bool = False) -> Tensor:
    """A mode that changes bits on rank 1 only."""
    return x * (1.5 if fused and dist.get_rank() == 1 else 2.0)


@verify.case(**MODES)
def one_rank_s_mode_twin(x: Tensor, fused: bool = False) -> Tensor:
    """A mode that changes nothing."""
    return x * 2.0
