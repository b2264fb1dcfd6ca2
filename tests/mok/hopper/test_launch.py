"""What a launch hands to the kernels: records, maps, grids; and what a workspace refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import pytest
import torch
from hopper_fakes import Fakes, sizes_of, small_problem

from mok.errors import ExchangeError, InputError, RoutingError
from mok.hopper import records
from mok.hopper.forward import grid_size, launch
from mok.hopper.layout import BLOCK, Sizes, saved_rows
from mok.hopper.local_group import LocalGroup, launch_local_group, open_local_group
from mok.hopper.packing import aligned, make_results, pack
from mok.hopper.workspace import HopperWorkspace, open_workspace, region_of
from mok.stages import listened

ORDER = ["publish", "count", "scan", "place", "enter", "forward"]


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def _launched(fakes: Fakes, workspace: HopperWorkspace, problem, saved: int | None = None):
    result = launch(workspace, problem, saved=saved)
    return result, fakes.log[-1][1][0]


def test_one_forward_is_six_kernels_in_order_with_one_record(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 300))
    launch(workspace, problem, saved=None)
    assert [name for name, _, _ in fakes.log] == ORDER
    records_seen = {bytes(args[0]) for _, args, _ in fakes.log}
    assert len(records_seen) == 1
    assert all(args[1] is None for _, args, _ in fakes.log)
    _, args, options = fakes.log[0]
    assert args[2].data_ptr() == problem.topk.data_ptr()
    assert args[3] is None
    assert options["grid"] == (3, 1)
    _, args, options = fakes.log[-1]
    assert args[2].value == 1
    assert options == {"grid": 1, "block": 384, "shared": records.SHARED_BYTES}


def test_the_record_says_where_everything_is(fakes):
    problem = small_problem(shared_width=64, limit=64.0)
    workspace = fakes.workspace(sizes_of(problem, 300))
    rows = saved_rows(70, workspace.sizes)
    result, rank = _launched(fakes, workspace, problem, rows)
    layout, base = workspace.layout, workspace.local.data_ptr()
    named = ("x_ring", "peers", "routes", "blocks", "groups", "counters", "expert_rows", "counts")
    for name in (*named, "shared_y"):
        assert getattr(rank, name) == base + layout.local[name].offset, name
    assert (rank.own_x, rank.out) == (problem.x.data_ptr(), result.out.data_ptr())
    assert (rank.router, rank.failure) == (
        problem.router.data_ptr(),
        workspace.failure.data_ptr(),
    )
    assert (rank.timeout_enter, rank.timeout) == (5 * 10**9, 5 * 10**8)
    assert (rank.rank, rank.ranks, rank.experts, rank.slots) == (0, 1, 4, 2)
    assert (rank.tokens, rank.max_tokens, rank.hidden_size) == (70, 300, 128)
    assert (rank.width, rank.shared_width, rank.save, rank.limit) == (64, 64, 1, 64.0)
    for name in ("ring_x", "ring_h", "max_blocks", "max_shared_blocks", "max_groups"):
        assert getattr(rank, name) == getattr(layout, name), name
    assert rank.max_chunks == layout.max_chunks
    assert (rank.segment_least, rank.segment_most) == (160, 168)


def test_maps_have_the_boxes_of_the_header(fakes):
    problem = small_problem(shared_width=192)
    workspace = fakes.workspace(sizes_of(problem, 300))
    rows = saved_rows(70, workspace.sizes)
    result, rank = _launched(fakes, workspace, problem, rows)
    ring = workspace.layout.ring_x * BLOCK
    ring_h = workspace.layout.ring_h * BLOCK
    assert problem.shared is not None
    wanted = {
        "x_rows": (workspace.address("x_ring"), (128, ring), (64, 64)),
        "gate": (problem.gate.data_ptr(), (128, 64, 4), (64, 128, 1)),
        "up": (problem.up.data_ptr(), (128, 64, 4), (64, 128, 1)),
        "hidden": (workspace.address("hidden"), (64, ring_h), (64, 64)),
        "hidden_out": (workspace.address("hidden"), (64, ring_h), (64, 16)),
        "down": (problem.down.data_ptr(), (64, 128, 4), (64, 256, 1)),
        "saved_gate": (result.gate.data_ptr(), (64, rows), (64, 16)),
        "saved_up": (result.up.data_ptr(), (64, rows), (64, 16)),
        "x": (problem.x.data_ptr(), (128, 70), (64, 64)),
        "shared_gate": (problem.shared[0].data_ptr(), (128, 192, 1), (64, 128, 1)),
        "shared_up": (problem.shared[1].data_ptr(), (128, 192, 1), (64, 128, 1)),
        "shared_hidden": (workspace.address("shared_hidden"), (192, 70), (64, 64)),
        "shared_hidden_out": (workspace.address("shared_hidden"), (192, 70), (64, 16)),
        "shared_down": (problem.shared[2].data_ptr(), (192, 128, 1), (64, 256, 1)),
        "shared_saved_gate": (result.shared_gate.data_ptr(), (192, 70), (64, 16)),
        "shared_saved_up": (result.shared_up.data_ptr(), (192, 70), (64, 16)),
    }
    assert set(wanted) == set(records.MAPS)
    for name, (pointer, sizes, box) in wanted.items():
        spec = fakes.spec(getattr(rank, name))
        assert spec is not None, name
        assert (spec.pointer, spec.sizes, spec.box) == (pointer, sizes, box), name


def test_what_is_not_there_is_null(fakes):
    problem = small_problem()
    result, rank = _launched(fakes, fakes.workspace(sizes_of(problem, 70)), problem)
    assert (result.gate, result.shared_gate, rank.save, rank.shared_y) == (None, None, 0, None)
    assert rank.limit == math.inf
    missing = [name for name in records.MAPS if fakes.spec(getattr(rank, name)) is None]
    assert missing == [name for name in records.MAPS if "saved" in name or name[:6] in ("shared",)
                       or name == "x"]  # fmt: skip


def test_maps_of_weights_and_rings_are_made_once(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 300))
    launch(workspace, problem, saved=None)
    made = len(fakes.specs)
    other = small_problem(33)
    again = dataclasses.replace(problem, x=other.x, topk=other.topk, router=other.router)
    launch(workspace, again, saved=None)
    assert len(fakes.specs) == made


def test_no_tokens_launch_nothing_alone_but_do_with_peers(fakes):
    problem = small_problem()
    empty = dataclasses.replace(
        problem, x=problem.x[:0], topk=problem.topk[:0], router=problem.router[:0]
    )
    alone = launch(fakes.workspace(sizes_of(problem, 70)), empty, saved=None)
    assert (tuple(alone.out.shape), fakes.log) == ((0, 128), [])
    launch(fakes.workspace(sizes_of(problem, 70, ranks=2)), empty, saved=None)
    assert [name for name, _, _ in fakes.log] == ORDER
    rank = fakes.log[-1][1][0]
    assert (rank.own_x, rank.out, rank.router, rank.tokens) == (None, None, None, 0)
    assert fakes.log[0][1][2] is None


def test_peers_are_told_by_their_addresses(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=3))
    where = workspace.layout.symmetric
    table = bytes(region_of(workspace.local, workspace.layout.local["peers"]).numpy())
    peers = (records.Peer * 3).from_buffer_copy(table)
    for peer, base in zip(peers, workspace.bases, strict=True):
        for name in ("x", "ids", "y", "flags"):
            assert getattr(peer, name) == base + where[name].offset
    alone = fakes.workspace(sizes_of(problem, 70))
    table = bytes(region_of(alone.local, alone.layout.local["peers"]).numpy())
    assert records.Peer.from_buffer_copy(table).x is None


def test_flags_and_counters_begin_at_zero(fakes, monkeypatch):
    monkeypatch.setattr(
        "hopper_fakes.arena", lambda n, device: torch.full((n,), 255, dtype=torch.uint8)
    )
    monkeypatch.setattr(
        "mok.hopper.workspace.arena", lambda n, device: torch.full((n,), 255, dtype=torch.uint8)
    )
    workspace = fakes.workspace(sizes_of(small_problem(), 70, ranks=2))
    for name in ("flags", "ids"):
        assert not region_of(workspace.symmetric, workspace.layout.symmetric[name]).any()
    for name in ("counters", "groups", "blocks", "expert_rows", "routes", "counts"):
        assert not workspace.words(name).any(), name
    assert region_of(workspace.local, workspace.layout.local["x_ring"]).all()


def test_tensors_off_the_copy_engines_grid_are_cloned():
    problem = small_problem()
    flat = torch.zeros(problem.x.numel() + 1, dtype=torch.bfloat16)
    shifted = flat[1:].view(problem.x.shape)
    shifted.copy_(problem.x)
    given = aligned(dataclasses.replace(problem, x=shifted))
    assert given.x.data_ptr() % 16 == 0
    assert torch.equal(given.x, problem.x)
    assert given.gate is problem.gate


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden": 192}, r"H = 128 \(made for 192\)"),
        ({"slots": 3}, r"K = 2 \(made for 3\)"),
        ({"experts": 8}, r"E = 4 \(made for 8\)"),
        ({"width": 128}, r"I = 64 \(made for 128\)"),
        ({"shared_width": 64}, r"shared I = 0 \(made for 64\)"),
        ({"max_tokens": 69}, "T = 70; allowed: up to 69"),
    ],
)
def test_a_call_of_other_sizes_is_refused(fakes, change, told):
    problem = small_problem()
    workspace = fakes.workspace(dataclasses.replace(sizes_of(problem, 70), **change))
    with pytest.raises(InputError, match=told):
        launch(workspace, problem, saved=None)
    assert fakes.log == []


def test_grids_are_at_least_one_cta_a_rank_and_at_most_one_a_multiprocessor():
    assert [grid_size(132, wanted, 1) for wanted in (0, 1, 7, 132, 500)] == [132, 1, 7, 132, 132]
    assert grid_size(132, 3, 64) == 64
    with pytest.raises(InputError, match="64 ranks share one launch on 60"):
        grid_size(60, 0, 64)
    with pytest.raises(InputError, match="num_sms = -1"):
        grid_size(60, -1, 1)


def test_the_kernel_that_waits_for_peers_to_come_leaves_room_for_a_collective(fakes):
    problem = small_problem()
    for ranks, num_sms, wanted in ((4, 0, 64), (8, 0, 112), (4, 70, 50), (4, 7, 1), (1, 7, 16)):
        workspace = fakes.workspace(sizes_of(problem, 2048, ranks=ranks))
        object.__setattr__(workspace, "num_sms", 132)
        launch(workspace, problem, saved=None, num_sms=num_sms)
        grids = {name: options["grid"] for name, _, options in fakes.log}
        assert grids["count"] == (wanted, 1)
        assert grids["place"] == (ranks * 16, 1)
        assert grids["forward"] == (num_sms or 132)


def test_a_failed_wait_closes_the_workspace_and_a_new_one_works(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    launch(workspace, problem, saved=None)
    record = records.Failure(state=1, what=5, index=3, rank=0, seen=124, wanted=128, cta=9)
    ctypes.memmove(workspace.failure.data_ptr(), bytes(record), 32)
    for call in (
        lambda: launch(workspace, problem, saved=None),
        workspace.raise_pending,
        workspace.check,
    ):
        with pytest.raises(ExchangeError, match=r"rows of block 3 \(wanted 128, seen 124, CTA 9\)"):
            call()
    assert len(fakes.log) == 6
    launch(fakes.workspace(sizes_of(problem, 70)), problem, saved=None)
    assert len(fakes.log) == 12


def test_a_failed_wait_names_the_ranks_that_are_behind(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=4))
    counters = workspace.words("counters")
    counters[records.COUNT_SCHEDULE], counters[records.COUNT_EPOCH] = 6, -(2**31)
    flags = region_of(workspace.symmetric, workspace.layout.symmetric["flags"]).view(torch.int32)
    of = flags.view(records.FLAGS, records.MAX_RANKS)
    of[0, :4] = torch.tensor([6, 5, 6, 7])
    of[1, :4] = torch.tensor([-(2**31), 3, 2**31 - 1, 1 - 2**31])
    of[2, :4] = of[1, :4]
    record = records.Failure(state=1, what=5, index=3, rank=0, seen=124, wanted=128, cta=9)
    ctypes.memmove(workspace.failure.data_ptr(), bytes(record), 32)
    behind = (
        r"CTA 9\)\. rank 1 has not given its expert ids\. rank 2 has not entered the launch\. Its"
    )
    with pytest.raises(ExchangeError, match=behind):
        workspace.raise_pending()
    flags.zero_()  # what was found first stays
    with pytest.raises(ExchangeError, match=behind):
        workspace.raise_pending()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launch_that_breaks_off_ends_a_workspace_that_peers_share(fakes, monkeypatch, ranks):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=ranks))

    def fails(*args, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(workspace.kernels.place, "launch", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        launch(workspace, problem, saved=None)
    monkeypatch.undo()
    if ranks == 1:  # nobody has gone ahead
        launch(workspace, problem, saved=None)
        return
    with pytest.raises(ExchangeError, match=r"broke off.*\(RuntimeError: no memory\)"):
        launch(workspace, problem, saved=None)


def test_a_grid_that_is_refused_does_not_end_a_workspace(fakes, monkeypatch):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=2))
    with pytest.raises(InputError, match="num_sms = -1"):
        launch(workspace, problem, saved=None, num_sms=-1)
    launch(workspace, problem, saved=None)
    assert [name for name, _, _ in fakes.log] == ORDER

    group = open_local_group(
        LocalGroup(2), sizes_of(problem, 70), torch.device("cpu"), kernels=fakes.kernels
    )
    for one in group:
        object.__setattr__(one.maps, "encoder", fakes.encode)
    monkeypatch.setattr(HopperWorkspace, "begin", lambda self: pytest.fail("it has begun"))
    for num_sms, told in ((-1, "num_sms = -1"), (0, "2 ranks share one launch on 1 multi")):
        with pytest.raises(InputError, match=told):
            launch_local_group(group, [problem] * 2, save=False, num_sms=num_sms)


def test_with_peers_bad_ids_are_raised_when_the_next_launch_is_under_way(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70, ranks=2))
    bad = workspace.words("counters")[records.PLAN_BAD : records.PLAN_BAD + 1]
    bad.fill_(2)
    launch(workspace, problem, saved=None)
    bad.fill_(0)
    fakes.log.clear()
    with pytest.raises(RoutingError, match="2 bad expert id"):
        launch(workspace, problem, saved=None)
    assert [name for name, _, _ in fakes.log] == ORDER
    launch(workspace, problem, saved=None)


def test_ids_that_were_counted_are_not_counted_again(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    workspace.words("counters")[records.PLAN_BAD : records.PLAN_BAD + 1].fill_(2)
    launch(workspace, problem, saved=None, count_bad=False)
    workspace.check()


def test_a_closed_workspace_is_refused(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    workspace.close()
    assert workspace.closed
    with pytest.raises(ExchangeError, match="this workspace is closed"):
        launch(workspace, problem, saved=None)


def test_bad_ids_are_summed_over_launches_and_raised_once(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    bad = workspace.words("counters")[records.PLAN_BAD : records.PLAN_BAD + 1]
    bad.fill_(2)
    launch(workspace, problem, saved=None)
    with pytest.raises(RoutingError, match="2 bad expert id"):
        launch(workspace, problem, saved=None)
    bad.fill_(0)
    launch(workspace, problem, saved=None)
    workspace.check()
    bad.fill_(3)
    launch(workspace, problem, saved=None)
    bad.fill_(0)
    with pytest.raises(RoutingError, match=r"3 bad expert id.*0 \.\. 3,"):
        workspace.check()
    workspace.check()


def test_a_local_group_shares_a_launch_and_a_table_of_records(fakes):
    problems = [small_problem(tokens) for tokens in (70, 3, 129)]
    problems[1] = dataclasses.replace(
        problems[1], x=problems[1].x[:0], topk=problems[1].topk[:0], router=problems[1].router[:0]
    )
    workspaces = open_local_group(
        LocalGroup(3), sizes_of(problems[0], 130), torch.device("cpu"), kernels=fakes.kernels
    )
    for rank, workspace in enumerate(workspaces):
        object.__setattr__(workspace.maps, "encoder", fakes.encode)
        object.__setattr__(workspace, "num_sms", 8)
        assert workspace.rank == rank
        assert workspace.bases == workspaces[0].bases
    results = launch_local_group(workspaces, problems, save=True)
    assert [name for name, _, _ in fakes.log] == ORDER
    assert [one.out.shape[0] for one in results] == [70, 0, 129]
    _, args, options = fakes.log[-1]
    assert (args[2].value, options["grid"]) == (3, 8)
    many = (records.Rank * 3).from_buffer_copy(bytes(args[1].numpy()))
    assert [(one.rank, one.ranks, one.tokens) for one in many] == [
        (0, 3, 70),
        (1, 3, 0),
        (2, 3, 129),
    ]
    assert [one.peers for one in many] == [workspace.address("peers") for workspace in workspaces]
    ids = fakes.log[0][1][3]
    assert ids.tolist() == [problem.topk.data_ptr() for problem in problems]
    assert fakes.log[1][2]["grid"] == (3 * 2, 3)
    with pytest.raises(InputError, match="3 workspaces and 2 problems for 3 ranks"):
        launch_local_group(workspaces, problems[:2], save=False)


def test_a_local_group_has_one_to_64_ranks():
    for ranks in (0, 65):
        with pytest.raises(InputError, match=rf"LocalGroup\({ranks}\)"):
            LocalGroup(ranks)


def test_one_rank_is_not_opened_for_several():
    with pytest.raises(InputError, match="sizes for 2 ranks"):
        open_workspace(Sizes(1, 1, 1, 64, 64, 0, 2), torch.device("cpu"))


def test_results_hold_only_what_is_kept():
    problem = small_problem(shared_width=64)
    none, kept = make_results(problem, None), make_results(problem, 256)
    assert [one is None for one in dataclasses.astuple(none)] == [False, True, True, True, True]
    assert [tuple(one.shape) for one in dataclasses.astuple(kept)] == [
        (70, 128),
        (256, 64),
        (256, 64),
        (70, 64),
        (70, 64),
    ]


def test_what_is_told_holds_no_memory_that_was_never_written(monkeypatch):
    problem, empty = small_problem(), torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, shape: empty(t, shape).fill_(7))
    unheard = make_results(problem, 256)
    with listened(lambda told: None):
        heard = make_results(problem, 256)
    assert [bool((one.gate == 7).all()) for one in (unheard, heard)] == [True, False]
    assert not heard.gate.any()
    assert not heard.up.any()


def test_a_rank_without_routed_rows_saves_its_shared_expert_all_the_same(fakes):
    problem = small_problem(shared_width=64)
    workspace = fakes.workspace(sizes_of(problem, 300))
    results, rank = _launched(fakes, workspace, problem, 0)
    assert rank.save == 1
    assert results.gate.shape[0] == BLOCK
    for name in ("saved_gate", "saved_up", "shared_saved_gate", "shared_saved_up"):
        assert any(getattr(rank, name).opaque), name


def test_a_record_of_a_call_does_not_depend_on_earlier_ones(fakes):
    problem = small_problem()
    workspace = fakes.workspace(sizes_of(problem, 70))
    results = make_results(problem, None)
    first = bytes(pack(workspace, problem, results))
    launch(workspace, small_problem(9), saved=128)
    assert bytes(pack(workspace, problem, results)) == first
