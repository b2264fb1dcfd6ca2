"""The Hopper forward for `verify run`: the bundled layer at widths that its kernel takes.

The built-in cases have odd widths, for which `backend="auto"` takes the portable backend. These
insist on the kernel where there is a CUDA device, so that nothing is shown of another backend by
mistake: elsewhere than on a GPU of compute capability 9.0, or with ranks that share one, they fail
by name. On a CPU they run the portable backend, which is how tests know that the cases are right.

    verify run ci/gpu/hopper_cases.py --device cuda --ranks 1
    verify run ci/gpu/hopper_cases.py --device cuda --ranks 2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verify import inputs as generated
from verify.builtin import covered, exact, layer, moe
from verify.cases import Case

# Each width ends in a tail: of 64 in tiles of 256 (H), and of 64 in tiles of 128 (I and S).
T, H, I, E, K, I_SHARED = 384, 320, 192, 8, 4, 64  # noqa: E741 - the field's names
SCHEDULE = tuple({"minibatch_size": size} for size in (128, 1024, 8192)) + tuple(
    {"num_sms": sms} for sms in (1, 7)
)
"""1024 rows are the least that the kernel's segments take; with one CTA every wait is in turn."""


def backend(x: Tensor) -> str:
    """The kernel or an error on a GPU."""
    return "hopper" if x.is_cuda else "auto"


def execute(**arguments: Any) -> Tensor:
    """The layer; its backward is the portable one."""
    return layer.execute(**arguments, backend=backend(arguments["x"]))


def execute_clamped(**arguments: Any) -> Tensor:
    """The layer with a clamped SwiGLU."""
    return layer.execute_clamped(**arguments, backend=backend(arguments["x"]))


def execute_forward(**arguments: Any) -> Tensor:
    """The forward alone, which a CUDA graph can record."""
    with torch.no_grad():
        return execute(**arguments)


def execute_exact(**arguments: Any) -> dict[str, Tensor]:
    """Output and gradients of an exact case."""
    return exact.execute(**arguments, backend=backend(arguments["x"]))


def _inputs(gradients: bool) -> Mapping[str, Any]:
    made = {
        "x": generated.normal(T, H, dtype=torch.bfloat16, requires_grad=True),
        "router_weights": generated.uniform(T, K, requires_grad=True),
        "w_gate": layer.weights(E, I, H),
        "w_up": layer.weights(E, I, H),
        "w_down": layer.weights(E, H, I),
        "w_shared_gate": layer.weights(I_SHARED, H),
        "w_shared_up": layer.weights(I_SHARED, H),
        "w_shared_down": layer.weights(H, I_SHARED),
    }
    return {name: replace(one, requires_grad=gradients) for name, one in made.items()}


LAYER = replace(
    moe.MOE,
    name="hopper/layer",
    description="mixture of experts: the Hopper forward, the portable backward",
    execute=execute,
    inputs=_inputs(True),
    schedule=SCHEDULE,
    sources=(*moe.MOE.sources, *covered.ON_GPU),
    shares_gpu=False,
    ranks=1,
)
CLAMPED = replace(
    LAYER,
    name="hopper/clamped",
    description="the same with a clamped SwiGLU",
    execute=execute_clamped,
    reference=moe.CLAMPED.reference,
    claims=moe.CLAMPED.claims,
)
FORWARD = replace(
    LAYER,
    name="hopper/forward",
    description="the Hopper forward alone, without gradients",
    execute=execute_forward,
    inputs=_inputs(False),
    claims=(
        *("repeat", "process", "memory", "history", "contention", "stream", "sms", "graph"),
        *("batch", "schedule", "ep", "rank"),
    ),
    reference=None,
    gradients=False,
)


def _exact(variant: str) -> Case:
    made = exact.case_of(variant)
    return replace(
        made,
        name=f"hopper/{made.name.partition('/')[2]}",
        execute=execute_exact,
        golden="",
        claims=("repeat", "ep", "rank", "exact"),
        sources=(*made.sources, *covered.ON_GPU),
        shares_gpu=False,
        ranks=1,
    )


EXACT = tuple(_exact(variant) for variant in exact.TILED)
