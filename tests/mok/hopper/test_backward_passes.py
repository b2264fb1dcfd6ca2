"""The Hopper backward behind mok.moe and mok.functional, simulated on a CPU.

Launches give what the kernels give, in their layouts, computed by the portable backend. So
gradients must be the portable ones bit for bit, whatever was saved, padded, computed again or added
to a main gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backward_fakes import simulated_backward
from hopper_fakes import Fakes, simulated_launch

import mok
from mok import functional, operators
from mok.config import MoKConfig
from mok.errors import ContextError, InputError
from mok.exact import exact_case, same_bits
from mok.functional import MainGradients
from mok.hopper import backward_memory, passes, pools, support
from mok.hopper.gradient_records import WANT_ROUTED, WANT_SHARED
from mok.main_gradients import count_changes

WEIGHTS = ("w_gate", "w_up", "w_down")
GRADIENTS = ("d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down")


@pytest.fixture
def launches(monkeypatch) -> SimpleNamespace:
    """As if this CPU ran the Hopper kernels, the backward's too; every launch is noted."""
    fakes = Fakes()
    seen = SimpleNamespace(forward=[], backward=[])

    def forward(workspace, problem, **options):
        seen.forward.append({"workspace": workspace, "problem": problem, **options})
        return simulated_launch(workspace, problem, **options)

    def backward(workspace, memory, problem, given, **options):
        seen.backward.append({"memory": memory, "given": given, **options})
        return simulated_backward(workspace, memory, problem, given, **options)

    for place in ("mok.hopper.support", "mok.workspaces", "mok.functional"):
        monkeypatch.setattr(f"{place}.device_problem", lambda device: None)
    monkeypatch.delenv(support.BACKWARD_VARIABLE, raising=False)
    monkeypatch.setattr(passes, "launch", forward)
    monkeypatch.setattr(passes, "launch_backward", backward)
    monkeypatch.setattr(
        backward_memory, "load_backward_kernels", lambda device, **_: fakes.backward_kernels
    )
    monkeypatch.setattr(
        pools, "_open", lambda sizes, segments, *_: fakes.workspace(sizes, segments=segments)
    )
    return seen


@functools.cache
def _case(shared: int | None = 64, routing: str = "unused-slots", tokens: int = 140):
    return exact_case(tokens, 64, 64, 4, 2, routing, shared_width=shared, clamped=True)


def _gradients(case, frozen: tuple[str, ...] = (), **options: Any) -> dict[str, torch.Tensor]:
    i = case.inputs
    leaves = {n: getattr(i, n).clone() for n in ("x", "router_weights", *WEIGHTS)}
    shared = None
    if i.shared is not None:
        shared = tuple(w.clone() for w in i.shared)
        leaves |= dict(zip(("shared_gate", "shared_up", "shared_down"), shared, strict=True))
    wanted = {n: t.requires_grad_() for n, t in leaves.items() if n not in frozen}
    out = mok.moe(
        *(leaves["x"], i.topk_experts, leaves["router_weights"]),
        *(leaves[n] for n in WEIGHTS),
        shared=shared,
        swiglu_limit=i.swiglu_limit,
        **options,
    )
    grads = torch.autograd.grad(out, list(wanted.values()), case.d_out)
    return dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize(
    ("shared", "routing"), [(None, "balanced"), (64, "empty-experts"), (64, "unused-slots")]
)
def test_gradients_are_those_of_the_portable_backend(launches, shared, routing):
    case = _case(shared, routing)
    wanted = _gradients(case, backend="portable")
    assert launches.backward == []
    found = _gradients(case)
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []
    assert len(launches.backward) == 1
    given = launches.backward[0]["given"]
    assert given.dtype == torch.bfloat16  # the weights' own: rounded by the kernel, once
    assert given.kept.gate.shape[0] == launches.forward[0]["saved"]


@pytest.mark.parametrize(("given", "kernels"), [("", 1), ("1", 1), ("0", 0)])
def test_the_variable_gives_backwards_to_the_portable_backend(
    launches, monkeypatch, given, kernels
):
    monkeypatch.setenv(support.BACKWARD_VARIABLE, given)
    case = _case()
    found = _gradients(case)
    assert (len(launches.forward), len(launches.backward)) == (1, kernels)
    _functional(case, _workspace("auto"), recompute=False)
    assert (len(launches.forward), len(launches.backward)) == (2, 2 * kernels)
    wanted = _gradients(case, backend="portable")
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []


