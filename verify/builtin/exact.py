"""`moe/exact-*`: small integers for which every product and partial sum is exact.

Output and every gradient must equal the rounding reference bit for bit, in whatever order they are
added: a lost token, a wrong index, a dropped sigmoid or clamp shows as a wrong bit. They say
nothing about the accuracy of the sigmoid between its fixed points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from verify.builtin import covered
from verify.builtin.layer import uneven
from verify.cases import Case
from verify.conditions.references import View
from verify.placements import Placement, local, replicated, sharded

WEIGHTS = ("w_gate", "w_up", "w_down")
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")
VARIANTS: dict[str, dict[str, Any]] = {
    "balanced": {"routing": "balanced", "shared_width": 32},
    "skewed": {"routing": "skewed", "shared_width": 16},
    "one-expert": {"routing": "one-expert", "slots": 1},
    "empty-experts": {"routing": "empty-experts"},
    "top-1": {"routing": "k1", "slots": 1},
    "unused-slots": {"routing": "unused-slots", "shared_width": 32},
    "clamped": {"routing": "balanced", "clamped": True, "shared_width": 32},
}
SHAPE = {"tokens": 96, "hidden": 64, "width": 32, "experts": 8, "slots": 2}
TILED_SHAPE = {**SHAPE, "tokens": 200, "hidden": 192, "width": 192}
TILED = {
    f"tiled-{name}": {**TILED_SHAPE, **variant}
    | ({"shared_width": 64} if "shared_width" in variant else {})
    for name, variant in VARIANTS.items()
}
"""The same routings at widths that the Hopper kernel takes, each with a tail of 64. No case of the
package: their results would be goldens of the same arithmetic again, four times as large."""


@lru_cache(maxsize=1)
def built(variant: str) -> Any:
    """The exact case of a variant; one is kept, since setup and expectation both need it."""
    from mok.exact import exact_case

    return exact_case(**{**SHAPE, **(VARIANTS | TILED)[variant]})


def _setup(variant: str) -> Callable[[], Mapping[str, Any]]:
    def setup() -> Mapping[str, Any]:
        case = built(variant)
        given = case.inputs
        made = {
            name: getattr(given, name).clone().requires_grad_(name != "topk_experts")
            for name in ("x", "topk_experts", "router_weights", *WEIGHTS)
        }
        for name, weight in zip(SHARED, given.shared or (), strict=False):
            made[name] = weight.clone().requires_grad_()
        made["d_out"] = case.d_out.clone()
        return {**made, "swiglu_limit": given.swiglu_limit}

    return setup


def execute(
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    d_out: Tensor,
    swiglu_limit: float | None,
    group: Any = None,
    backend: str = "auto",
    **shared: Tensor,
) -> dict[str, Tensor]:
    """Output and all gradients for the given upstream gradient, which is exact too."""
    from mok import moe

    routed = {"x": x, "router_weights": router_weights}
    routed |= {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    weights = tuple(shared[name] for name in SHARED if name in shared)
    out = moe(
        x,
        topk_experts,
        router_weights,
        w_gate,
        w_up,
        w_down,
        shared=weights if weights else None,  # type: ignore[arg-type]
        swiglu_limit=swiglu_limit,
        group=group,
        backend=backend,
    )
    leaves = {**routed, **shared}
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out)
    return {"out": out} | {f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)}


def _expected(variant: str) -> Callable[..., Mapping[str, Tensor]]:
    def expected(
        inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: View
    ) -> Mapping[str, Tensor]:
        from mok import reference as float64

        case = built(variant)
        own = float64.moe(case.inputs, case.d_out, "rounded", shared_rows=view.rows)
        found = dict(case.expected)
        found |= {f"d_{n}": own[f"d_{n}"].v.float() for n in SHARED if f"d_{n}" in own}
        return {n: v if n == "d_router_weights" else v.bfloat16() for n, v in found.items()}

    return expected


TOKENS = ("x", "topk_experts", "router_weights", "d_out", "out", "d_x", "d_router_weights")
PLACEMENT: Mapping[str, Placement] = {
    **dict.fromkeys(TOKENS, sharded(0, uneven)),
    **dict.fromkeys([*WEIGHTS, *(f"d_{name}" for name in WEIGHTS)], sharded(0)),
    **dict.fromkeys(SHARED, replicated),
    **{f"d_{name}": local for name in SHARED},
}


def case_of(variant: str) -> Case:
    """The exact case of one of VARIANTS or TILED."""
    return Case(
        name=f"moe/exact-{variant}",
        description=f"small integers, {variant.replace('-', ' ')}: bit for bit the reference",
        execute=execute,
        setup=_setup(variant),
        claims=("ep", "rank", "exact"),
        placement=PLACEMENT,
        batch=dict.fromkeys(TOKENS, 0),
        ep=(1, 2, 4, 8),
        exact=_expected(variant),
        golden="exact",
        gradients=False,
        sources=covered.WITH_EXACT_CASES,
        ranks=4,
        shares_gpu=True,
    )


EXACT_CASES = tuple(map(case_of, VARIANTS))
