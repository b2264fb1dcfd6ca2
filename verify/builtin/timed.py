"""`moe-1024`: the layer at a size at which digests and bookkeeping can be timed against it.

T = 1024, H = 512, I = 256, E = 16, K = 4, one rank: `verify run moe-1024 --timings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verify import inputs as generated
from verify.builtin import covered
from verify.builtin.layer import weights
from verify.cases import Case

T, H, I, E, K = 1024, 512, 256, 16, 4  # noqa: E741 - the field's names


def routing() -> Mapping[str, Tensor]:
    """Distinct experts per token, uniform at random."""
    scores = generated.generate("router.scores", (T, E), torch.float32)
    chosen = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :K]
    return {"topk_experts": chosen.contiguous()}


def execute(**arguments: Any) -> Tensor:
    """The layer without a shared expert."""
    from mok import moe

    return moe(**arguments)


MOE_1024 = Case(
    name="moe-1024",
    description="the layer at T=1024, for timing digests and bookkeeping",
    execute=execute,
    setup=routing,
    inputs={
        "x": generated.normal(T, H, dtype=torch.bfloat16, requires_grad=True),
        "router_weights": generated.uniform(T, K, requires_grad=True),
        "w_gate": weights(E, I, H),
        "w_up": weights(E, I, H),
        "w_down": weights(E, H, I),
    },
    sources=(*covered.LAYER, *covered.ON_GPU),
)
