"""Inputs for the tests of mok: integers mapped to floats, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from mok import functional
from mok.config import MoKConfig
from mok.exact import integers
from mok.reference import MoEInputs


def uniform(name: str, shape: tuple[int, ...], scale: float = 1.7) -> torch.Tensor:
    """fp32 values in [-scale, scale)."""
    steps = (integers(name, shape) >> np.uint64(40)).astype(np.float32) / 2.0**23 - 1.0
    return torch.from_numpy(steps * scale)


def moe_inputs(
    tokens: int,
    hidden: int,
    width: int,
    experts: int,
    slots: int,
    shared_width: int | None = None,
    limit: float | None = None,
    name: str = "",
) -> MoEInputs:
    """Values of order one, router weights in (0, 1), some unused slots when K > 1."""
    keys = integers(f"{name}routes", (tokens, experts))
    topk = torch.from_numpy(np.argsort(keys, axis=1)[:, :slots].astype(np.int64))
    if slots > 1:
        topk[1::5, 0] = -1
    inner, outer = 1.7 * hidden**-0.5, 1.7 * width**-0.5
    shared = None
    if shared_width is not None:
        shared = (
            uniform(f"{name}sg", (shared_width, hidden), inner).bfloat16(),
            uniform(f"{name}su", (shared_width, hidden), inner).bfloat16(),
            uniform(f"{name}sd", (hidden, shared_width), 1.7 * shared_width**-0.5).bfloat16(),
        )
    return MoEInputs(
        x=uniform(f"{name}x", (tokens, hidden)).bfloat16(),
        topk_experts=topk,
        router_weights=uniform(f"{name}router", (tokens, slots), 0.4) + 0.5,
        w_gate=uniform(f"{name}gate", (experts, width, hidden), inner).bfloat16(),
        w_up=uniform(f"{name}up", (experts, width, hidden), inner).bfloat16(),
        w_down=uniform(f"{name}down", (experts, hidden, width), outer).bfloat16(),
        shared=shared,
        swiglu_limit=limit,
    )


GRADIENTS = (
    "d_x",
    "d_router_weights",
    "d_w_gate",
    "d_w_up",
    "d_w_down",
    "d_w_shared_gate",
    "d_w_shared_up",
    "d_w_shared_down",
)


@dataclass(frozen=True)
class Run:
    """One forward and backward through the functional API on one rank."""

    config: MoKConfig = field(default_factory=MoKConfig)
    recompute: bool = False

    def __call__(self, inputs: MoEInputs, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens, slots = inputs.topk_experts.shape
        workspace = functional.create_workspace(
            self.config,
            None,
            device=inputs.x.device,
            num_local_tokens=tokens,
            hidden_size=inputs.x.shape[1],
            topk=slots,
        )
        schedule = functional.build_schedule(
            workspace, self.config, inputs.topk_experts, num_local_experts=inputs.w_gate.shape[0]
        )
        shared = inputs.shared or (None, None, None)
        weights = (*shared, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.swiglu_limit)
        head = (self.config, workspace, schedule)
        out, context = functional.forward(*head, inputs.x, inputs.router_weights, *weights)
        if self.recompute:
            context = functional.recompute_forward_context(
                *head, inputs.x, *shared[:2], inputs.w_gate, inputs.w_up, inputs.swiglu_limit
            )
        gradients = functional.backward(
            *head, context, d_out, inputs.x, inputs.router_weights, *weights
        )
        named = {
            name: grad for name, grad in zip(GRADIENTS, gradients, strict=True) if grad is not None
        }
        return {"out": out, **named}


@pytest.fixture
def run() -> Callable[..., dict[str, torch.Tensor]]:
    return Run()


@pytest.fixture
def run_with() -> type[Run]:
    return Run


@pytest.fixture
def make_inputs() -> Callable[..., MoEInputs]:
    return moe_inputs


@pytest.fixture
def make_uniform() -> Callable[..., torch.Tensor]:
    return uniform


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's thread count back after a test that changes it."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    functional.clear_workspace_cache()
    yield
    functional.clear_workspace_cache()
