"""The price of the portable backend's bits: its forward against a plain loop with whole GEMMs.

Protocol: one process, torch's default threads, both contenders alternating, medians. The loop is
what one writes without caring for bits: per expert, gather rows, three fp32 GEMMs of all its rows
on all threads, torch's silu, index_add. Both widen bf16 weights to fp32 at every call, since that
is what they are given. Activations are of order one: exp has a slow path beyond its range. Routing
is uniform at random (so most experts end in a partly filled tile) or skewed (row counts fall with
the square of the expert's number). Goal: at most 1.2 times the loop with random routing. Refuses to
compare results; tests do that.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from mok import functional
from mok.bench.timing import alternate, machine
from mok.config import MoKConfig
from mok.exact import exact_routes, integers
from mok.reference import MoEInputs


def _plain_loop(inputs: MoEInputs) -> Tensor:
    out = torch.zeros(inputs.x.shape, dtype=torch.float32)
    for expert in range(inputs.w_gate.shape[0]):
        token, slot = torch.nonzero(inputs.topk_experts == expert, as_tuple=True)
        rows = inputs.x[token].float()
        gate = rows @ inputs.w_gate[expert].float().t()
        up = rows @ inputs.w_up[expert].float().t()
        hidden = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        y = (hidden @ inputs.w_down[expert].float().t()).bfloat16().float()
        out.index_add_(0, token, inputs.router_weights[token, slot, None] * y)
    return out.bfloat16()


def _uniform(name: str, shape: tuple[int, ...], scale: float) -> Tensor:
    """Values in [-scale, scale), from integers alone."""
    steps = (integers(name, shape) >> np.uint64(40)).astype(np.float32) / 2.0**23 - 1.0
    return torch.from_numpy(steps * scale)


def _inputs(
    tokens: int, hidden: int, width: int, experts: int, slots: int, skew: bool
) -> MoEInputs:
    keys = integers("bench.routes", (tokens, experts))
    random = torch.from_numpy(np.argsort(keys, axis=1)[:, :slots].astype(np.int64))
    up = 1.7 * hidden**-0.5
    return MoEInputs(
        x=_uniform("bench.x", (tokens, hidden), 1.7).bfloat16(),
        topk_experts=exact_routes("skewed", tokens, experts, slots) if skew else random,
        router_weights=_uniform("bench.router", (tokens, slots), 0.25) + 0.5,
        w_gate=_uniform("bench.gate", (experts, width, hidden), up).bfloat16(),
        w_up=_uniform("bench.up", (experts, width, hidden), up).bfloat16(),
        w_down=_uniform("bench.down", (experts, hidden, width), 1.7 * width**-0.5).bfloat16(),
    )


def _portable(inputs: MoEInputs) -> Tensor:
    config = MoKConfig()
    workspace = functional.get_workspace(
        config,
        None,
        device="cpu",
        num_local_tokens=inputs.x.shape[0],
        hidden_size=inputs.x.shape[1],
        topk=inputs.topk_experts.shape[1],
    )
    schedule = functional.build_schedule(
        workspace, config, inputs.topk_experts, num_local_experts=inputs.w_gate.shape[0]
    )
    weights = (inputs.w_gate, inputs.w_up, inputs.w_down)
    return functional.forward(
        config, workspace, schedule, inputs.x, inputs.router_weights, None, None, None, *weights
    )[0]


def measure(
    tokens: int = 1024,
    hidden: int = 512,
    width: int = 256,
    experts: int = 16,
    slots: int = 4,
    rounds: int = 15,
) -> dict[str, object]:
    """Medians in milliseconds, their ratios, protocol and machine; JSON-ready."""
    rows: list[dict[str, object]] = []
    for routing in ("random", "skewed"):
        inputs = _inputs(tokens, hidden, width, experts, slots, routing == "skewed")
        contenders = {
            "portable": partial(_portable, inputs),
            "plain loop": partial(_plain_loop, inputs),
        }
        times = alternate(contenders, rounds)
        for name, value in times.items():
            rows.append(
                {
                    "routing": routing,
                    "contender": name,
                    "median_ms": value.median * 1e3,
                    "lower_quartile_ms": value.lower * 1e3,
                    "upper_quartile_ms": value.upper * 1e3,
                    "ratio_to_loop": value.median / times["plain loop"].median,
                }
            )
    return {
        "measured": len(rows),
        "shape": {"T": tokens, "H": hidden, "I": width, "E": experts, "K": slots},
        "protocol": "forward with workspace and schedule, alternating in one process, median of "
        f"{rounds} rounds after 1 warm-up, 20 ms of rest before each run",
        "rows": rows,
        "goal": "ratio_to_loop at most 1.2 with random routing",
        "machine": machine(),
    }
