"""Digests of weights in a process: plain tensors, shards, ranks that add up, files of digests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_files import Pieces, digests, flipped, model, safetensors, weights
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import verify
from verify.checkpoints.boxes import digest_box
from verify.digests import Digest
from verify.errors import UnsupportedError
from verify.hashing import digest_tensor


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a group that exchanges nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements) -> DTensor:
    """What this rank holds of a tensor, cut without communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, at = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))].clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


ROWS = (Shard(0),)


def of_ranks(top: Path, state, shape=(4,), placements=ROWS, ranks=None, rot=None) -> Path:
    """A folder of digests, one file a rank; the embedding and the first matrix are sharded."""
    world = torch.Size(shape).numel()
    for rank in range(world) if ranks is None else ranks:
        with as_rank(rank, world):
            mesh = DeviceMesh("cpu", torch.arange(world).reshape(shape))
            mine = dict(state)
            for name in ("embed.weight", "layers.0.up.weight"):
                mine[name] = placed(state[name], mesh, placements)
            if rot == rank:
                with torch.no_grad():
                    mine["embed.weight"].to_local().add_(1)
            verify.save_weights_digests(top / f"rank-{rank}.json", mine)
    return top


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((5,), [Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Replicate(), Shard(1)]),
        ((2, 3), [Shard(1), Replicate()]),
    ],
    ids=str,
)
def test_shards_of_ranks_add_up_to_the_whole(shape, placements, tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    b = of_ranks(tmp_path / "b", state, shape, placements)
    code, out, _ = weights(a, b)
    assert (code, out.splitlines()[0]) == (0, "verdict=VERIFIED 7 parameters, 0 differ")
    world = torch.Size(shape).numel()
    assert f"(digests of {world} of {world} ranks)" in out
    state["embed.weight"] = flipped(state["embed.weight"], (15, 7))
    code, out, _ = weights(safetensors(tmp_path / "c.safetensors", state), b)
    assert code == 1
    assert "embed.weight: digests differ in 1 of " in out


def test_the_rank_whose_shard_is_stale_is_named(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    b = of_ranks(tmp_path / "b", state, rot=2)
    where = f"in 1 of 4 parts: [8:12,0:8] of {tmp_path / 'b' / 'rank-2.json'}"
    for left in (a, of_ranks(tmp_path / "c", state)):
        code, out, _ = weights(left, b)
        assert code == 1
        assert f"embed.weight: digests differ {where}" in out
    whole = digests(tmp_path / "whole.json", state)  # other parts: the sum alone can be compared
    assert "embed.weight: digests differ\n" in weights(whole, b)[1]


def test_replicas_that_differ_are_a_mismatch_even_of_one_side(tmp_path) -> None:
    state = model()
    whole = safetensors(tmp_path / "whole.safetensors", state)
    top = tmp_path / "ranks"
    other = {**state, "embed.weight": flipped(state["embed.weight"], (0, 0))}
    digests(top / "0.json", state, rank=0, world=2)
    digests(top / "1.json", state, rank=1, world=2)
    assert weights(whole, top)[0] == 0
    digests(top / "1.json", other, rank=1, world=2)
    code, out, _ = weights(whole, top)
    assert code == 1
    assert f"embed.weight: B: replicas differ: {top / '0.json'} and {top / '1.json'}" in out
    assert "1 differ: 1 bits" in out


def test_a_rank_without_a_file_keeps_from_verified(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    b = of_ranks(tmp_path / "b", state, ranks=[0, 1, 3])
    code, out, _ = weights(a, b)
    assert code == 3
    assert out.startswith("verdict=UNVERIFIED 7 parameters, 0 differ; 3 open\n")
    assert f"open: {b}: of 4 ranks, no file of rank 2\n" in out
    assert "open: embed.weight: B has digests of 96 of 128 elements only\n" in out
    state["embed.weight"] = flipped(state["embed.weight"], (15, 7))  # of rank 3: seen all the same
    assert weights(safetensors(tmp_path / "c.safetensors", state), b)[0] == 1
    state["embed.weight"] = flipped(model()["embed.weight"], (9, 7))  # of rank 2: nobody knows
    assert weights(safetensors(tmp_path / "d.safetensors", state), b)[0] == 3
    code, out, _ = weights(digests(tmp_path / "e.json", model()), b)
    assert code == 3
    assert "128 elements only, and none of them can be compared\n" in out


def test_pipeline_stages_hold_different_parameters(tmp_path) -> None:
    state = model()
    names, top = list(state), tmp_path / "stages"
    for rank, some in enumerate((names[:3], names[3:])):
        digests(top / f"{rank}.json", {name: state[name] for name in some}, rank=rank, world=2)
    assert weights(safetensors(tmp_path / "a.safetensors", state), top)[0] == 0


def test_plain_shards_say_their_place(tmp_path) -> None:
    state = model()
    whole = state["embed.weight"]
    top = tmp_path / "b"
    for rank, part in enumerate(whole.split([5, 3], dim=1)):
        place = {"embed.weight": (1, 5 * rank, (16, 8))}
        mine = {**state, "embed.weight": part}
        digests(top / f"{rank}.json", mine, places=place, rank=rank, world=2)
    assert weights(safetensors(tmp_path / "a.safetensors", state), top)[0] == 0
    for wrong in ((1, 5, (16, 8)), (0, 0, (16, 8)), (2, 0, (16, 8)), (1, 0, (16, 8, 1))):
        with pytest.raises(ValueError, match=r"places\['w'\]"):
            verify.weights_digests({"w": torch.zeros(16, 5)}, places={"w": wrong})
    with pytest.raises(UnsupportedError, match="places names 'v'"):
        verify.weights_digests({"w": torch.zeros(2)}, places={"v": (0, 0, (2,))})


def test_digests_of_a_state_dict() -> None:
    module = torch.nn.Linear(3, 2)
    found = verify.weights_digests(module.state_dict())
    assert found == {name: digest_tensor(t) for name, t in module.state_dict().items()}
    nested = verify.weights_digests({"a": [module.state_dict()], "n": 3}, ignore=["n"])
    assert list(nested) == ["a.0.weight", "a.0.bias"]
    with as_rank(1, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        part = placed(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
        digest = verify.weights_digests({"w": part})["w"]
        assert (digest.shape, digest.count) == ((3, 2), 2)
        first = digest_tensor(torch.arange(4.0).reshape(2, 2), full_shape=(3, 2))
        assert digest + first == digest_tensor(torch.arange(6.0).reshape(3, 2))
        sums = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedError, match="'w': no place in the whole"):
            verify.weights_digests({"w": sums})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.nn.Linear(1, 1), "give module.state_dict()"),
        (
            {"w": torch.ones(1), "lr": 0.1},
            "'lr' is no tensor but a float: leave it out with ignore",
        ),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two tensors are named 'a.b'"),
        ({"w": torch.ones(1, device="meta")}, "a tensor without data"),
    ],
)
def test_what_is_no_state_dict(value, told) -> None:
    with pytest.raises(UnsupportedError) as caught:
        verify.weights_digests(value)
    assert told in str(caught.value)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.complex64]),
    data=st.data(),
)
def test_boxes_that_cut_a_tensor_anyhow_add_up(shape, dtype, data) -> None:
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for size in shape:
        cut = data.draw(st.integers(0, size))
        boxes = [(*box, edge) for box in boxes for edge in ((0, cut), (cut, size))]
    total = Digest.zero(str(dtype).removeprefix("torch."), tuple(shape))
    for box in boxes:
        total += digest_box(whole, box)
    assert total == digest_tensor(whole)
    pieces = Pieces.of(whole, boxes)
    assert verify.weights_digests({"w": pieces})["w"] == digest_tensor(whole)


