"""One backward: order of kernels, grids, and what a workspace refuses; memory and who keeps it."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hopper_fakes import CPU, Fakes, sizes_of, small_problem

from mok.errors import ExchangeError, InputError, RoutingError
from mok.hopper import backward, backward_memory, gradient_records, local_group, records
from mok.hopper.backward import hold_kept, launch_backward, launch_backward_kernels
from mok.hopper.backward_layout import make_backward_layout
from mok.hopper.backward_problem import BackwardProblem, MainGradients
from mok.hopper.forward import launch
from mok.hopper.layout import saved_rows
from mok.hopper.local_group import (
    LocalGroup,
    launch_local_group_backward,
    open_local_group,
    open_local_group_backward,
)
from mok.hopper.packing import Problem, Results, make_results
from mok.hopper.pools import ensure_backward
from mok.hopper.workspace import HopperWorkspace

SCHEDULE = ["publish", "count", "scan", "place"]
ORDER = [*SCHEDULE, "enter_backward", "backward"]


@pytest.fixture
def fakes(monkeypatch) -> Fakes:
    made = Fakes()
    monkeypatch.setattr(
        backward_memory,
        "load_backward_kernels",
        lambda device, shared=False: made.backward_kernels,
    )
    return made


def backward_of(problem: Problem, **options: object) -> BackwardProblem:
    kept = make_results(problem, saved_rows(len(problem.x), sizes_of(problem, 300)))
    made = BackwardProblem(torch.ones_like(problem.x), kept)
    return dataclasses.replace(made, **options)


def empty_of(problem: Problem) -> Problem:
    return dataclasses.replace(
        problem, x=problem.x[:0], topk=problem.topk[:0], router=problem.router[:0]
    )


def names(fakes: Fakes) -> list[str]:
    return [name for name, _, _ in fakes.log]


def run(workspace: HopperWorkspace, problem: Problem, **options: object):
    memory = workspace.backward
    assert memory is not None
    return launch_backward(workspace, memory, problem, backward_of(problem, **options))


def test_one_backward_is_six_kernels_in_order_with_two_records(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 300))
    ensure_backward(workspace)
    found = run(workspace, problem)
    assert names(fakes) == ORDER
    assert len({bytes(args[0]) for _, args, _ in fakes.log}) == 1
    assert all(args[1] is None for _, args, _ in fakes.log[:4])
    assert fakes.log[0][1][2].data_ptr() == problem.topk.data_ptr()
    _, args, options = fakes.log[4]
    one, many, grad, grads = args
    assert isinstance(one, records.Rank)
    assert isinstance(grad, gradient_records.Gradient)
    assert (many, grads) == (None, None)
    assert options == {"grid": (1, 1), "block": 256}
    _, args, options = fakes.log[5]
    assert [bytes(arg) for arg in args[:2]] == [bytes(one), bytes(grad)]
    assert args[2:4] == (None, None)
    assert args[4].value == 1
    assert options == {"grid": 1, "block": 384, "shared": records.SHARED_BYTES}
    assert grad.d_x == found.d_x.data_ptr()


def test_grids_are_those_of_a_forward(fakes):
    problem = small_problem()
    for ranks, num_sms, entering, grid in ((1, 0, 8, 132), (1, 7, 8, 7), (4, 70, 264, 70)):
        workspace = fakes.workspace(sizes_of(problem, 2048, ranks=ranks))
        object.__setattr__(workspace, "num_sms", 132)
        memory = fakes.backward(workspace)
        launch(workspace, problem, saved=None, num_sms=num_sms)
        forward = [(name, options["grid"]) for name, _, options in fakes.log]
        fakes.log.clear()
        launch_backward(workspace, memory, problem, backward_of(problem), num_sms=num_sms)
        grids = [(name, options["grid"]) for name, _, options in fakes.log]
        assert grids[:4] == forward[:4]
        assert grids[4:] == [("enter_backward", (entering, 1)), ("backward", grid)]
        assert [number for _, number in grids] == [number for _, number in forward]
        fakes.log.clear()


def test_without_tokens_gradients_are_zeros_and_main_gradients_stay(fakes):
    problem = empty_of(small_problem(shared_width=64))
    workspace = fakes.workspace(sizes_of(problem, 70))
    ensure_backward(workspace)
    main = MainGradients(up=torch.full((4, 64, 128), 3.0))
    found = run(workspace, problem, wants=63, main=main)
    assert fakes.log == []
    assert (tuple(found.d_x.shape), tuple(found.d_router.shape)) == ((0, 128), (0, 2))
    assert found.d_up is None
    assert main.up is not None
    assert bool((main.up == 3).all())
    for name in ("d_gate", "d_down", "d_shared_gate", "d_shared_up", "d_shared_down"):
        assert not getattr(found, name).any(), name


def test_without_tokens_a_rank_with_peers_launches(fakes):
    problem = empty_of(small_problem())
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=2))
    fakes.backward(workspace)
    run(workspace, problem)
    assert names(fakes) == ORDER
    assert fakes.log[0][1][2] is None
    assert fakes.log[-1][1][0].tokens == 0


def test_tensors_that_do_not_fit_launch_nothing(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 60))
    ensure_backward(workspace)
    with pytest.raises(InputError, match="T = 70; allowed: up to 60"):
        run(workspace, problem)
    other = fakes.workspace(sizes_of(problem, 70))
    ensure_backward(other)
    with pytest.raises(InputError, match="d_out is"):
        run(other, problem, d_out=problem.x[:1])
    assert fakes.log == []


def test_a_failed_wait_or_a_closed_workspace_is_refused(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    memory = ensure_backward(workspace)
    record = records.Failure(state=1, what=5, index=3, rank=0, seen=124, wanted=128, cta=9)
    ctypes.memmove(workspace.failure.data_ptr(), bytes(record), 32)
    with pytest.raises(ExchangeError, match="rows of block 3"):
        run(workspace, problem)
    other = fakes.workspace(sizes_of(problem, 70))
    other.close()
    with pytest.raises(ExchangeError, match="this workspace is closed"):
        launch_backward(other, memory, problem, backward_of(problem))
    with pytest.raises(ExchangeError, match="this workspace is closed"):
        ensure_backward(other)
    assert fakes.log == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernel", ["scan", "backward"])
def test_a_launch_that_breaks_off_ends_a_workspace_that_peers_share(
    fakes, monkeypatch, ranks, kernel
):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=ranks))
    memory = fakes.backward(workspace)

    def fails(*args, **options):
        raise RuntimeError("no memory")

    broken = getattr(workspace.kernels, kernel, None) or memory.kernels.backward
    monkeypatch.setattr(broken, "launch", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        run(workspace, problem)
    monkeypatch.undo()
    if ranks == 1:  # nobody has gone ahead
        run(workspace, problem)
        return
    with pytest.raises(ExchangeError, match=r"broke off.*\(RuntimeError: no memory\)"):
        run(workspace, problem)


def test_bad_ids_were_counted_by_the_forward_and_are_raised_when_its_launch_has_ended(fakes):
    problem = small_problem()
    for ranks, launches in ((1, 0), (2, 1)):
        workspace = fakes.workspace(sizes_of(problem, 70, ranks=ranks))
        fakes.backward(workspace)
        bad = workspace.words("counters")[records.PLAN_BAD : records.PLAN_BAD + 1]
        bad.fill_(2)
        launch(workspace, problem, saved=None)
        fakes.log.clear()
        with pytest.raises(RoutingError, match="2 bad expert id"):
            run(workspace, problem)
        assert names(fakes) == launches * ORDER  # with peers, who wait for it, the launch is made
        run(workspace, problem)
        workspace.check()


def test_memory_is_made_at_the_first_backward_and_counted(fakes):
    problem = small_problem(shared_width=64)
    workspace = fakes.workspace(sizes_of(problem, 300))
    before = workspace.nbytes
    assert workspace.backward is None
    memory = ensure_backward(workspace)
    layout = make_backward_layout(workspace.layout)
    assert memory.layout == layout
    assert (memory.local.numel(), memory.symmetric.numel()) == (
        layout.local_bytes,
        layout.symmetric_bytes,
    )
    assert workspace.nbytes == before + layout.nbytes
    assert ensure_backward(workspace) is memory
    assert workspace.backward is memory
    # another view of one workspace, as with other timeouts
    assert dataclasses.replace(workspace, num_sms=3).backward is memory
    assert memory.words("segment_of").numel() == workspace.layout.max_blocks


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_forward_can_be_completed_with_the_same_memory(fakes, ranks):
    """Whatever it kept: rows, nothing, or those of one of the experts alone."""
    problem = small_problem(shared_width=64)
    workspace = fakes.workspace(sizes_of(problem, 300, ranks))
    memory = fakes.backward(workspace)
    local, nbytes = memory.local, workspace.nbytes
    whole = make_results(problem, saved_rows(len(problem.x), sizes_of(problem, 300)))
    for kept in (
        whole,
        None,
        make_results(problem, 128),
        dataclasses.replace(whole, shared_gate=None, shared_up=None),
        dataclasses.replace(whole, gate=None, up=None),
    ):
        run(workspace, problem, kept=kept)
        assert names(fakes) == ORDER
        fakes.log.clear()
    assert workspace.backward is memory
    assert memory.local is local
    assert workspace.nbytes == nbytes == workspace.layout.nbytes + memory.nbytes


def test_memory_is_not_made_inside_a_capture(fakes, monkeypatch):
    workspace = fakes.workspace(sizes_of(small_problem(), 300))
    monkeypatch.setattr("mok.hopper.support.capturing", lambda device: True)
    with pytest.raises(InputError, match="memory for a backward cannot be made while a CUDA graph"):
        ensure_backward(workspace)
    monkeypatch.undo()
    assert workspace.backward is None


def test_several_ranks_need_their_group_for_the_first_backward_only(fakes):
    workspace = fakes.workspace(sizes_of(small_problem(), 70, ranks=2))
    with pytest.raises(InputError, match="a workspace of 2 ranks without a group"):
        ensure_backward(workspace)
    memory = fakes.backward(workspace)
    assert ensure_backward(workspace) is memory


def test_a_workspace_without_memory_for_it_is_refused(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    rank, grad = records.Rank(), gradient_records.Gradient()
    with pytest.raises(InputError, match="without memory for a backward"):
        launch_backward_kernels([workspace], rank, grad, None, None, (problem.topk, None), 0)


def test_memory_that_goes_is_not_given_to_others_while_a_stream_uses_it(fakes, monkeypatch):
    workspace = fakes.workspace(sizes_of(small_problem(), 70))
    told: list[tuple[str, int]] = []
    arenas = [
        SimpleNamespace(record_stream=lambda stream, name=name: told.append((name, stream)))
        for name in ("local", "symmetric")
    ]
    made = ensure_backward(workspace)
    memory = dataclasses.replace(made, local=arenas[0], symmetric=arenas[1], _seen=set())
    captured = {"now": False}
    monkeypatch.setattr(backward_memory, "capturing", lambda device: captured["now"])
    for number, capture in ((1, False), (1, False), (2, True), (2, False)):
        stream = SimpleNamespace(cuda_stream=number)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, one=stream: one)
        captured["now"] = capture
        memory.used_on(torch.device("cuda", 0))
    memory.used_on(CPU)
    assert [(name, stream.cuda_stream) for name, stream in told] == [
        ("local", 1),
        ("symmetric", 1),
        ("local", 2),
        ("symmetric", 2),
    ]


def test_what_the_forward_kept_is_held_until_the_backwards_stream_is_done(fakes, monkeypatch):
    told: list[tuple[str, int]] = []
    rows = {
        name: SimpleNamespace(record_stream=lambda stream, name=name: told.append((name, stream)))
        for name in ("gate", "up", "shared_gate", "shared_up")
    }
    kept, captured = Results(torch.empty(0), **rows), {"now": False}
    monkeypatch.setattr(backward, "capturing", lambda device: captured["now"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.index)
    device = torch.device("cuda", 3)
    hold_kept(device, kept)
    assert told == [(name, 3) for name in rows]
    hold_kept(device, dataclasses.replace(kept, gate=None, up=None))
    assert told[4:] == [("shared_gate", 3), ("shared_up", 3)]
    captured["now"] = True
    hold_kept(device, kept)
    hold_kept(CPU, kept)
    hold_kept(device, None)
    assert len(told) == 6


def test_a_launch_holds_what_it_was_given_before_its_kernels(fakes, monkeypatch):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 300))
    memory = ensure_backward(workspace)
    given, seen = backward_of(problem), []
    monkeypatch.setattr(backward, "hold_kept", lambda *args: seen.append((*args, len(fakes.log))))
    launch_backward(workspace, memory, problem, given)
    assert seen == [(CPU, given.kept, 0)]


def test_a_grid_that_is_refused_does_not_end_a_workspace(fakes, monkeypatch):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=2))
    memory = fakes.backward(workspace)
    given = backward_of(problem)
    with pytest.raises(InputError, match="num_sms = -1"):
        launch_backward(workspace, memory, problem, given, num_sms=-1)
    launch_backward(workspace, memory, problem, given)
    assert names(fakes) == ORDER

    problems, workspaces = _local_group(fakes, monkeypatch)
    open_local_group_backward(workspaces, kernels=fakes.backward_kernels)
    monkeypatch.setattr(HopperWorkspace, "begin", lambda self: pytest.fail("it has begun"))
    backwards = [backward_of(problem, kept=None) for problem in problems]
    with pytest.raises(InputError, match="num_sms = -1"):
        launch_local_group_backward(workspaces, problems, backwards, num_sms=-1)


def _local_group(fakes: Fakes, monkeypatch) -> tuple[list[Problem], tuple[HopperWorkspace, ...]]:
    problems = [small_problem(tokens) for tokens in (70, 3, 129)]
    problems[1] = empty_of(problems[1])
    workspaces = open_local_group(
        LocalGroup(3), sizes_of(problems[0], 130), CPU, kernels=fakes.kernels
    )
    for workspace in workspaces:
        object.__setattr__(workspace.maps, "encoder", fakes.encode)
        object.__setattr__(workspace, "num_sms", 8)
    return problems, workspaces


def test_a_local_group_shares_a_launch_and_two_tables_of_records(fakes, monkeypatch):
    problems, workspaces = _local_group(fakes, monkeypatch)
    backwards = [backward_of(problem, kept=None) for problem in problems]
    with pytest.raises(InputError, match="rank 0 has no memory for a backward"):
        launch_local_group_backward(workspaces, problems, backwards)
    memories = open_local_group_backward(workspaces, kernels=fakes.backward_kernels)
    assert [workspace.backward for workspace in workspaces] == list(memories)
    assert {memory.bases for memory in memories} == {
        tuple(memory.symmetric.data_ptr() for memory in memories)
    }
    found = launch_local_group_backward(workspaces, problems, backwards, num_sms=5)
    assert names(fakes) == ORDER
    assert [one.d_x.shape[0] for one in found] == [70, 0, 129]
    _, args, options = fakes.log[-1]
    assert (args[4].value, options["grid"]) == (3, 5)
    many = (records.Rank * 3).from_buffer_copy(bytes(args[2].numpy()))
    grads = (gradient_records.Gradient * 3).from_buffer_copy(bytes(args[3].numpy()))
    assert [(one.rank, one.tokens) for one in many] == [(0, 70), (1, 0), (2, 129)]
    assert [one.d_x for one in grads] == [p.d_x.data_ptr() or None for p in found]
    assert [one.peers for one in grads] == [memory.address("peers") for memory in memories]
    assert fakes.log[4][1][1] is args[2]
    assert fakes.log[4][1][3] is args[3]
    assert fakes.log[4][2]["grid"] == (16, 3)
    assert fakes.log[0][1][3].tolist() == [problem.topk.data_ptr() for problem in problems]
    with pytest.raises(InputError, match="3 workspaces and 2 problems for 3 ranks"):
        launch_local_group_backward(workspaces, problems, backwards[:2])


def test_kernels_of_a_local_group_are_those_for_shared_launches(fakes, monkeypatch):
    _, workspaces = _local_group(fakes, monkeypatch)
    asked = []

    def load(device, *, shared=False):
        asked.append(shared)
        return fakes.backward_kernels

    monkeypatch.setattr(local_group, "load_backward_kernels", load)
    open_local_group_backward(workspaces)
    assert asked == [True]


def test_kernels_are_loaded_by_source_and_macro(monkeypatch):
    asked = []

    def load(source, entry, **options):
        asked.append((source, entry, options))
        return entry

    monkeypatch.setattr(backward_memory, "load", load)
    for shared in (False, True):
        found = backward_memory.load_backward_kernels(CPU, shared=shared)
        assert dataclasses.astuple(found) == ("enter_backward", "backward")
    assert asked[1::2] == [
        ("moe/backward.cu", "backward", {"macros": {"GROUP": group}, "device": CPU})
        for group in (0, 1)
    ]
    assert {(source, entry) for source, entry, _ in asked[::2]} == {
        ("moe/enter_backward.cu", "enter_backward")
    }
