"""What autocast does to the layer: the casts that a bf16 region makes before the operator runs.

torch's own rule for operators of a library would cast the router weights to bf16 too; the contract
wants them in fp32. Refuses to guess: a region of another dtype than bf16, a float64 tensor and a
tensor of another device change nothing here, and the operator refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")


def autocast_rule(operator: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """moe_forward as it runs inside of an autocast region of a device type.

    x and the weights are cast to bf16, router weights to fp32. The casts are ordinary, so gradients
    arrive in the dtype of what was given.
    """

    def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if tensor is None or tensor.device.type != device_type or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def rule(x: Tensor, topk_experts: Tensor, router_weights: Tensor, *rest: Any) -> Any:
        to_bf16 = torch.get_autocast_dtype(device_type) == torch.bfloat16
        with torch.autocast(device_type, enabled=False):
            if not to_bf16:
                return operator(x, topk_experts, router_weights, *rest)
            weights, knobs = rest[:6], rest[6:]
            return operator(
                cast(x, torch.bfloat16),
                topk_experts,
                cast(router_weights, torch.float32),
                *(cast(weight, torch.bfloat16) for weight in weights),
                *knobs,
            )

    return rule
