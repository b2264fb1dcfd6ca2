"""The launches of the Hopper backward on a device: rings, parts, kept rows, wants, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hopper_fakes import problem_of
from hopper_runs import exact_on_cuda, on_cuda, open_for, random_inputs, random_upstream
from torch import Tensor

from mok.errors import InputError
from mok.exact import same_bits
from mok.hopper import gradient_records, records
from mok.hopper.backward import launch_backward
from mok.hopper.backward_layout import make_backward_layout
from mok.hopper.backward_problem import WEIGHTS, BackwardProblem, Gradients, MainGradients
from mok.hopper.forward import launch
from mok.hopper.gradient_records import WANT_ROUTED, WANT_SHARED
from mok.hopper.layout import BLOCK, Segments, make_layout, saved_rows
from mok.hopper.packing import Problem, Results
from mok.hopper.pools import ensure_backward
from mok.hopper.support import device_problem
from mok.hopper.workspace import HopperWorkspace

pytestmark = pytest.mark.gpu

ALL = WANT_ROUTED | WANT_SHARED
SMALLEST = Segments(1, 1)
"""Of these the crowded expert of the random inputs is cut, and the ring has three blocks."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A problem on the device, and what its forward keeps."""

    problem: Problem
    d_out: Tensor
    kept: Results


@pytest.fixture(autouse=True)
def _hopper() -> None:
    problem = device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def given() -> Given:
    problem = problem_of(on_cuda(random_inputs()))
    workspace = open_for(problem)
    rows = saved_rows(problem.x.shape[0], workspace.sizes)
    kept = launch(workspace, problem, saved=rows)
    workspace.check()
    return Given(problem, random_upstream().cuda(), kept)


@pytest.fixture(scope="module")
def wanted(given: Given) -> Gradients:
    """All gradients with what a layer takes of segments, those of weights in fp32."""
    workspace = open_for(given.problem)
    memory = ensure_backward(workspace)
    backward = BackwardProblem(given.d_out, given.kept, ALL, dtype=torch.float32)
    found = launch_backward(workspace, memory, given.problem, backward)
    workspace.check()
    assert all(bool(one.isfinite().all()) for one in _tensors(found).values())
    return found


def _tensors(gradients: Gradients) -> dict[str, Tensor]:
    fields = {one.name: getattr(gradients, one.name) for one in dataclasses.fields(gradients)}
    return {name: value for name, value in fields.items() if value is not None}


def _same(found: Gradients, wanted: Gradients) -> list[str]:
    """Names of gradients that differ; those of weights in the dtype that was found."""
    theirs = _tensors(wanted)
    return [
        name
        for name, value in _tensors(found).items()
        if not same_bits(value, theirs[name].to(value.dtype))
    ]


def _kept(given: Given, what: str) -> Results | None:
    """What a forward keeps that saves all, some or no rows."""
    if what == "nothing":
        return None
    if what == "all":
        return given.kept
    assert given.kept.gate is not None
    assert given.kept.up is not None
    rows = 7 * BLOCK
    part = dataclasses.replace(given.kept, gate=given.kept.gate[:rows], up=given.kept.up[:rows])
    if what == "some":
        return part
    return dataclasses.replace(part, shared_gate=None, shared_up=None)


def _segments_of(workspace: HopperWorkspace) -> list[list[int]]:
    """The groups of WEIGHTS with rows: block, blocks, segment, expert, part."""
    memory = workspace.backward
    assert memory is not None
    count = int(workspace.words("counters")[records.PLAN_GROUPS])
    groups = memory.words("groups").view(-1, 8)[:count].tolist()
    return [
        [block, blocks, segment, expert, part & gradient_records.PART_NUMBER]
        for _, kind, block, blocks, segment, _, expert, part in groups
        if kind == gradient_records.BACK_WEIGHTS and blocks
    ]


