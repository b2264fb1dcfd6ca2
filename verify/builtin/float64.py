"""`moe/float64-*`: the layer on tiny random inputs, judged by float64 budget and rounding places.

One case per routing and option, each small enough that the float64 values of its output and all
gradients (250 to 300 KB) can be kept in a file. They are chosen by name or pattern, never by `moe`,
so that they add nothing to its time. Refuses a case without any token: every value would be zero,
which shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

T, H, I, E, K = 48, 48, 16, 8, 2  # noqa: E741 - the field's names


@dataclass(frozen=True)
class Variant:
    """What tells one case from the next; routing: a name that mok.exact.exact_routes knows."""

    routing: str
    tokens: int = T
    slots: int = K
    shared_width: int | None = None
    clamped: bool = False


VARIANTS: Mapping[str, Variant] = {
    "balanced": Variant("balanced"),
    "skewed": Variant("skewed"),
    "one-expert": Variant("one-expert"),
    "empty-experts": Variant("empty-experts"),
    "top-1": Variant("k1", slots=1),
    "unused-slots": Variant("unused-slots", slots=4),
    "clamped": Variant("balanced", clamped=True, shared_width=I),
    "shared": Variant("skewed", shared_width=I),
    "every-expert": Variant("skewed", tokens=12, slots=E),
    "one-token": Variant("skewed", tokens=1, shared_width=I),
}


def _setup(seed: int, variant: Variant) -> Callable[[], Mapping[str, Tensor]]:
    def setup() -> Mapping[str, Tensor]:
        from mok.exact import exact_routes

        routes = exact_routes(variant.routing, variant.tokens, E, variant.slots, seed)  # type: ignore[arg-type]
        return {"topk_experts": routes}

    return setup


def _inputs(variant: Variant) -> dict[str, generated.TensorSpec]:
    width = variant.shared_width
    shared = {} if width is None else {"gate": (width, H), "up": (width, H), "down": (H, width)}
    return {
        "x": generated.normal(variant.tokens, H, dtype=torch.bfloat16, requires_grad=True),
        "router_weights": generated.uniform(variant.tokens, variant.slots, requires_grad=True),
        "w_gate": weights(E, I, H),
        "w_up": weights(E, I, H),
        "w_down": weights(E, H, I),
        **{f"w_shared_{name}": weights(*shape) for name, shape in shared.items()},
    }


FLOAT64_CASES = tuple(
    Case(
        name=f"moe/float64-{name}",
        description=f"tiny random inputs, {name.replace('-', ' ')}: within budget of float64",
        execute=execute_clamped if variant.clamped else execute,
        setup=_setup(seed, variant),
        inputs=_inputs(variant),
        claims=("repeat", "reference"),  # and `rank` on several ranks, as always
        seed=seed,
        placement=PLACEMENT,
        batch=dict.fromkeys(("x", "topk_experts", "router_weights", "out"), 0),
        reference=reference_clamped if variant.clamped else reference,
        golden="float64",
        sources=(__file__, *covered.WITH_EXACT_CASES),
        ranks=4,
        shares_gpu=True,
    )
    for seed, (name, variant) in enumerate(VARIANTS.items(), start=1)
)
