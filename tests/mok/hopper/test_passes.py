"""The Hopper forward behind mok.moe and mok.functional, simulated on a CPU; portable backwards.

The launch is replaced by one that gives the kernel's results in the kernel's layout, computed by
the portable backend. So outputs and gradients must be the portable ones bit for bit, whatever was
saved, padded, recomputed or grown in between.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hopper_fakes import Fakes, problem_of, simulated_launch, sizes_of

import mok
from mok import functional, operators
from mok.config import MoKConfig
from mok.errors import InputError, RoutingError
from mok.exact import exact_case, same_bits
from mok.hopper import passes, pools, support
from mok.hopper.deferred import DeferredSchedule
from mok.hopper.layout import Segments
from mok.hopper.passes import Knobs
from mok.hopper.pools import WorkspacePool
from mok.hopper.tuned import Choice, Entry, Key, table_text

WEIGHTS = ("w_gate", "w_up", "w_down")


@pytest.fixture
def launches(monkeypatch) -> list[dict[str, Any]]:
    """As if this CPU ran the Hopper kernels of the forward; every launch is noted."""
    fakes, calls = Fakes(), []

    def launch(workspace, problem, **options):
        calls.append({"workspace": workspace, "problem": problem, **options})
        return simulated_launch(workspace, problem, **options)

    for place in ("mok.hopper.support", "mok.workspaces", "mok.functional"):
        monkeypatch.setattr(f"{place}.device_problem", lambda device: None)
    monkeypatch.setenv(support.BACKWARD_VARIABLE, "0")
    monkeypatch.setattr(passes, "launch", launch)
    monkeypatch.setattr(
        pools, "_open", lambda sizes, segments, *_: fakes.workspace(sizes, segments=segments)
    )
    return calls


@functools.cache
def _case(shared: int | None = 64, routing: str = "unused-slots", tokens: int = 140):
    return exact_case(tokens, 64, 64, 4, 2, routing, shared_width=shared, clamped=True)


def _moe(inputs, d_out, **options):
    leaves = {n: getattr(inputs, n).clone().requires_grad_() for n in ("x", "router_weights")}
    leaves |= {n: getattr(inputs, n).clone().requires_grad_() for n in WEIGHTS}
    shared = None
    if inputs.shared is not None:
        shared = tuple(w.clone().requires_grad_() for w in inputs.shared)
        leaves |= dict(zip(("sg", "su", "sd"), shared, strict=True))
    out = mok.moe(
        leaves["x"],
        inputs.topk_experts,
        leaves["router_weights"],
        *(leaves[n] for n in WEIGHTS),
        shared=shared,
        swiglu_limit=inputs.swiglu_limit,
        **options,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), d_out)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize(
    ("shared", "routing"), [(None, "balanced"), (64, "empty-experts"), (64, "unused-slots")]
)
def test_outputs_and_gradients_are_those_of_the_portable_backend(launches, shared, routing):
    case = _case(shared, routing)
    wanted = _moe(case.inputs, case.d_out, backend="portable")
    assert launches == []
    found = _moe(case.inputs, case.d_out)
    assert len(launches) == 1
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []
    assert same_bits(found["out"], case.expected["out"])


def test_nothing_is_saved_without_a_gradient(launches):
    i = _case().inputs
    call = (i.x, i.topk_experts, i.router_weights, i.w_gate, i.w_up, i.w_down, i.shared)
    mok.moe(*call, i.swiglu_limit, backend="hopper")
    assert [one["saved"] for one in launches] == [None]


def test_opcheck_with_the_padded_layout(launches):
    case = _case(64, tokens=20)
    i = case.inputs
    x, router = (t.clone().requires_grad_() for t in (i.x, i.router_weights))
    weights = tuple(getattr(i, name).clone().requires_grad_() for name in WEIGHTS)
    forward = (x, i.topk_experts, router, *weights, *i.shared, 64.0, "", 4096, True, 0, "hopper")
    # Padding of saved rows is not comparable: the schema and the fake implementation are.
    torch.library.opcheck(
        operators.moe_forward, forward, test_utils=("test_schema", "test_faketensor")
    )
    kept = [t.detach() for t in operators.moe_forward(*forward)[1:]]
    assert kept[0].shape[0] == (20 * 2 + 4 * 127) // 128 * 128
    plain = [t.detach() for t in forward[:9]]
    backward = (case.d_out, *plain, kept, 64.0, "", 4096, True, True, 0, "hopper")
    torch.library.opcheck(operators.moe_backward, backward)


def _out(case, **options):
    i = case.inputs
    weights = (i.w_gate, i.w_up, i.w_down, i.shared, i.swiglu_limit)
    return mok.moe(i.x, i.topk_experts, i.router_weights, *weights, **options)


def test_one_workspace_serves_every_number_of_tokens_up_to_its_own(launches):
    for tokens in (140, 20, 0, 139):
        case = _case(None, "balanced", tokens)
        assert same_bits(_out(case), case.expected["out"])
    used = {id(one["workspace"]) for one in launches}
    assert len(used) == 1
    _out(_case(None, "balanced", 260))
    first, last = launches[0]["workspace"], launches[-1]["workspace"]
    assert last is not first
    assert first.closed
    assert (first.sizes.max_tokens, last.sizes.max_tokens) == (256, 384)


def test_a_workspace_that_a_graph_recorded_is_kept_until_the_pool_closes():
    fakes, pool = Fakes(), WorkspacePool()
    case = _case(None)
    sizes = sizes_of(problem_of(case.inputs), 140)
    opened = []

    def get(tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pools, "_open", lambda s, g, *_: fakes.workspace(s, segments=g))
            grown = dataclasses.replace(sizes, max_tokens=tokens)
            opened.append(pool.get(grown, Segments(1, 4), None, torch.device("cpu")))
        return opened[-1]

    first = get(10)
    first._use.captured = True
    second = get(1000)
    assert not first.closed
    assert pool.nbytes == first.nbytes + second.nbytes
    assert get(999) is second
    third = get(1025)
    assert third.sizes.max_tokens >= 1250
    assert second.closed
    pool.close()
    assert first.closed
    assert third.closed
    assert pool.nbytes == 0


def test_a_pool_makes_room_for_as_many_tokens_as_was_said(launches):
    i = _case(None).inputs
    workspace = functional.get_workspace(
        MoKConfig(),
        None,
        device="cpu",
        num_local_tokens=140,
        hidden_size=64,
        topk=2,
        max_tokens=1000,
    )
    call = (i.x, i.topk_experts, i.router_weights, i.w_gate, i.w_up, i.w_down)
    mok.moe(*call, swiglu_limit=i.swiglu_limit)
    assert launches[0]["workspace"].sizes.max_tokens == 1024
    assert workspace.nbytes == launches[0]["workspace"].nbytes
    workspace.close()
    assert workspace.nbytes == 0
    mok.moe(*call, swiglu_limit=i.swiglu_limit)
    assert len(launches) == 2


def test_the_functional_api_defers_its_schedule_and_gives_the_same_bits(launches, run, run_with):
    case = _case()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mok.functional.device_problem", lambda device: "none")
        patch.setattr("mok.hopper.support.device_problem", lambda device: "none")
        wanted = run(case.inputs, case.d_out)
    assert launches == []
    found = run(case.inputs, case.d_out)
    again = run_with(recompute=True)(case.inputs, case.d_out)
    assert [one["saved"] is None for one in launches] == [False, False, False]
    for name, value in wanted.items():
        assert same_bits(found[name], value), name
        assert same_bits(again[name], value), name


def test_a_recompute_runs_without_down_weights_on_stand_ins_of_their_shape(launches, run_with):
    case = _case()
    run_with(recompute=True)(case.inputs, case.d_out)
    problem = launches[1]["problem"]
    assert problem.down.shape == case.inputs.w_down.shape
    assert problem.down.data_ptr() == case.inputs.w_gate.data_ptr()
    assert problem.shared[2].shape == case.inputs.shared[2].shape


def test_rows_that_were_not_saved_are_computed_again(launches, run, monkeypatch):
    case = _case(64, "skewed")
    wanted = run(case.inputs, case.d_out)
    monkeypatch.setattr(passes, "saved_rows", lambda tokens, sizes: 128)
    launches.clear()
    found = run(case.inputs, case.d_out)
    assert [one["saved"] for one in launches] == [128, 640]
    assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []


def test_a_schedule_of_other_ids_later_does_not_reach_into_a_deferred_one(launches):
    ids = torch.tensor([[0, 1], [2, 3]])
    workspace = functional.create_workspace(
        MoKConfig(), None, device="cpu", num_local_tokens=2, hidden_size=64, topk=2
    )
    schedule = functional.build_schedule(workspace, MoKConfig(), ids, num_local_experts=4)
    assert isinstance(schedule, DeferredSchedule)
    ids.fill_(-1)
    assert schedule.on_host().rows_E == (1, 1, 1, 1)


def test_bad_ids_are_raised_at_once_when_asked_for(launches, monkeypatch):
    i = _case(None).inputs
    bad = i.topk_experts.clone()
    bad[3, 1] = 77
    monkeypatch.setenv("MOK_CHECK", "1")
    with pytest.raises(RoutingError, match="= 77"):
        mok.moe(i.x, bad, i.router_weights, i.w_gate, i.w_up, i.w_down)
    workspace = functional.create_workspace(
        MoKConfig(), None, device="cpu", num_local_tokens=140, hidden_size=64, topk=2
    )
    with pytest.raises(RoutingError, match="= 77"):
        functional.build_schedule(workspace, MoKConfig(), bad, num_local_experts=4)
    assert launches == []


def test_knobs_reach_the_launch_and_choose_segments(launches):
    case = _case(None)
    _moe(case.inputs, case.d_out, config=MoKConfig(num_sms=7, minibatch_size=2048))
    assert launches[0]["num_sms"] == 7
    assert launches[0]["workspace"].layout.segments == Segments(16, 16)
    assert Knobs().segments(2048) == Segments(10, 24)
    assert Knobs(minibatch=128).segments(2048) == Segments(8, 8)
    with pytest.raises(InputError, match="num_sms = -1"):
        MoKConfig(num_sms=-1)


def test_autotune_free_module_passes_its_backend(launches):
    layer = mok.MoE(4, 64, 64, backend="portable")
    i = _case(None).inputs
    layer(i.x, i.topk_experts, i.router_weights)
    assert launches == []
    layer.backend = "hopper"
    layer(i.x, i.topk_experts, i.router_weights)
    assert len(launches) == 1


def test_a_table_chooses_knobs_where_nobody_did(launches, monkeypatch, tmp_path):
    entry = Entry(
        Key("cpu", 4, 64, 64, 2, 256), Choice(Segments(3, 5), 9), 1.1, "0.1.0", None, "2026-11-30"
    )
    (tmp_path / "tuned.json").write_text(table_text([entry]))
    monkeypatch.setenv("MOK_TUNED", str(tmp_path / "tuned.json"))
    case = _case(None, "balanced")
    assert same_bits(_out(case), case.expected["out"])
    # other tokens later stay with the first answer, in the first workspace
    other = _case(None, "balanced", 20)
    assert same_bits(_out(other), other.expected["out"])
    first, second = launches
    assert first["workspace"] is second["workspace"]
    assert first["workspace"].layout.segments == Segments(3, 5)
    assert (first["num_sms"], second["num_sms"]) == (9, 9)
    _out(case, config=MoKConfig(num_sms=7))
    assert launches[2]["num_sms"] == 7
    assert launches[2]["workspace"].layout.segments == Knobs().segments(64)
    functional.clear_workspace_cache()
    _out(other)
    assert launches[3]["num_sms"] == 0
