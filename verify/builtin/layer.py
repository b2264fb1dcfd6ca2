"""What the built-in cases of the layer share: the call, its placement, its float64 reference.

The shared expert is optional everywhere. Refuses to choose shapes, routing or claims: those are
what makes a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verify import inputs as generated
from verify.budgets import Reference, spacing
from verify.conditions.references import View
from verify.placements import Placement, local, replicated, sharded

ROUTED = {"x": "d_x", "router_weights": "d_router_weights"} | {
    f"w_{name}": f"d_w_{name}" for name in ("gate", "up", "down")
}
SHARED = {f"w_shared_{name}": f"d_w_shared_{name}" for name in ("gate", "up", "down")}
LIMIT = 2.0


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


def _shared(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The shared expert's weights in the layer's order; None without one."""
    if not any(name in tensors for name in SHARED):
        return None
    gate, up, down = (tensors[name] for name in SHARED)
    return gate, up, down


def execute(
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    group: Any = None,
    minibatch_size: int = 4096,
    num_sms: int = 0,
    swiglu_limit: float | None = None,
    backend: str = "auto",
    **shared: Tensor,
) -> Tensor:
    """The layer; `minibatch_size` and `num_sms` are schedule knobs that must not change a bit."""
    from mok import MoKConfig, moe

    return moe(
        x,
        topk_experts,
        router_weights,
        w_gate,
        w_up,
        w_down,
        shared=_shared(shared),
        swiglu_limit=swiglu_limit,
        group=group,
        config=MoKConfig(minibatch_size=minibatch_size, num_sms=num_sms),
        backend=backend,
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
    """The float64 layer, without roundings and with those of the contract, and a plain bf16 run.

    On the CPU, whatever the layer runs on: what judges a device must not be computed by it.
    """
    from mok import reference as float64

    inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
    given = float64.MoEInputs(
        inputs["x"],
        inputs["topk_experts"],
        inputs["router_weights"],
        inputs["w_gate"],
        inputs["w_up"],
        inputs["w_down"],
        shared=_shared(inputs),
        swiglu_limit=limit,
    )
    d_out = upstream["out"].cpu()
    exact = float64.moe(given, d_out, "exact", shared_rows=view.rows)
    rounded = float64.moe(given, d_out, "rounded", shared_rows=view.rows)
    plain = plain_bf16(inputs, d_out, view.rows, limit)
    found = {}
    for name, source in {"out": "out", **ROUTED, **SHARED}.items():
        if source not in exact:  # no shared expert
            continue
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
    shared = [leaves[name] for name in SHARED if name in leaves]
    out = mlp(x, *shared) if shared else torch.zeros_like(x)
    for expert in range(leaves["w_gate"].shape[0]):
        token, slot = torch.nonzero(topk == expert, as_tuple=True)
        y = mlp(x[token], *(leaves[f"w_{n}"][expert] for n in ("gate", "up", "down")))
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(out.dtype))
    out.backward(d_out, retain_graph=True)
    found = {"out": out.detach(), **{f"grad.{n}": leaves[n].grad for n in ROUTED}}
    if not shared:
        return found  # type: ignore[return-value]
    own = torch.zeros_like(d_out)
    own[rows] = d_out[rows]
    gradients = torch.autograd.grad(out, shared, own)
    return found | {f"grad.{n}": g for n, g in zip(SHARED, gradients, strict=True)}  # type: ignore[return-value]


def weights(*shape: int) -> generated.TensorSpec:
    """bf16 weights whose scale is the power of two nearest to 1 / sqrt(fan-in)."""
    scale = 2.0 ** -round(torch.log2(torch.tensor(float(shape[-1]))).item() / 2)
    return generated.normal(*shape, dtype=torch.bfloat16, scale=scale, requires_grad=True)