def test_widths_that_the_kernels_do_not_take_are_portable_in_both_directions(launches):
    case = exact_case(20, 64, 72, 4, 2, "unused-slots")
    wanted, found = _gradients(case, backend="portable"), _gradients(case)
    assert (launches.forward, launches.backward) == ([], [])
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []


def test_another_value_of_the_variable_is_refused_whatever_the_backend(launches, monkeypatch):
    monkeypatch.setenv(support.BACKWARD_VARIABLE, "yes")
    for backend in ("auto", "portable"):
        with pytest.raises(
            InputError, match=r"MOK_HOPPER_BACKWARD = 'yes'; allowed: 1 for the kernels"
        ):
            _gradients(_case(), backend=backend)
    assert launches.forward == []


def test_frozen_weights_are_not_asked_for(launches):
    case = _case()
    frozen = (*WEIGHTS, "shared_gate", "shared_up", "shared_down")
    found = _gradients(case, frozen)
    wanted = _gradients(case, frozen, backend="portable")
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []
    _gradients(case, WEIGHTS)
    _gradients(case, frozen[3:])
    wants = [one["given"].wants for one in launches.backward]
    assert wants == [0, WANT_SHARED, WANT_ROUTED]


def test_opcheck_of_the_backward(launches):
    case = _case(64, tokens=20)
    i = case.inputs
    weights = tuple(getattr(i, name) for name in WEIGHTS)
    head = (i.x, i.topk_experts, i.router_weights, *weights, *i.shared)
    kept = [t.detach() for t in operators.moe_forward(*head, 64.0, "", 4096, True, 0, "hopper")[1:]]
    backward = (case.d_out, *head, kept, 64.0, "", 4096, True, True, 0, "hopper")
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(operators.moe_backward, (*backward, dtype))


def _functional(case, workspace, recompute: bool, **options: Any):
    i, config = case.inputs, MoKConfig()
    schedule = functional.build_schedule(workspace, config, i.topk_experts, num_local_experts=4)
    weights = tuple(getattr(i, name) for name in WEIGHTS)
    shared = i.shared or (None, None, None)
    head = (config, workspace, schedule)
    limit = i.swiglu_limit
    _, context = functional.forward(*head, i.x, i.router_weights, *shared, *weights, limit)
    if recompute:
        context = functional.recompute_forward_context(*head, i.x, *shared[:2], *weights[:2], limit)

    def call():
        return functional.backward(
            *(*head, context, case.d_out, i.x, i.router_weights, *shared, *weights, limit),
            **options,
        )

    return call(), call