@pytest.mark.parametrize(
    ("placements", "told"),
    [
        ([_StridedShard(0, split_factor=2), Shard(0)], None),
        ([_StridedShard(0, split_factor=2), Replicate()], "holds rows from several places"),
        ([_StridedShard(0, split_factor=2), Shard(1)], "holds rows from several places"),
    ],
    ids=["fsdp-over-tp", "replicated", "other-dimension"],
)
def test_strided_shards_have_a_place_only_under_what_they_are_strided_for(placements, told) -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    total = Digest.zero("float32", (8, 4))
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
            local = whole[2 * rank : 2 * rank + 2]
            if told is None:  # tensor parallelism cuts first, FSDP each of its halves
                start = 4 * (rank % 2) + 2 * (rank // 2)
                local = whole[start : start + 2]
            part = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=(8, 4), stride=(4, 1)
            )
            if told is None:
                total += verify.weights_digests({"w": part})["w"]
                continue
            with pytest.raises(UnsupportedError, match=told):
                verify.weights_digests({"w": part})
    assert told is not None or total == digest_tensor(whole)


def test_a_part_of_another_shape_than_its_place() -> None:
    class Odd(Pieces):
        def __get_tensor_shard__(self, index) -> torch.Tensor:
            return torch.zeros(3)

    odd = Odd.of(torch.zeros(4), [((0, 2),), ((2, 4),)])
    with pytest.raises(UnsupportedError, match=r"part of this rank is \[3\], its place says \[2\]"):
        verify.weights_digests({"w": odd})


@pytest.mark.gpu
def test_a_gpu_gives_the_digests_of_the_cpu(tmp_path) -> None:
    state = {**model(), "e": torch.empty(0, 3)}
    there = {name: t.cuda() for name, t in state.items()}
    assert verify.weights_digests(there) == verify.weights_digests(state)
    boxes = [(rows, columns) for rows in ((0, 9), (9, 16)) for columns in ((0, 3), (3, 8))]
    there["embed.weight"] = Pieces.of(there["embed.weight"], boxes)
    a = safetensors(tmp_path / "a.safetensors", state)
    assert weights(a, digests(tmp_path / "b.json", there))[0] == 0
