"""What a backward hands to the kernels: records and maps; and which tensors it refuses."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from hopper_fakes import Fakes, sizes_of, small_problem
from torch import Tensor

from mok.errors import InputError
from mok.hopper import gradient_records, packing, records
from mok.hopper.backward_layout import make_backward_layout
from mok.hopper.backward_packing import pack_backward
from mok.hopper.backward_problem import (
    BackwardProblem,
    MainGradients,
    aligned,
    check_backward,
    make_gradients,
    wants_of,
)
from mok.hopper.layout import BLOCK, Segments, make_layout, saved_rows
from mok.hopper.packing import Problem, Results, make_results

BF16 = torch.bfloat16
ALL = gradient_records.WANT_ROUTED | gradient_records.WANT_SHARED


@dataclasses.dataclass
class Call:
    """One packed backward of small_problem, T = 70 in room for 300."""

    problem: Problem
    backward: BackwardProblem
    ranks: int = 1
    segments: Segments | None = None

    def __post_init__(self) -> None:
        self.fakes = Fakes()
        self.workspace = self.fakes.workspace(sizes_of(self.problem, 300, self.ranks))
        self.memory = self.fakes.backward(self.workspace, segments=self.segments)
        check_backward(self.problem, self.backward)
        self.gradients = make_gradients(self.problem, self.backward)
        given = (self.workspace, self.memory, self.problem, self.backward, self.gradients)
        self.rank, self.grad = pack_backward(*given)

    def maps(self) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Pointer, sizes and box of the maps of the second record that are there."""
        found = {}
        for name in gradient_records.MAPS:
            spec = self.fakes.spec(getattr(self.grad, name))
            if spec is not None:
                found[name] = (spec.pointer, spec.sizes, spec.box)
        return found


def kept_of(problem: Problem) -> Results:
    return make_results(problem, saved_rows(len(problem.x), sizes_of(problem, 300)))


def shared_problem(**options: object) -> tuple[Problem, BackwardProblem]:
    problem = small_problem(shared_width=192, limit=64.0)
    backward = BackwardProblem(torch.zeros_like(problem.x), kept_of(problem), ALL)
    return problem, dataclasses.replace(backward, **options)


def plain(**options: object) -> tuple[Problem, BackwardProblem]:
    problem = small_problem()
    backward = BackwardProblem(torch.zeros_like(problem.x), kept_of(problem))
    return problem, dataclasses.replace(backward, **options)


