"""The Hopper backward behind mok.moe and mok.functional, on a device: bits, budgets, graphs.

What is below those, rings and parts, is in test_backward_rings_gpu.py; several ranks on one GPU are
in test_backward_degrees_gpu.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hopper_runs import (
    TRUNCATING,
    different,
    exact_on_cuda,
    moe_out,
    on_cuda,
    random_inputs,
    random_upstream,
    run_layer,
    with_leaves,
)
from sync_debug import synchronising_raises
from torch import Tensor

from mok import functional, portable, reference
from mok.activations import SwigluGradients, swiglu_backward
from mok.config import MoKConfig
from mok.errors import ContextError, InputError
from mok.exact import ExactCase, same_bits
from mok.functional import MainGradients
from mok.hopper import passes
from mok.hopper.support import BACKWARD_VARIABLE, device_problem
from mok.reference import MoEInputs

pytestmark = pytest.mark.gpu

WEIGHTS = ("w_gate", "w_up", "w_down", "w_shared_gate", "w_shared_up", "w_shared_down")


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Backwards run on the kernels; each that was launched is noted."""
    problem = device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        pytest.skip(problem)
    monkeypatch.delenv(BACKWARD_VARIABLE, raising=False)
    seen: list[int] = []
    launch = passes.launch_backward

    def noted(workspace: Any, *rest: Any, **options: Any) -> Any:
        seen.append(workspace.sizes.max_tokens)
        return launch(workspace, *rest, **options)

    monkeypatch.setattr(passes, "launch_backward", noted)
    return seen


def _expect_exact(launches: list[int], case: ExactCase, inputs: MoEInputs) -> None:
    assert different(run_layer(inputs, case.d_out), case.expected) == set()
    assert len(launches) == 1


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("shared", [None, 64])
@pytest.mark.parametrize(
    "routing", ["balanced", "skewed", "one-expert", "empty-experts", "k1", "unused-slots"]
)
def test_exact_cases_are_bit_equal_with_all_gradients(
    launches: list[int], routing: str, shared: int | None, clamped: bool
) -> None:
    sizes = (200, 192, 192, 8, 1 if routing in ("k1", "one-expert") else 2)
    _expect_exact(launches, *exact_on_cuda(*sizes, routing, shared_width=shared, clamped=clamped))


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("shared", [None, 128])
def test_any_number_of_tokens(launches: list[int], tokens: int, shared: int | None) -> None:
    _expect_exact(launches, *exact_on_cuda(tokens, 128, 64, 4, 2, shared_width=shared))


@pytest.mark.parametrize("rows", [63, 64, 65, 127, 128, 129, 191, 192, 193])
def test_an_expert_with_a_tail_of_any_length(launches: list[int], rows: int) -> None:
    _expect_exact(launches, *exact_on_cuda(rows, 128, 64, 3, 1, "one-expert"))


@pytest.mark.parametrize("slots", range(1, 17))
def test_any_number_of_slots(launches: list[int], slots: int) -> None:
    _expect_exact(launches, *exact_on_cuda(96, 64, 64, 16, slots))


@pytest.mark.parametrize(("hidden", "width"), [(64, 64), (320, 448), (576, 128), (128, 1088)])
def test_sizes_that_end_inside_of_a_tile(launches: list[int], hidden: int, width: int) -> None:
    _expect_exact(launches, *exact_on_cuda(140, hidden, width, 4, 2, "skewed", shared_width=192))


def _silu_is_identity(
    product: Tensor, gate: Tensor, up: Tensor, weight: Tensor, limit: float | None
) -> SwigluGradients:
    right = swiglu_backward(product, gate, up, weight, limit)
    hidden = weight[:, None] * gate.float() * up.float()
    return dataclasses.replace(right, weighted_hidden=hidden.bfloat16())


def _derivative_is_one(
    product: Tensor, gate: Tensor, up: Tensor, weight: Tensor, limit: float | None
) -> SwigluGradients:
    right = swiglu_backward(product, gate, up, weight, limit)
    clamped = up.float() if limit is None else up.float().clamp(-limit, limit)
    d_gate = weight[:, None] * product * clamped
    d_gate = d_gate if limit is None else torch.where(gate > limit, 0.0, d_gate)
    return dataclasses.replace(right, d_gate=d_gate.bfloat16())


def _no_clamp(
    product: Tensor, gate: Tensor, up: Tensor, weight: Tensor, limit: float | None
) -> SwigluGradients:
    return swiglu_backward(product, gate, up, weight, None)


