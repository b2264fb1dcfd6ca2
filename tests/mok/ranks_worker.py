"""One of four gloo ranks, started by test_ranks.py as a script: RANK STORE_FILE.

Every check runs on all ranks; expert-parallel degrees 1 and 2 are subgroups of the same four. Exits
with a traceback when a check fails. Refuses to be imported by pytest: it collects nothing.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mok
from mok import functional
from mok.config import MoKConfig
from mok.endings import end_process
from mok.errors import ContextError, InputError, MoKError, RoutingError
from mok.exact import exact_case, integers, same_bits
from mok.reference import MoEInputs
from mok.reference import moe as reference_moe

WORLD = 4
EP_OUTPUTS = ("out", "d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down")
SHARED = ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down")


def uniform(name: str, shape: tuple[int, ...], scale: float) -> Tensor:
    steps = (integers(name, shape) >> np.uint64(40)).astype(np.float32) / 2.0**23 - 1.0
    return torch.from_numpy(steps * scale)


def local_part(inputs: MoEInputs, rows: slice, experts: slice) -> MoEInputs:
    return replace(
        inputs,
        x=inputs.x[rows],
        topk_experts=inputs.topk_experts[rows],
        router_weights=inputs.router_weights[rows],
        w_gate=inputs.w_gate[experts],
        w_up=inputs.w_up[experts],
        w_down=inputs.w_down[experts],
    )


def run(
    group: dist.ProcessGroup | None,
    inputs: MoEInputs,
    d_out: Tensor,
    config: MoKConfig,
    recompute: bool = False,
) -> dict[str, Tensor]:
    tokens, slots = inputs.topk_experts.shape
    workspace = functional.get_workspace(
        config,
        group,
        device="cpu",
        num_local_tokens=tokens,
        hidden_size=inputs.x.shape[1],
        topk=slots,
    )
    schedule = functional.build_schedule(
        workspace, config, inputs.topk_experts, num_local_experts=inputs.w_gate.shape[0]
    )
    shared = inputs.shared or (None, None, None)
    weights = (*shared, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.swiglu_limit)
    head = (config, workspace, schedule)
    out, context = functional.forward(*head, inputs.x, inputs.router_weights, *weights)
    if recompute:
        context = functional.recompute_forward_context(
            *head, inputs.x, *shared[:2], inputs.w_gate, inputs.w_up, inputs.swiglu_limit
        )
    arguments = (*head, context, d_out, inputs.x, inputs.router_weights, *weights)
    gradients = functional.backward(*arguments)
    raises(ContextError, "one backward per forward context", functional.backward, *arguments)
    named = zip((*EP_OUTPUTS[1:], *SHARED), gradients, strict=True)
    return {"out": out, **{name: grad for name, grad in named if grad is not None}}


def raises(
    kind: type[MoKError], text: str, call: Callable[..., object], *arguments: object
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call(*arguments)


def expected_part(whole: dict[str, Tensor], rows: slice, experts: slice) -> dict[str, Tensor]:
    return {name: whole[name][experts if name.startswith("d_w") else rows] for name in EP_OUTPUTS}


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor], what: object) -> None:
    wrong = [name for name in expected if not same_bits(expected[name], got[name])]
    assert wrong == [], f"{what}: {wrong} differ"


def degrees(groups: dict[int, dist.ProcessGroup | None], rank: int) -> list[tuple[int, int]]:
    """(degree, this rank's place) of the groups that this rank is in."""
    return [(degree, rank) for degree in groups if rank < degree]


def check_exact(groups: dict[int, dist.ProcessGroup | None], rank: int) -> None:
    splits = {1: [0, 90, 90], 2: [0, 61, 90], 4: [0, 37, 37, 88, 90]}
    for routing, slots, clamped in (
        ("skewed", 3, True),
        ("one-expert", 2, False),
        ("unused-slots", 2, True),
        ("empty-experts", 2, False),
        ("k1", 1, False),
    ):
        case = exact_case(90, 64, 32, 8, slots, routing, shared_width=24, clamped=clamped)
        for degree, place in degrees(groups, rank):
            rows = slice(splits[degree][place], splits[degree][place + 1])
            experts = slice(8 // degree * place, 8 // degree * (place + 1))
            part = local_part(case.inputs, rows, experts)
            for config in (MoKConfig(), MoKConfig(minibatch_size=128)):
                got = run(groups[degree], part, case.d_out[rows], config)
                assert_same(expected_part(case.expected, rows, experts), got, (routing, degree))
            own = reference_moe(case.inputs, case.d_out, "rounded", shared_rows=rows)
            sums = {name: own[name].v.float() for name in SHARED}
            assert_same(sums, got, (routing, degree, "shared"))


def check_degrees(groups: dict[int, dist.ProcessGroup | None], rank: int) -> None:
    """Values of order one: the bits of EP 1, 2 and 4 are equal, recomputed or not."""
    tokens, hidden, width, experts = 300, 96, 80, 4
    keys = integers("routes", (tokens, experts))
    inputs = MoEInputs(
        x=uniform("x", (tokens, hidden), 1.7).bfloat16(),
        topk_experts=torch.from_numpy(np.argsort(keys, axis=1)[:, :2].astype(np.int64)),
        router_weights=uniform("router", (tokens, 2), 0.4) + 0.5,
        w_gate=uniform("gate", (experts, width, hidden), 0.2).bfloat16(),
        w_up=uniform("up", (experts, width, hidden), 0.2).bfloat16(),
        w_down=uniform("down", (experts, hidden, width), 0.2).bfloat16(),
        shared=(
            uniform("sg", (48, hidden), 0.2).bfloat16(),
            uniform("su", (48, hidden), 0.2).bfloat16(),
            uniform("sd", (hidden, 48), 0.2).bfloat16(),
        ),
    )
    d_out = uniform("d", (tokens, hidden), 1.0).bfloat16()
    whole = run(None, inputs, d_out, MoKConfig())
    splits = {1: [0, 300, 300], 2: [0, 7, 300], 4: [0, 130, 131, 131, 300]}
    for degree, place in degrees(groups, rank):
        rows = slice(splits[degree][place], splits[degree][place + 1])
        mine = slice(experts // degree * place, experts // degree * (place + 1))
        part = local_part(inputs, rows, mine)
        expected = expected_part(whole, rows, mine)
        alone = run(
            None,
            replace(
                inputs,
                x=inputs.x[rows],
                topk_experts=inputs.topk_experts[rows],
                router_weights=inputs.router_weights[rows],
            ),
            d_out[rows],
            MoKConfig(),
        )
        for config, recompute in ((MoKConfig(), False), (MoKConfig(minibatch_size=128), True)):
            got = run(groups[degree], part, d_out[rows], config, recompute)
            assert_same(expected, got, (degree, config, recompute))
            assert_same({name: alone[name] for name in SHARED}, got, (degree, "shared"))
        check_layer(groups[degree], part, d_out[rows], expected, got, experts)


def check_layer(
    group: dist.ProcessGroup | None,
    part: MoEInputs,
    d_out: Tensor,
    expected: dict[str, Tensor],
    functional_result: dict[str, Tensor],
    experts: int,
) -> None:
    """mok.MoE over the group, plain and checkpointed, has the functional bits."""
    _, width, hidden = part.w_gate.shape
    assert part.shared is not None
    layer = mok.MoE(experts, hidden, width, shared_size=part.shared[0].shape[0], group=group)
    with torch.no_grad():
        for parameter, value in zip(
            layer.parameters(), (part.w_gate, part.w_up, part.w_down, *part.shared), strict=True
        ):
            parameter.copy_(value)
    for call in (layer, lambda *a: checkpoint(layer, *a, use_reentrant=False)):
        layer.zero_grad()
        x = part.x.clone().requires_grad_()
        router = part.router_weights.clone().requires_grad_()
        out = call(x, part.topk_experts, router)
        out.backward(d_out)
        assert x.grad is not None
        assert router.grad is not None
        got = {"out": out.detach(), "d_x": x.grad, "d_router_weights": router.grad}
        assert_same({name: expected[name] for name in got}, got, "layer")
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            assert same_bits(functional_result[f"d_{name}"].bfloat16(), parameter.grad), name


def check_errors(group: dist.ProcessGroup, rank: int) -> None:
    """All ranks raise the same error, and it names the rank."""
    case = exact_case(20, 32, 16, 4, 2)
    rows, experts = slice(5 * rank, 5 * rank + 5), slice(rank, rank + 1)
    part, d_out = local_part(case.inputs, rows, experts), case.d_out[rows]
    config = MoKConfig()

    def with_x(x: Tensor) -> object:
        return run(group, replace(part, x=x), d_out, config)

    def with_limit(limit: float) -> object:
        return run(group, replace(part, swiglu_limit=limit), d_out, config)

    def with_topk(topk: Tensor) -> object:
        return run(group, replace(part, topk_experts=topk), d_out, config)

    bad_x = part.x.float() if rank == 2 else part.x
    raises(InputError, "rank 2: x has dtype torch.float32", with_x, bad_x)
    narrow = part.x[:, :16].contiguous() if rank == 1 else part.x
    raises(
        InputError,
        "hidden_size differs between ranks: rank 0 has 32, rank 1 has 16",
        with_x,
        narrow,
    )
    raises(InputError, "swiglu_limit (bits) differs between ranks", with_limit, 4.0 + (rank == 3))
    topk = part.topk_experts.clone()
    if rank == 3:
        topk[1, 0] = 50
    raises(RoutingError, "rank 3: 1 bad expert id(s)", with_topk, topk)
    os.environ["MOK_CHECK"] = "1"
    raises(RoutingError, "rank 3: 1 bad expert id(s)", with_topk, topk)
    del os.environ["MOK_CHECK"]
    if rank == 0:
        os.environ["MOK_CHECK"] = "1"
    raises(InputError, "validate or MOK_CHECK differs", with_topk, part.topk_experts)
    os.environ.pop("MOK_CHECK", None)
    raises(InputError, "num_experts = 6 on 4 rank(s)", lambda: mok.MoE(6, 8, 8, group=group))
    expected = expected_part(case.expected, rows, experts)
    assert_same(expected, run(group, part, d_out, config), "after errors")


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    groups: dict[int, dist.ProcessGroup | None] = {
        degree: dist.new_group(list(range(degree))) for degree in (1, 2, 4)
    }
    check_exact(groups, rank)
    check_degrees(groups, rank)
    whole = groups[4]
    assert whole is not None
    check_errors(whole, rank)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} checked everything")


if __name__ == "__main__":
    main()
    end_process()
