"""The Hopper forward on a device: exact cases bit for bit, budgets, knobs, graphs, local ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hopper_fakes import problem_of, sizes_of
from hopper_runs import (
    TIMEOUTS,
    TRUNCATING,
    different,
    exact_on_cuda,
    moe_out,
    on_cuda,
    open_for,
    parts_of,
    random_inputs,
    run_layer,
)
from sync_debug import synchronising_raises

from mok import functional, reference
from mok.config import MoKConfig
from mok.errors import InputError, RoutingError
from mok.exact import ExactCase, same_bits
from mok.hopper import records
from mok.hopper.forward import launch
from mok.hopper.layout import Segments, saved_rows
from mok.hopper.local_group import LocalGroup, launch_local_group, open_local_group
from mok.hopper.support import device_problem
from mok.hopper.workspace import HopperWorkspace
from mok.reference import MoEInputs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    problem = device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        pytest.skip(problem)


def _expect_exact(case: ExactCase, inputs: MoEInputs) -> None:
    assert different(run_layer(inputs, case.d_out), case.expected) == set()


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(
    "routing", ["balanced", "skewed", "one-expert", "empty-experts", "k1", "unused-slots"]
)
def test_exact_cases_are_bit_equal_with_their_gradients(routing: str, clamped: bool) -> None:
    slots = 1 if routing in ("k1", "one-expert") else 2
    _expect_exact(
        *exact_on_cuda(200, 192, 192, 8, slots, routing, shared_width=64, clamped=clamped)
    )


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("shared", [None, 128])
def test_any_number_of_tokens(tokens: int, shared: int | None) -> None:
    _expect_exact(*exact_on_cuda(tokens, 128, 64, 4, 2, shared_width=shared))


@pytest.mark.parametrize("rows", [63, 64, 65, 127, 128, 129])
def test_an_expert_with_a_tail_of_any_length(rows: int) -> None:
    _expect_exact(*exact_on_cuda(rows, 128, 64, 3, 1, "one-expert"))


@pytest.mark.parametrize("slots", range(1, 17))
def test_any_number_of_slots(slots: int) -> None:
    case, inputs = exact_on_cuda(96, 64, 64, 16, slots)
    assert same_bits(moe_out(inputs), case.expected["out"])


@pytest.mark.parametrize(("hidden", "width"), [(64, 64), (320, 448), (576, 128), (128, 1088)])
def test_sizes_that_end_inside_of_a_tile(hidden: int, width: int) -> None:
    case, inputs = exact_on_cuda(140, hidden, width, 4, 2, "skewed", shared_width=192)
    assert same_bits(moe_out(inputs), case.expected["out"])


def test_random_values_stay_within_the_budget_of_float64() -> None:
    inputs = random_inputs()
    exact = reference.moe(inputs, None, "exact", accumulation_unit=TRUNCATING)
    for backend in ("hopper", "portable"):
        out = moe_out(on_cuda(inputs), backend=backend).cpu()
        assert reference.budget_used(exact["out"], out) <= 1.0, backend


def test_twenty_calls_have_one_set_of_bits() -> None:
    inputs = on_cuda(random_inputs())
    first = moe_out(inputs)
    for _ in range(20):
        assert same_bits(moe_out(inputs), first)


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
    inputs = on_cuda(random_inputs())
    assert same_bits(moe_out(inputs, config=config), moe_out(inputs))


@pytest.mark.parametrize("segments", [Segments(1, 1), Segments(1, 2), Segments(2, 3)])
@pytest.mark.parametrize("num_sms", [1, 5, 0])
def test_rings_that_wrap_many_times_change_no_bit(segments: Segments, num_sms: int) -> None:
    inputs = on_cuda(random_inputs())
    problem = problem_of(inputs)
    wanted = launch(open_for(problem), problem, saved=saved_rows(700, open_for(problem).sizes))
    workspace = open_for(problem, segments=segments)
    for _ in range(3):
        found = launch(workspace, problem, saved=wanted.gate.shape[0], num_sms=num_sms)
        workspace.check()
        assert same_bits(found.out, wanted.out)
    blocks = int(workspace.words("counters")[records.PLAN_BLOCKS])
    assert blocks > 2 * workspace.layout.ring_h
    valid = _valid_rows(workspace)
    for name in ("gate", "up"):
        assert same_bits(getattr(found, name)[valid], getattr(wanted, name)[valid])
    assert same_bits(found.shared_gate, wanted.shared_gate)


def _valid_rows(workspace: HopperWorkspace) -> torch.Tensor:
    blocks = int(workspace.words("counters")[records.PLAN_BLOCKS])
    return torch.nonzero(workspace.words("routes")[: blocks * records.BLOCK] >= 0).squeeze(1)


def test_a_call_never_waits_for_the_device() -> None:
    _, inputs = exact_on_cuda(200, 192, 192, 8, 2, "balanced", shared_width=64, clamped=False)
    moe_out(inputs)
    with synchronising_raises():
        moe_out(inputs)


def test_a_graph_replays_with_other_inputs() -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    names = ("x", "topk_experts", "router_weights")
    given = dataclasses.replace(inputs, **{name: getattr(inputs, name).clone() for name in names})
    moe_out(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_out(given)
    for shift in (0, 1, 77, 0):
        for name in names:
            getattr(given, name).copy_(getattr(inputs, name).roll(shift, 0))
        out.fill_(-1.0)
        graph.replay()
        assert same_bits(out, case.expected["out"].roll(shift, 0)), shift
    assert same_bits(moe_out(inputs), case.expected["out"])


def test_a_workspace_is_not_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    functional.clear_workspace_cache()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(InputError, match="while a CUDA graph is captured"):
            moe_out(inputs)
    assert same_bits(moe_out(inputs), case.expected["out"])


def test_streams_take_turns_with_one_workspace() -> None:
    inputs = on_cuda(random_inputs())
    wanted = moe_out(inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(moe_out(inputs))
    torch.cuda.synchronize()
    assert all(same_bits(out, wanted) for out in found)


def test_bad_ids_become_unused_and_are_raised_later() -> None:
    _, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    bad = inputs.topk_experts.clone()
    bad[3, 0], bad[7, 1], bad[9, 1] = 99, -5, bad[9, 0]
    clean = inputs.topk_experts.clone()
    clean[3, 0], clean[7, 1], clean[9, 1] = -1, -1, -1
    wanted = moe_out(dataclasses.replace(inputs, topk_experts=clean))
    found = moe_out(dataclasses.replace(inputs, topk_experts=bad))
    assert same_bits(found, wanted)
    torch.cuda.synchronize()
    with pytest.raises(RoutingError, match="3 bad expert id"):
        moe_out(inputs)
    moe_out(inputs)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_sms", [0, 16])
def test_any_degree_on_one_gpu_has_the_bits_of_one_rank(ranks: int, num_sms: int) -> None:
    inputs = on_cuda(random_inputs())
    wanted = launch(open_for(problem_of(inputs)), problem_of(inputs), saved=None).out
    tokens = [0] * ranks
    for token in range(700):
        tokens[(token * token) % ranks if ranks > 1 else 0] += 1
    problems = parts_of(inputs, tokens)
    sizes = sizes_of(problems[0], max(tokens))
    workspaces = open_local_group(
        LocalGroup(ranks), sizes, inputs.x.device, segments=Segments(1, 2), timeouts=TIMEOUTS
    )
    for _ in range(3):
        found = launch_local_group(workspaces, problems, save=False, num_sms=num_sms)
        for workspace in workspaces:
            workspace.check()
        assert same_bits(torch.cat([one.out for one in found]), wanted)


def test_64_ranks_on_one_gpu() -> None:
    case, inputs = exact_on_cuda(330, 64, 64, 64, 4, "skewed")
    tokens = [(rank * 7) % 11 for rank in range(64)]
    tokens[63] += 330 - sum(tokens)
    assert min(tokens) >= 0
    problems = parts_of(inputs, tokens)
    workspaces = open_local_group(
        LocalGroup(64), sizes_of(problems[0], max(tokens)), inputs.x.device, timeouts=TIMEOUTS
    )
    found = launch_local_group(workspaces, problems, save=False)
    for workspace in workspaces:
        workspace.check()
    assert same_bits(torch.cat([one.out for one in found]), case.expected["out"])