@pytest.mark.parametrize(
    ("mutation", "wrong"),
    [
        (_silu_is_identity, {"d_w_down", "d_w_shared_down"}),
        (_derivative_is_one, {"d_x", "d_w_gate", "d_w_shared_gate"}),
        (_no_clamp, {"d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down"}),
    ],
)
def test_exact_bits_are_not_those_of_another_formula(
    mutation: Callable[..., SwigluGradients],
    wrong: set[str],
    run: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, inputs = exact_on_cuda(120, 64, 64, 4, 2, shared_width=64, clamped=True)
    found = run_layer(inputs, case.d_out)
    assert different(found, case.expected) == set()
    monkeypatch.setattr(portable, "swiglu_backward", mutation)
    assert wrong <= different(found, run(case.inputs, case.d_out))


def _functional(
    inputs: MoEInputs,
    d_out: Tensor,
    *,
    recompute: bool = False,
    config: MoKConfig | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], Callable[[], object]]:
    """out and gradients by mok.functional, those of weights fp32; and the backward once more."""
    config = config or MoKConfig()
    tokens, slots = inputs.topk_experts.shape
    workspace = functional.get_workspace(
        *(config, None),
        device=inputs.x.device,
        num_local_tokens=tokens,
        hidden_size=inputs.x.shape[1],
        topk=slots,
        backend="hopper",
    )
    experts = inputs.w_gate.shape[0]
    schedule = functional.build_schedule(
        workspace, config, inputs.topk_experts, num_local_experts=experts
    )
    shared = inputs.shared or (None, None, None)
    weights = (*shared, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.swiglu_limit)
    head = (config, workspace, schedule)
    out, context = functional.forward(*head, inputs.x, inputs.router_weights, *weights)
    if recompute:
        context = functional.recompute_forward_context(
            *(*head, inputs.x, *shared[:2], inputs.w_gate, inputs.w_up, inputs.swiglu_limit)
        )

    def backward() -> tuple[Tensor | None, ...]:
        given = (context, d_out, inputs.x, inputs.router_weights, *weights)
        return functional.backward(*head, *given, **options)

    names = ("d_x", "d_router_weights", *(f"d_{name}" for name in WEIGHTS))
    gradients = dict(zip(names, backward(), strict=True))
    found = {name: value for name, value in gradients.items() if value is not None}
    return {"out": out, **found}, backward


@pytest.mark.parametrize("limit", [None, 0.7])
def test_random_values_stay_within_both_budgets_of_float64(limit: float | None) -> None:
    inputs, d_out = dataclasses.replace(random_inputs(), swiglu_limit=limit), random_upstream()
    found, _ = _functional(on_cuda(inputs), d_out.cuda())
    exact = reference.moe(inputs, d_out, "exact", accumulation_unit=TRUNCATING)
    rounded = reference.moe(inputs, d_out, "rounded", accumulation_unit=TRUNCATING)
    assert found.keys() == exact.keys() == rounded.keys()
    used = {name: reference.budget_used(exact[name], value) for name, value in found.items()}
    assert {name: share for name, share in used.items() if share > 1.0} == {}
    outside = {name: reference.agreement(rounded[name], v).outside for name, v in found.items()}
    assert {name: count for name, count in outside.items() if count} == {}
    in_bf16 = run_layer(on_cuda(inputs), d_out)
    assert different(in_bf16, found) == set()  # rounded once from the same sums


def test_gates_far_from_zero_have_the_portable_backend_s_gradients() -> None:
    """There exp overflows or vanishes; nothing may become NaN that is not."""
    inputs, d_out = random_inputs(), random_upstream()
    given = on_cuda(dataclasses.replace(inputs, w_gate=(inputs.w_gate.float() * 300).bfloat16()))
    found, wanted = (run_layer(given, d_out, backend=name) for name in ("hopper", "portable"))
    for name, value in wanted.items():
        assert bool(found[name].isfinite().all()), name
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert float(error) < 4e-3, name


def test_twenty_calls_have_one_set_of_bits(launches: list[int]) -> None:
    inputs, d_out = on_cuda(random_inputs()), random_upstream().cuda()
    first = run_layer(inputs, d_out)
    for _ in range(20):
        assert different(run_layer(inputs, d_out), first) == set()
    assert len(launches) == 21


@pytest.mark.parametrize(
    "config",
    [
        *(MoKConfig(num_sms=n) for n in (1, 2, 7, 132)),
        *(MoKConfig(minibatch_size=n) for n in (128, 1024, 2048)),
        MoKConfig(num_sms=3, minibatch_size=1024),
    ],
    ids=lambda one: f"sms={one.num_sms},minibatch={one.minibatch_size}",
)
def test_knobs_change_no_bit(config: MoKConfig) -> None:
    inputs, d_out = on_cuda(random_inputs()), random_upstream().cuda()
    wanted = run_layer(inputs, d_out)
    functional.clear_workspace_cache()  # memory for backwards is made with the first call's knobs
    assert different(run_layer(inputs, d_out, config=config), wanted) == set()


def test_saved_and_recomputed_contexts_have_the_same_bits() -> None:
    inputs, d_out = on_cuda(random_inputs()), random_upstream().cuda()
    wanted, _ = _functional(inputs, d_out)
    found, _ = _functional(inputs, d_out, recompute=True)
    assert different(found, wanted) == set()
    whole = run_layer(inputs, d_out)
    given, leaves = with_leaves(inputs)
    out = torch.utils.checkpoint.checkpoint(moe_out, given, use_reentrant=False)
    grads = torch.autograd.grad(out, list(leaves.values()), d_out)
    again = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    assert different({"out": out.detach(), **again}, whole) == set()