def test_every_map_has_the_box_of_the_header():
    problem, backward = shared_problem()
    call = Call(problem, backward)
    memory, found, kept = call.memory, call.gradients, backward.kept
    rows = memory.layout.ring * BLOCK
    assert problem.shared is not None
    assert kept is not None
    saved = kept.gate.shape[0]
    wanted = {
        "d_rows": (memory.address("d_ring"), (128, rows), (64, 64)),
        "x_rows": (memory.address("x_ring"), (128, rows), (64, 64)),
        "gate": (problem.gate.data_ptr(), (128, 64, 4), (64, 64, 1)),
        "up": (problem.up.data_ptr(), (128, 64, 4), (64, 64, 1)),
        "down": (problem.down.data_ptr(), (64, 128, 4), (64, 64, 1)),
        "saved_gate": (kept.gate.data_ptr(), (64, saved), (64, 64)),
        "saved_up": (kept.up.data_ptr(), (64, saved), (64, 64)),
        "w_gate_out": (found.d_gate.data_ptr(), (128, 64, 4), (64, 16, 1)),
        "w_up_out": (found.d_up.data_ptr(), (128, 64, 4), (64, 16, 1)),
        "w_down_out": (found.d_down.data_ptr(), (64, 128, 4), (64, 16, 1)),
        "d_out": (backward.d_out.data_ptr(), (128, 70), (64, 64)),
        "x": (problem.x.data_ptr(), (128, 70), (64, 64)),
        "shared_gate": (problem.shared[0].data_ptr(), (128, 192, 1), (64, 64, 1)),
        "shared_up": (problem.shared[1].data_ptr(), (128, 192, 1), (64, 64, 1)),
        "shared_down": (problem.shared[2].data_ptr(), (192, 128, 1), (64, 64, 1)),
        "shared_saved_gate": (kept.shared_gate.data_ptr(), (192, 70), (64, 64)),
        "shared_saved_up": (kept.shared_up.data_ptr(), (192, 70), (64, 64)),
        "shared_w_gate_out": (found.d_shared_gate.data_ptr(), (128, 192, 1), (64, 16, 1)),
        "shared_w_up_out": (found.d_shared_up.data_ptr(), (128, 192, 1), (64, 16, 1)),
        "shared_w_down_out": (found.d_shared_down.data_ptr(), (192, 128, 1), (64, 16, 1)),
    }
    for name in ("d_gate", "d_up", "weighted"):
        wanted[name] = (memory.address(name), (64, rows), (64, 64))
        wanted[f"{name}_out"] = (memory.address(name), (64, rows), (64, 16))
        shared = memory.address(f"shared_{name}")
        wanted[f"shared_{name}"] = (shared, (192, 70), (64, 64))
        wanted[f"shared_{name}_out"] = (shared, (192, 70), (64, 16))
    assert call.maps() == wanted
    assert set(wanted) == set(gradient_records.MAPS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_not_kept_is_computed_again_with_the_maps_of_what_comes_after(ranks):
    whole = Call(*shared_problem(), ranks=ranks)
    call = Call(*shared_problem(kept=None), ranks=ranks)
    read = {"saved_gate", "saved_up", "shared_saved_gate", "shared_saved_up"}
    assert set(call.maps()) == set(whole.maps()) - read
    assert (call.grad.saved_blocks, call.grad.shared_again) == (0, 1)
    assert call.memory.layout == whole.memory.layout
    # AGAIN multiplies with the boxes of the forward
    for name in ("gate", "up", "shared_gate", "shared_up", "x"):
        assert call.fakes.spec(getattr(call.rank, name)) is not None


def test_a_part_that_was_kept_is_read_and_the_rest_computed_again():
    problem = small_problem(shared_width=192)
    kept = make_results(problem, BLOCK)
    call = Call(problem, BackwardProblem(torch.zeros_like(problem.x), kept))
    assert (call.grad.saved_blocks, call.grad.shared_again) == (1, 0)
    assert call.maps()["saved_gate"] == (kept.gate.data_ptr(), (64, BLOCK), (64, 64))
    shared = dataclasses.replace(kept, shared_gate=None, shared_up=None)
    call = Call(problem, BackwardProblem(torch.zeros_like(problem.x), shared))
    assert (call.grad.saved_blocks, call.grad.shared_again) == (1, 1)
    assert "shared_saved_gate" not in call.maps()


def test_the_records_say_where_everything_is():
    problem, backward = shared_problem()
    call = Call(problem, backward, segments=Segments(1, 2))
    rank, grad, memory, workspace = call.rank, call.grad, call.memory, call.workspace
    base, layout = memory.local.data_ptr(), memory.layout
    named = ("d_ring", "x_ring", "row_weights", "partials", "shared_d_x")
    for name in (*named, "peers", "groups", "counters", "segment_of", "used_target"):
        assert getattr(grad, name) == base + layout.local[name].offset, name
    assert grad.own_d_out == backward.d_out.data_ptr()
    assert (grad.d_x, grad.d_router) == (
        call.gradients.d_x.data_ptr(),
        call.gradients.d_router.data_ptr(),
    )
    assert (grad.ring, grad.uncut, grad.max_groups) == (
        layout.ring,
        layout.uncut,
        layout.max_groups,
    )
    saved = kept_of(problem).gate.shape[0] // BLOCK
    assert (grad.saved_blocks, grad.shared_again, grad.wants) == (saved, 0, 63)
    assert grad.scratch is None
    assert all(getattr(grad, name) is None for name in gradient_records.MAINS)
    assert (rank.segment_least, rank.segment_most) == (1, 2)
    assert (rank.out, rank.save, rank.limit, rank.tokens) == (None, 0, 64.0, 70)
    assert rank.peers == workspace.address("peers")
    assert rank.own_x == problem.x.data_ptr()
    for name in ("saved_gate", "saved_up", "shared_saved_gate", "shared_saved_up"):
        assert not any(getattr(rank, name).opaque), name


def test_all_else_of_the_first_record_is_the_forwards():
    problem, backward = shared_problem()
    call = Call(problem, backward)
    forward = packing.pack(call.workspace, problem, make_results(problem, None))
    forward.out = None
    forward.segment_least, forward.segment_most = call.rank.segment_least, call.rank.segment_most
    assert bytes(forward) == bytes(call.rank)


def test_scratch_is_told_where_an_expert_may_be_cut():
    problem = small_problem(1200)
    backward = BackwardProblem(torch.zeros_like(problem.x), kept_of(problem))
    fakes = Fakes()
    workspace = fakes.workspace(sizes_of(problem, 60000))
    memory = fakes.backward(workspace, segments=Segments(1, 2))
    gradients = make_gradients(problem, backward)
    _, grad = pack_backward(workspace, memory, problem, backward, gradients)
    assert (grad.ring, grad.uncut) == (6, 3)
    assert grad.scratch == memory.address("scratch")


def test_gradients_that_are_not_wanted_are_not_made():
    wants = wants_of(up=True, shared_down=True)
    assert wants == gradient_records.WANT_UP | gradient_records.WANT_SHARED_DOWN
    call = Call(*shared_problem(wants=wants))
    found = dataclasses.asdict(call.gradients)
    there = {name for name, tensor in found.items() if tensor is not None}
    assert there == {"d_x", "d_router", "d_up", "d_shared_down"}
    out = {name for name in call.maps() if "w_" in name and name.endswith("_out")}
    assert out == {"w_up_out", "shared_w_down_out"}
    assert call.grad.wants == wants
    nothing = Call(*plain(wants=0))
    assert nothing.gradients.d_gate is None
    assert nothing.grad.wants == 0


def test_gradients_have_the_shapes_of_their_tensors():
    problem, backward = shared_problem()
    found = Call(problem, backward).gradients
    assert (found.d_x.shape, found.d_x.dtype) == (problem.x.shape, BF16)
    assert (found.d_router.shape, found.d_router.dtype) == (problem.router.shape, torch.float32)
    assert problem.shared is not None
    weights = (problem.gate, problem.up, problem.down, *problem.shared)
    names = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
    for name, weight in zip(names, weights, strict=True):
        made = getattr(found, f"d_{name}")
        assert (made.shape, made.dtype, made.is_contiguous()) == (weight.shape, BF16, True)


def test_main_gradients_are_added_to_and_not_returned():
    problem = small_problem(shared_width=192)
    assert problem.shared is not None
    main = MainGradients(up=torch.ones(4, 64, 128), shared_down=torch.ones(128, 192))
    backward = BackwardProblem(torch.zeros_like(problem.x), kept_of(problem), ALL, main)
    call = Call(problem, backward)
    assert main.up is not None
    assert main.shared_down is not None
    assert call.grad.main_up == main.up.data_ptr()
    assert call.grad.shared_main_down == main.shared_down.data_ptr()
    assert call.gradients.d_up is None
    assert call.gradients.d_shared_down is None
    assert {"w_gate_out", "w_down_out", "shared_w_gate_out", "shared_w_up_out"} <= set(call.maps())
    assert not {"w_up_out", "shared_w_down_out"} & set(call.maps())
    mains = {n for n in gradient_records.MAINS if getattr(call.grad, n) is not None}
    assert mains == {"main_up", "shared_main_down"}


def test_gradients_in_fp32_are_written_and_nobody_clears_them(monkeypatch):
    def refuse(*args: object, **options: object) -> Tensor:
        raise AssertionError("memory is cleared")

    problem, backward = shared_problem(dtype=torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", refuse)
        made = make_gradients(problem, backward)
    assert made.d_gate is not None
    call = Call(problem, backward)
    assert call.grad.fresh == ALL
    for name in ("gate", "up", "down"):
        made, shared = (
            getattr(call.gradients, f"d_{name}"),
            getattr(call.gradients, f"d_shared_{name}"),
        )
        assert made.dtype == shared.dtype == torch.float32
        assert getattr(call.grad, f"main_{name}") == made.data_ptr()
        assert getattr(call.grad, f"shared_main_{name}") == shared.data_ptr()
    assert not {name for name in call.maps() if "w_" in name and name.endswith("_out")}
    assert call.gradients.d_x.dtype == BF16


def test_main_gradients_are_not_fresh_and_those_in_bf16_neither():
    main = MainGradients(up=torch.ones(4, 64, 128), shared_down=torch.ones(128, 192))
    mixed = Call(*shared_problem(dtype=torch.float32, main=main))
    assert mixed.grad.fresh == ALL & ~wants_of(up=True, shared_down=True)
    for dtype, wants in ((BF16, ALL), (torch.float32, 0)):
        assert Call(*shared_problem(dtype=dtype, main=MainGradients(), wants=wants)).grad.fresh == 0
    few = wants_of(gate=True, shared_up=True)
    assert Call(*shared_problem(dtype=torch.float32, wants=few)).grad.fresh == few


def test_without_tokens_what_has_rows_is_null_and_weights_have_their_maps():
    problem = small_problem(shared_width=192)
    empty = dataclasses.replace(
        problem, x=problem.x[:0], topk=problem.topk[:0], router=problem.router[:0]
    )
    call = Call(empty, BackwardProblem(empty.x.clone(), None, ALL), ranks=2)
    assert (call.grad.own_d_out, call.grad.d_x, call.grad.d_router) == (None, None, None)
    found = call.maps()
    assert {"shared_w_gate_out", "shared_w_up_out", "shared_w_down_out"} <= set(found)
    rows = {"d_out", "x", "shared_d_gate", "shared_saved_gate", "shared_d_gate_out"}
    assert not rows & set(found)


def test_rows_off_the_copy_engines_grid_are_cloned():
    problem = small_problem(shared_width=192)
    kept = kept_of(problem)

    def shifted(like: Tensor) -> Tensor:
        flat = torch.zeros(like.numel() + 1, dtype=like.dtype)[1:].view(like.shape)
        return flat.copy_(torch.arange(like.numel()).view(like.shape) % 7)

    wrong = Results(kept.out, *map(shifted, (kept.gate, kept.up, kept.shared_gate)), kept.shared_up)
    before = BackwardProblem(shifted(problem.x), wrong)
    made = aligned(before)
    assert made.kept is not None
    pairs = [(made.d_out, before.d_out)]
    pairs += [(getattr(made.kept, n), getattr(wrong, n)) for n in ("gate", "up", "shared_gate")]
    for new, old in pairs:
        assert new.data_ptr() % 16 == 0
        assert torch.equal(new, old)
    assert made.kept.shared_up is kept.shared_up
    right = BackwardProblem(problem.x, kept)
    assert aligned(right).d_out is problem.x


def _cut(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


def _kept(**changes: object) -> Results:
    return dataclasses.replace(kept_of(small_problem(shared_width=192)), **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"d_out": torch.zeros(69, 128, dtype=BF16)}, r"d_out is torch.bfloat16 \[69, 128\]"),
        ({"d_out": torch.zeros(70, 128)}, "allowed: torch.bfloat16"),
        ({"d_out": torch.zeros(128, 70, dtype=BF16).t()}, "not contiguous; allowed"),
        ({"d_out": torch.zeros(70, 128, dtype=BF16, device="meta")}, "on meta.*on cpu, contiguous"),
        ({"dtype": torch.float16}, "gradients of torch.float16"),
        ({"wants": 64}, "wants = 0x40; allowed: bits of 0x3f"),
        ({"wants": -1}, "allowed: bits of 0x3f"),
        ({"main": MainGradients(up=torch.zeros(4, 64, 127))}, r"main.up .*float32 \[4, 64, 128\]"),
        ({"main": MainGradients(up=torch.zeros(4, 64, 128, dtype=BF16))}, "main.up is torch.bf"),
        ({"main": MainGradients(shared_down=torch.zeros(192, 128))}, "main.shared_down"),
        (
            {"wants": 1, "main": MainGradients(up=torch.zeros(4, 64, 128))},
            "of up, whose gradient is not wanted",
        ),
        ({"kept": _kept(up=None)}, "one of kept.gate and kept.up is None"),
        ({"kept": _kept(shared_gate=None)}, "one of kept.shared_gate and kept.shared_up"),
        ({"kept": _kept(gate=_cut(_kept().gate), up=_cut(_kept().up))}, "multiples of 128"),
        ({"kept": _kept(up=_cut(_kept().up))}, r"kept.up is"),
        ({"kept": _kept(shared_up=_cut(_kept().shared_up))}, r"kept.shared_up is.*\[70, 192\]"),
    ],
)
def test_tensors_that_do_not_fit_the_forward_are_refused(changes, told):
    with pytest.raises(InputError, match=told):
        Call(*shared_problem(**changes))