@pytest.mark.parametrize("kept", ["all", "some", "some of routed alone", "nothing"])
@pytest.mark.parametrize("segments", [SMALLEST, Segments(1, 2), Segments(2, 3), None])
@pytest.mark.parametrize("num_sms", [1, 5, 0])
def test_rings_parts_and_kept_rows_change_no_bit(
    given: Given, wanted: Gradients, kept: str, segments: Segments | None, num_sms: int
) -> None:
    workspace = open_for(given.problem, segments=segments)
    memory = ensure_backward(workspace, segments=segments)
    backward = BackwardProblem(given.d_out, _kept(given, kept), ALL)
    for _ in range(3):
        found = launch_backward(workspace, memory, given.problem, backward, num_sms=num_sms)
        workspace.check()
        assert _same(found, wanted) == []
    parts = [part for *_, part in _segments_of(workspace)]
    blocks = int(workspace.words("counters")[records.PLAN_BLOCKS])
    if segments == SMALLEST:
        assert blocks > 2 * memory.layout.ring
        assert max(parts) > 1
    elif segments is None:
        assert max(parts) == 0


def test_a_forward_and_a_backward_take_turns(given: Given, wanted: Gradients) -> None:
    """Under one workspace with small rings; a backward leaves nothing that a forward minds."""
    workspace = open_for(given.problem, segments=SMALLEST)
    memory = ensure_backward(workspace, segments=SMALLEST)
    assert given.kept.gate is not None
    rows = given.kept.gate.shape[0]
    for _ in range(5):
        results = launch(workspace, given.problem, saved=rows)
        backward = BackwardProblem(given.d_out, results, ALL)
        found = launch_backward(workspace, memory, given.problem, backward)
        assert same_bits(results.out, given.kept.out)
        assert _same(found, wanted) == []
    workspace.check()


@pytest.mark.parametrize("wants", [0, 1, 2, 4, 5, 8, 16, 32, 7, 56, 42, 63])
def test_only_what_is_wanted_is_computed(given: Given, wanted: Gradients, wants: int) -> None:
    for segments in (None, SMALLEST):
        workspace = open_for(given.problem)
        memory = ensure_backward(workspace, segments=segments)
        backward = BackwardProblem(given.d_out, given.kept, wants)
        found = launch_backward(workspace, memory, given.problem, backward)
        workspace.check()
        assert _same(found, wanted) == []
        there = [one is not None for one in found.weights()]
        assert there == [bool(wants >> number & 1) for number in range(len(WEIGHTS))]


@pytest.mark.parametrize("segments", [None, SMALLEST])
@pytest.mark.parametrize("added", [("gate",), ("down", "shared_up"), WEIGHTS])
def test_main_gradients_are_added_to_once(
    given: Given, wanted: Gradients, added: tuple[str, ...], segments: Segments | None
) -> None:
    workspace = open_for(given.problem)
    memory = ensure_backward(workspace, segments=segments)
    before = {name: getattr(wanted, f"d_{name}") / 7 + 1.0 for name in added}
    main = {name: value.clone() for name, value in before.items()}
    backward = BackwardProblem(given.d_out, given.kept, ALL, MainGradients(**main))
    found = launch_backward(workspace, memory, given.problem, backward)
    workspace.check()
    assert _same(found, wanted) == []
    for name, value in main.items():
        assert getattr(found, f"d_{name}") is None
        assert same_bits(value, before[name] + getattr(wanted, f"d_{name}")), name


def test_experts_without_rows_have_zeros_and_leave_main_gradients_alone() -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 8, 2, "empty-experts")
    problem = problem_of(inputs)
    empty = torch.bincount(problem.topk.flatten().cpu(), minlength=8) == 0
    assert bool(empty.any())
    workspace = open_for(problem)
    memory = ensure_backward(workspace)
    plain = BackwardProblem(case.d_out.cuda())
    junk = torch.full((64 << 20,), torch.nan, dtype=torch.bfloat16, device="cuda")
    del junk  # gradients are made in its place
    found = launch_backward(workspace, memory, problem, plain)
    for name in ("gate", "up", "down"):
        gradient = getattr(found, f"d_{name}")
        assert same_bits(gradient, case.expected[f"d_w_{name}"].bfloat16()), name
        assert not gradient[empty.cuda()].any()
    totals = {
        name: torch.full(getattr(problem, name).shape, 0.1, device="cuda")
        for name in ("gate", "up", "down")
    }
    added = dataclasses.replace(plain, main=MainGradients(**totals))
    launch_backward(workspace, memory, problem, added)
    workspace.check()
    for name, total in totals.items():
        wanted = case.expected[f"d_w_{name}"].cuda() + torch.full_like(total, 0.1)
        assert same_bits(total, wanted), name