def test_main_gradients_are_added_to_once() -> None:
    inputs, d_out = on_cuda(random_inputs()), random_upstream().cuda()
    wanted, _ = _functional(inputs, d_out)
    before = {
        name: torch.full_like(wanted[f"d_{name}"], 1.0 / 7) for name in WEIGHTS if "up" not in name
    }
    main = {name: value.clone() for name, value in before.items()}
    given = MainGradients(**{name.removeprefix("w_"): value for name, value in main.items()})
    found, _ = _functional(inputs, d_out, main_grads=given, weight_dtype=torch.bfloat16)
    for name in WEIGHTS:
        if name in main:
            assert f"d_{name}" not in found
            assert same_bits(main[name], before[name] + wanted[f"d_{name}"]), name
        else:
            assert same_bits(found[f"d_{name}"], wanted[f"d_{name}"].bfloat16()), name


@pytest.mark.parametrize(
    "frozen", [WEIGHTS, WEIGHTS[:3], WEIGHTS[3:], ("x", "router_weights"), ("w_up", "x")]
)
def test_frozen_inputs_change_no_other_gradient(frozen: tuple[str, ...]) -> None:
    case, inputs = exact_on_cuda(200, 192, 192, 8, 2, "skewed", shared_width=64)
    given, leaves = with_leaves(inputs)
    wanted = {name: leaf for name, leaf in leaves.items() if name not in frozen}
    for name in frozen:
        leaves[name].requires_grad_(False)
    grads = torch.autograd.grad(moe_out(given), list(wanted.values()), case.d_out.cuda())
    found = {f"d_{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    assert different(found, {name: case.expected[name] for name in found}) == set()


def test_a_second_backward_is_refused() -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    found, again = _functional(inputs, case.d_out.cuda())
    assert different(found, case.expected) == set()
    with pytest.raises(ContextError, match="already used by a backward"):
        again()


def test_a_call_never_waits_for_the_device() -> None:
    case, inputs = exact_on_cuda(200, 192, 192, 8, 2, "balanced", shared_width=64)
    d_out = case.d_out.cuda()
    run_layer(inputs, d_out)
    given, leaves = with_leaves(inputs)
    with synchronising_raises():
        out = moe_out(given)
        grads = torch.autograd.grad(out, list(leaves.values()), d_out)
    found = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    assert different({"out": out.detach(), **found}, case.expected) == set()


def _copies(inputs: MoEInputs, names: tuple[str, ...]) -> MoEInputs:
    return dataclasses.replace(inputs, **{name: getattr(inputs, name).clone() for name in names})


def test_a_graph_of_both_directions_replays_with_other_inputs(launches: list[int]) -> None:
    """Sums over tokens are exact, so that weights have the same gradients in any order."""
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    names = ("x", "topk_experts", "router_weights")
    given, d_out = _copies(inputs, names), case.d_out.cuda()
    upstream = d_out.clone()
    run_layer(given, upstream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_layer(given, upstream)
    count = len(launches)
    by_token = ("out", "d_x", "d_router_weights")
    for shift in (0, 1, 77, 0):
        for name in names:
            getattr(given, name).copy_(getattr(inputs, name).roll(shift, 0))
        upstream.copy_(d_out.roll(shift, 0))
        for value in found.values():
            value.fill_(-1.0)
        graph.replay()
        wanted = {
            name: value.roll(shift, 0) if name in by_token else value
            for name, value in case.expected.items()
        }
        assert different(found, wanted) == set(), shift
    assert len(launches) == count
    assert different(run_layer(inputs, d_out), case.expected) == set()


def test_memory_for_backwards_is_not_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    given, leaves = with_leaves(inputs)
    out = moe_out(given)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(InputError, match="memory for a backward cannot be made while a CUDA"):
            torch.autograd.grad(out, list(leaves.values()), case.d_out.cuda())
    assert different(run_layer(inputs, case.d_out), case.expected) == set()


def test_streams_take_turns_with_one_workspace() -> None:
    inputs, d_out = on_cuda(random_inputs()), random_upstream().cuda()
    wanted = run_layer(inputs, d_out)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(run_layer(inputs, d_out))
    torch.cuda.synchronize()
    assert all(different(one, wanted) == set() for one in found)


def test_numbers_of_tokens_take_turns_with_one_workspace() -> None:
    for _ in range(2):
        for tokens in (257, 1, 129, 0, 64):
            case, inputs = exact_on_cuda(tokens, 128, 64, 4, 2, shared_width=128)
            assert different(run_layer(inputs, case.d_out), case.expected) == set(), tokens


def test_a_gradient_that_begins_anywhere_is_read() -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    room = torch.empty(case.d_out.numel() + 1, dtype=torch.bfloat16, device="cuda")
    d_out = room[1:].view(case.d_out.shape)
    d_out.copy_(case.d_out)
    assert d_out.data_ptr() % 16
    assert different(run_layer(inputs, d_out), case.expected) == set()
