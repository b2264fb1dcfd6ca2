"""`moe`: the mixture-of-experts layer of `mok`, forward and backward, with every promise it makes.

The tokens are split unevenly, and a rank without any token takes part; routing leaves some slots
unused. Shapes are small on purpose: what is checked is the order of every sum, not speed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verify import inputs as generated
from verify.builtin import covered
from verify.builtin.layer import (
    PLACEMENT,
    execute,
    execute_clamped,
    reference,
    reference_clamped,
    weights,
)
from verify.cases import Case

T, H, I, E, K, I_SHARED = 384, 128, 96, 8, 4, 64  # noqa: E741 - the field's names


def routing() -> dict[str, Tensor]:
    """Distinct experts per token from random scores, with every 16th slot unused (-1)."""
    scores = generated.generate("router.scores", (T, E), torch.float32)
    chosen = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :K].contiguous()
    chosen.view(-1)[::16] = -1
    return {"topk_experts": chosen}


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
    sources=(__file__, *covered.WITH_REFERENCE),
    ranks=4,
    shares_gpu=True,
)
CLAMPED = replace(
    MOE,
    name="moe/clamped",
    description="the same with a clamped SwiGLU",
    execute=execute_clamped,
    reference=reference_clamped,
    claims=("repeat", "ep", "rank", "reference"),
)
