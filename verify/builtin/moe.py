"""`moe`: the mixture-of-experts layer of `mok`, forward and backward, with every promise it makes.

The tokens are split unevenly, and a rank without any token takes part; routing leaves some slots
unused. Shapes are small on purpose: what is checked is the order of every sum, not speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verify import inputs as generated
from verify.budgets import Reference, spacing
from verify.cases import Case
from verify.conditions.references import View
from verify.placements import Placement, local, replicated, sharded

T, H, I, E, K, I_SHARED = 384, 128, 96, 8, 4, 64  # noqa: E741 - the field's names
LIMIT = 2.0
ROUTED = {"x": "d_x", "router_weights": "d_router_weights"} | {
    f"w_{name}": f"d_w_{name}" for name in ("gate", "up", "down")
}
SHARED = {f"w_shared_{name}": f"d_w_shared_{name}" for name in ("gate", "up", "down")}


def uneven(total: int, parts: int) -> list[int]:
    """Unequal shares in rank order; on more than one rank the first has nothing."""
    if parts == 1:
        return [total]
    weight = parts * (parts - 1) // 2
    sizes = [total * index // weight for index in range(parts)]
    sizes[-1] += total - sum(sizes)
    return sizes


PLACEMENT: Mapping[str, Placement] = {
    **dict.fromkeys(("x", "topk_experts", "router_weights", "out"), sharded(0, uneven)),
    **dict.fromkeys(("w_gate", "w_up", "w_down"), sharded(0)),
    **dict.fromkeys(SHARED, replicated),
    **{f"grad.{name}": local for name in SHARED},
}


def routing() -> dict[str, Tensor]:
    """Distinct experts per token from random scores, with every 16th slot unused (-1)."""
    scores = generated.generate("router.scores", (T, E), torch.float32)
    chosen = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :K].contiguous()
    chosen.view(-1)[::16] = -1
    return {"topk_experts": chosen}


def execute(
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_shared_gate: Tensor,
    w_shared_up: Tensor,
    w_shared_down: Tensor,
    group: Any = None,
    minibatch_size: int = 4096,
    swiglu_limit: float | None = None,
) -> Tensor:
    """The layer; `minibatch_size` is a schedule knob that must not change a bit."""
    from mok import MoKConfig, moe

    return moe(
        x,
        topk_experts,
        router_weights,
        w_gate,
        w_up,
        w_down,
        shared=(w_shared_gate, w_shared_up, w_shared_down),
        swiglu_limit=swiglu_limit,
        group=group,
        config=MoKConfig(minibatch_size=minibatch_size),
    )


def execute_clamped(**arguments: Any) -> Tensor:
    """The layer with a clamped SwiGLU."""
    return execute(**arguments, swiglu_limit=LIMIT)


def reference(
    inputs: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    view: View,
    limit: float | None = None,
) -> dict[str, Reference]:
    """The float64 layer, without roundings and with those of the contract, and a plain bf16 run."""
    from mok import reference as float64

    given = float64.MoEInputs(
        inputs["x"],
        inputs["topk_experts"],
        inputs["router_weights"],
        inputs["w_gate"],
        inputs["w_up"],
        inputs["w_down"],
        shared=(inputs["w_shared_gate"], inputs["w_shared_up"], inputs["w_shared_down"]),
        swiglu_limit=limit,
    )
    d_out = upstream["out"]
    exact = float64.moe(given, d_out, "exact", shared_rows=view.rows)
    rounded = float64.moe(given, d_out, "rounded", shared_rows=view.rows)
    plain = plain_bf16(inputs, d_out, view.rows, limit)
    found = {}
    for name, source in {"out": "out", **ROUTED, **SHARED}.items():
        key = "out" if name == "out" else f"grad.{name}"
        dtype = torch.float32 if name == "router_weights" else torch.bfloat16
        value, inner = exact[source], rounded[source]
        cast = 0.5 * spacing(value.unrounded.abs() + value.unrounded_m, dtype)
        found[key] = Reference(
            value.unrounded,
            value.unrounded_m + cast,
            inner.unrounded,
            inner.unrounded_m,
            plain[key],
        )
    return found


def reference_clamped(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: View
) -> dict[str, Reference]:
    """The same with a clamped SwiGLU."""
    return reference(inputs, upstream, view, LIMIT)


def plain_bf16(
    inputs: Mapping[str, Tensor], d_out: Tensor, rows: slice, limit: float | None
) -> dict[str, Tensor]:
    """What anybody's bf16 loop over experts gives, for comparison of errors; not a reference."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
        for name, tensor in inputs.items()
    }

    def mlp(rows_: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g, u = rows_ @ gate.t(), rows_ @ up.t()
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (torch.nn.functional.silu(g) * u) @ down.t()

    x, topk, weights = leaves["x"], leaves["topk_experts"], leaves["router_weights"]
    out = mlp(x, *(leaves[name] for name in SHARED))
    for expert in range(leaves["w_gate"].shape[0]):
        token, slot = torch.nonzero(topk == expert, as_tuple=True)
        y = mlp(x[token], *(leaves[f"w_{n}"][expert] for n in ("gate", "up", "down")))
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(out.dtype))
    out.backward(d_out, retain_graph=True)
    found = {"out": out.detach(), **{f"grad.{n}": leaves[n].grad for n in ROUTED}}
    own = torch.zeros_like(d_out)
    own[rows] = d_out[rows]
    gradients = torch.autograd.grad(out, [leaves[name] for name in SHARED], own)
    return found | {f"grad.{n}": g for n, g in zip(SHARED, gradients, strict=True)}  # type: ignore[return-value]


def weights(*shape: int) -> generated.TensorSpec:
    """bf16 weights whose scale is the power of two nearest to 1 / sqrt(fan-in)."""
    scale = 2.0 ** -round(torch.log2(torch.tensor(float(shape[-1]))).item() / 2)
    return generated.normal(*shape, dtype=torch.bfloat16, scale=scale, requires_grad=True)


MOE = Case(
    name="moe",
    description="mixture of experts, forward and backward: mok's portable backend",
    execute=execute,
    setup=routing,
    inputs={
        "x": generated.normal(T, H, dtype=torch.bfloat16, requires_grad=True),
        "router_weights": generated.uniform(T, K, requires_grad=True),
        "w_gate": weights(E, I, H),
        "w_up": weights(E, I, H),
        "w_down": weights(E, H, I),
        "w_shared_gate": weights(I_SHARED, H),
        "w_shared_up": weights(I_SHARED, H),
        "w_shared_down": weights(H, I_SHARED),
    },
    claims=(
        "repeat",
        "process",
        "memory",
        "threads",
        "history",
        "contention",
        "batch",
        "schedule",
        "ep",
        "rank",
        "reference",
    ),
    placement=PLACEMENT,
    batch=dict.fromkeys(("x", "topk_experts", "router_weights", "out"), 0),
    schedule=({"minibatch_size": 128}, {"minibatch_size": 256}, {"minibatch_size": 8192}),
    ep=(1, 2, 4, 8),
    reference=reference,
    ranks=4,
)
CLAMPED = replace(
    MOE,
    name="moe/clamped",
    description="the same with a clamped SwiGLU",
    execute=execute_clamped,
    reference=reference_clamped,
    claims=("repeat", "ep", "rank", "reference"),
)