def test_wants_of_a_shared_expert_that_is_not_there_are_refused():
    with pytest.raises(InputError, match=r"wants = 0x3f; allowed: bits of 0x7"):
        Call(*plain(wants=ALL))


def test_peers_are_told_by_their_addresses():
    problem, backward = plain(kept=None)
    call = Call(problem, backward, ranks=3)
    region = call.memory.layout.local["peers"]
    table = bytes(call.memory.local[region.offset : region.offset + region.nbytes].numpy())
    peers = (gradient_records.BackPeer * 3).from_buffer_copy(table)
    where = call.memory.layout.symmetric
    forward = call.workspace.peers()
    for peer, before, own in zip(peers, forward, call.memory.bases, strict=True):
        assert (peer.x, peer.d_x) == (before.x, before.y)
        assert peer.x is not None
        for name in ("d_out", "router", "d_router"):
            assert getattr(peer, name) == own + where[name].offset
    alone = Call(*plain())
    region = alone.memory.layout.local["peers"]
    table = bytes(alone.memory.local[region.offset : region.offset + region.nbytes].numpy())
    peer = gradient_records.BackPeer.from_buffer_copy(table)
    assert (peer.x, peer.d_out, peer.router) == (None, None, None)
    assert peer.d_router == alone.memory.symmetric.data_ptr()
    assert peer.d_x == alone.workspace.peers()[0].y


def test_slots_of_results_have_room_for_those_of_gradients():
    whole = make_layout(sizes_of(small_problem(), 300))
    assert whole.symmetric["y"].nbytes == 300 * 2 * 128 * 2
    assert make_backward_layout(whole).symmetric["d_router"].nbytes == 300 * 2 * 4


def test_records_do_not_depend_on_earlier_calls():
    problem, backward = shared_problem()
    call = Call(problem, backward)
    other = shared_problem(kept=None)
    first = (bytes(call.rank), bytes(call.grad))
    fresh = call.fakes.backward(call.workspace)
    pack_backward(call.workspace, fresh, *other, make_gradients(*other))
    again = pack_backward(call.workspace, call.memory, problem, backward, call.gradients)
    assert tuple(map(bytes, again)) == first
    assert ctypes.sizeof(records.Rank) == len(first[0])