def _workspace(backend: str):
    return functional.create_workspace(
        MoKConfig(),
        None,
        device="cpu",
        num_local_tokens=140,
        hidden_size=64,
        topk=2,
        backend=backend,
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_functional_backward(launches, recompute, dtype):
    case = _case()
    found, again = _functional(case, _workspace("auto"), recompute, weight_dtype=dtype)
    wanted, _ = _functional(case, _workspace("portable"), recompute, weight_dtype=dtype)
    assert [g.dtype for g in found[2:]] == [dtype] * 6
    assert [same_bits(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 8
    for gradient, name in zip(found, GRADIENTS, strict=False):
        assert same_bits(gradient, case.expected[name].to(gradient.dtype)), name
    with pytest.raises(ContextError, match="already used by a backward"):
        again()
    assert len(launches.backward) == 1


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_main_gradients_are_added_to_once_and_not_returned(launches, backend):
    case = _case()
    start = torch.arange(4 * 64 * 64, dtype=torch.float32).view(4, 64, 64)
    main = MainGradients(gate=start.clone(), down=start.clone())
    found, _ = _functional(case, _workspace(backend), False, main_grads=main)
    assert [grad is None for grad in found] == [False, False, True, False, True] + [False] * 3
    for name, total in (("d_w_gate", main.gate), ("d_w_down", main.down)):
        assert torch.equal(total, start + case.expected[name].float()), name
    assert same_bits(found[3], case.expected["d_w_up"].float())


@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_dtype": torch.float16}, "weight_dtype = torch.float16; allowed: torch.float32"),
        (
            {"main_grads": MainGradients(up=torch.zeros(4, 64, 65))},
            r"main_grads.up is torch.float32 \[4, 64, 65\] on cpu, contiguous; allowed",
        ),
        (
            {"main_grads": MainGradients(gate=torch.zeros(4, 64, 64).bfloat16())},
            r"main_grads.gate is torch.bfloat16 \[4, 64, 64\]",
        ),
    ],
)
def test_what_a_backward_refuses(launches, backend, options, message):
    with pytest.raises(InputError, match=message):
        _functional(_case(), _workspace(backend), False, **options)
    assert launches.backward == []


def _overlapping(*starts: int) -> MainGradients:
    """Of gate, up, down: so many elements behind the beginning of one tensor."""
    room = torch.zeros(max(starts) + 4 * 64 * 64)
    return MainGradients(*(room[at:][: 4 * 64 * 64].view(4, 64, 64) for at in starts))


@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize(
    ("starts", "told"),
    [
        ((0, 16384, 0), "gate and main_grads.down share 65536 bytes; allowed: memory of its own"),
        ((16385, 0, 16384), "down and main_grads.gate share 65532 bytes"),
        ((16383, 0, 32767), "up and main_grads.gate share 4 bytes"),
    ],
)
def test_main_gradients_that_overlap_are_refused(launches, backend, starts, told):
    with pytest.raises(InputError, match=f"main_grads.{told}"):
        _functional(_case(), _workspace(backend), False, main_grads=_overlapping(*starts))
    assert launches.backward == []


def test_main_gradients_may_be_neighbours_in_one_tensor(launches):
    case, main = _case(), _overlapping(32768, 0, 16384)
    _functional(case, _workspace("auto"), False, main_grads=main)
    for name in ("gate", "up", "down"):
        assert torch.equal(getattr(main, name), case.expected[f"d_w_{name}"].float()), name


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_autograd_is_told_that_main_gradients_have_changed(launches, monkeypatch, backend):
    """Kernels write to them without torch, which here stands for them must not count either."""

    def kernels(workspace, memory, problem, given, **options):
        alone = dataclasses.replace(given, main=MainGradients(), dtype=torch.float32)
        found = simulated_backward(workspace, memory, problem, alone, **options)
        assert given.main.gate is not None
        np.add(given.main.gate.numpy(), found.d_gate.numpy(), out=given.main.gate.numpy())
        return dataclasses.replace(found, d_gate=None)

    monkeypatch.setattr(passes, "launch_backward", kernels)
    case, leaf = _case(), torch.ones(4, 64, 64, requires_grad=True)
    main = MainGradients(gate=torch.zeros(4, 64, 64))
    product = (leaf * main.gate).sum()
    _functional(case, _workspace(backend), False, main_grads=main)
    assert torch.equal(main.gate, case.expected["d_w_gate"].float())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_without_a_way_to_tell_autograd_nothing_is_told(monkeypatch):
    with torch.inference_mode():
        inference = torch.zeros(2)
    main = MainGradients(gate=torch.zeros(2), up=inference)
    count_changes(main)
    assert main.gate is not None
    assert main.gate._version == 1
    monkeypatch.delattr(torch.autograd.graph, "increment_version")
    count_changes(main)
    assert main.gate._version == 1


def test_a_main_gradient_of_a_weight_that_is_not_there_is_refused(launches):
    main = MainGradients(shared_up=torch.zeros(64, 64))
    with pytest.raises(InputError, match=r"main_grads\.shared_up without that weight"):
        _functional(_case(None), _workspace("auto"), False, main_grads=main)


def test_a_backward_of_a_forward_that_kept_nothing_has_the_same_memory(launches):
    workspace = _workspace("auto")
    case, config = _case(), MoKConfig()
    _functional(case, workspace, False)
    pool, i = workspace.pool, case.inputs
    weights = tuple(getattr(i, name) for name in WEIGHTS)
    problem = functional._problem(
        i.x, SimpleNamespace(topk_TK=i.topk_experts), i.router_weights, weights, i.shared, 64.0
    )
    nothing = passes.Results(i.x)
    found = passes.run_backward(pool, None, problem, case.d_out, nothing, functional._knobs(config))
    assert same_bits(found[0], case.expected["d_x"])
    first, second = (one["memory"] for one in launches.backward)
    assert first is second