def test_a_graph_of_a_backward_alone_replays_with_other_inputs() -> None:
    case, inputs = exact_on_cuda(150, 128, 64, 4, 2, "balanced")
    problem, upstream = problem_of(inputs), case.d_out.cuda()
    names = ("x", "topk", "router")
    moved = dataclasses.replace(problem, **{n: getattr(problem, n).clone() for n in names})
    d_out = upstream.clone()
    workspace = open_for(problem)
    memory = ensure_backward(workspace)
    backward = BackwardProblem(d_out)
    launch_backward(workspace, memory, moved, backward)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch_backward(workspace, memory, moved, backward)
    for shift in (0, 1, 77, 0):
        for name in names:
            getattr(moved, name).copy_(getattr(problem, name).roll(shift, 0))
        d_out.copy_(upstream.roll(shift, 0))
        for value in _tensors(found).values():
            value.fill_(-1.0)
        graph.replay()
        assert same_bits(found.d_x, case.expected["d_x"].roll(shift, 0)), shift
        assert same_bits(found.d_router, case.expected["d_router_weights"].roll(shift, 0)), shift
        for name in ("gate", "up", "down"):
            wanted = case.expected[f"d_w_{name}"].bfloat16()
            assert same_bits(getattr(found, f"d_{name}"), wanted), (name, shift)
    workspace.check()


def test_memory_is_known_before_and_all_that_is_allocated(given: Given) -> None:
    def held() -> int:
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    for segments in (None, SMALLEST):
        before = held()
        workspace = open_for(given.problem)
        after_forward = held()
        sizes = workspace.sizes
        planned = make_backward_layout(make_layout(sizes), segments)
        memory = ensure_backward(workspace, segments=segments)
        assert memory.nbytes == planned.nbytes == held() - after_forward
        assert workspace.nbytes == make_layout(sizes).nbytes + planned.nbytes
        assert workspace.nbytes <= held() - before <= workspace.nbytes + 64  # bad ids
        del workspace, memory
        assert held() == before


def test_gradients_and_nothing_else_are_allocated_by_a_call(given: Given) -> None:
    workspace = open_for(given.problem)
    memory = ensure_backward(workspace)
    backward = BackwardProblem(given.d_out, given.kept, ALL)
    first = launch_backward(workspace, memory, given.problem, backward)
    wanted = sum(one.nbytes for one in _tensors(first).values())
    torch.cuda.synchronize()
    for _ in range(2):
        before = int(torch.cuda.memory_stats()["requested_bytes.all.current"])
        torch.cuda.reset_peak_memory_stats()
        found = launch_backward(workspace, memory, given.problem, backward)
        peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
        assert peak - before == wanted
        del found


def _routings() -> Iterator[Tensor]:
    """Of 700 tokens and 16 experts: all rows on the first, on the last, on none."""
    for expert in (0, 15):
        topk = torch.full((700, 4), -1, dtype=torch.int64)
        topk[:, expert % 4] = expert
        yield topk.cuda()
    yield torch.full((700, 4), -1, dtype=torch.int64).cuda()


def test_routings_take_turns_under_small_rings(given: Given, wanted: Gradients) -> None:
    """Each with the bits that it has in memory of its own with a ring for all rows."""
    small = open_for(given.problem, segments=SMALLEST)
    memory = ensure_backward(small, segments=SMALLEST)
    backward = BackwardProblem(given.d_out, None, ALL)
    for topk in _routings():
        problem = dataclasses.replace(given.problem, topk=topk)
        large = open_for(problem)
        roomy = ensure_backward(large)
        theirs = launch_backward(large, roomy, problem, backward)
        large.check()
        for one, reference in ((problem, theirs), (given.problem, wanted)):
            found = launch_backward(small, memory, one, backward)
            small.check()
            assert _same(found, reference) == []


def test_what_is_wanted_is_checked_before_a_launch(given: Given) -> None:
    workspace = open_for(given.problem)
    memory = ensure_backward(workspace)
    for wrong in (
        BackwardProblem(given.d_out, given.kept, 1 << len(WEIGHTS)),
        BackwardProblem(given.d_out[:-1], given.kept, ALL),
        BackwardProblem(given.d_out.float(), given.kept, ALL),
    ):
        with pytest.raises(InputError):
            launch_backward(workspace, memory, given.problem, wrong)
    backward = BackwardProblem(given.d_out, given.kept, ALL)
    launch_backward(workspace, memory, given.problem, backward)
    workspace.check()
