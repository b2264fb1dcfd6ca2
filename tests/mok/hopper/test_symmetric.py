"""Workspaces of several GPUs: agreement and addresses with fakes; real ranks on two devices."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hopper_fakes import Fakes
from torch.distributed import distributed_c10d

import mok
from mok import checks
from mok.errors import InputError, UnsupportedError
from mok.exact import exact_case, same_bits
from mok.hopper import gradient_records, symmetric
from mok.hopper.chains import Chain
from mok.hopper.layout import Sizes
from mok.hopper.pools import ensure_backward
from mok.hopper.symmetric import Place, agree_range, open_symmetric
from mok.hopper.timeouts import Timeouts

CPU = torch.device("cpu")
SIZES = Sizes(100, 2, 4, 64, 64, 0, 2)


@dataclass(eq=False)
class Group:
    """A process group's name; torch gives a name again when a group was destroyed."""

    group_name: str


@pytest.fixture
def ranks(monkeypatch) -> dict[str, Any]:
    """Rank 1 of two, with a peer that has 300 tokens; `places` and `memory` may be changed."""
    state: dict[str, Any] = {
        "places": [Place("a", "0"), Place("a", "1")],
        "agreements": 0,
        "names": [],
        "stores": [],
        "group": Group("7"),
    }

    def gather_objects(places: list[object], mine: object, group: object) -> None:
        if len(places) == 2 and isinstance(mine, Place):
            places[:] = state["places"]
        else:
            places[:] = [mine, None]

    def gather(rows: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        state["agreements"] += 1
        for row in rows:
            row.copy_(mine)

    def reduce(tensor: torch.Tensor, op: object, group: object) -> None:
        tensor.copy_(torch.maximum(tensor, torch.tensor([-300, 300])[-tensor.numel() :]))

    fake = SimpleNamespace(
        get_world_size=lambda group: 2,
        get_rank=lambda group: 1,
        get_backend=lambda group: "gloo",
        all_gather_object=gather_objects,
        all_gather=gather,
        all_reduce=reduce,
        ReduceOp=dist.ReduceOp,
        PrefixStore=lambda prefix, store: (prefix, store),
    )
    monkeypatch.setattr(symmetric, "dist", fake)
    monkeypatch.setattr(checks, "dist", fake)
    monkeypatch.setattr(symmetric, "_GROUPS", {})
    monkeypatch.setattr(symmetric, "load_kernels", lambda device: Fakes().kernels)
    monkeypatch.setattr(symmetric, "load_backward_kernels", lambda device: Fakes().backward_kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(distributed_c10d, "_get_process_group_store", lambda group: "its store")

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        if "broken" in state:
            raise RuntimeError(state["broken"])
        state["memory"] = torch.full((nbytes,), 255, dtype=dtype, device=device)
        return state["memory"]

    def rendezvous(memory: torch.Tensor, group: object) -> object:
        state["names"].append(group if isinstance(group, str) else "the group")
        pointers = [0x7000, memory.data_ptr() - 512 + state.get("shift", 0)]
        return SimpleNamespace(buffer_ptrs=pointers, offset=512)

    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    table = SimpleNamespace(
        rendezvous=rendezvous, set_group_info=lambda *facts: state["stores"].append(facts)
    )
    monkeypatch.setattr(_symmetric_memory, "_SymmetricMemory", table)
    return state


def test_ranks_agree_on_the_largest_number_of_tokens_and_see_each_other(ranks):
    made = open_symmetric(SIZES, ranks["group"], CPU)
    memory = ranks["memory"]
    assert (made.rank, made.sizes.max_tokens) == (1, 300)
    assert made.bases == (0x7000 + 512, memory.data_ptr())
    where = made.layout.symmetric
    for name in ("flags", "ids"):
        region = where[name]
        assert not memory[region.offset : region.offset + region.nbytes].any()
    assert memory[where["y"].offset] == 255
    # Kernels, memory, and after the flags were cleared: all ranks have to have come that far.
    assert ranks["agreements"] == 3


def test_the_chain_and_the_timeouts_are_those_that_were_given(ranks):
    chain = Chain()
    made = open_symmetric(SIZES, ranks["group"], CPU, timeouts=Timeouts(4.0, 2.0), chain=chain)
    assert made.chain is chain
    assert made.timeouts == Timeouts(4.0, 2.0)


def test_ranks_on_one_gpu_are_refused_by_name(ranks):
    ranks["places"] = [Place("a", "GPU-x")] * 2
    with pytest.raises(UnsupportedError, match=r"ranks 0 and 1 share one GPU \(GPU-x\)"):
        open_symmetric(SIZES, ranks["group"], CPU)
    assert "memory" not in ranks


def test_a_rank_that_cannot_run_the_kernels_is_named_to_all(ranks):
    ranks["places"] = [Place("a", "0"), Place("a", "1", "there is no cuda-core")]
    with pytest.raises(UnsupportedError, match="rank 1 cannot run it: there is no cuda-core"):
        open_symmetric(SIZES, ranks["group"], CPU)


def test_memory_that_is_not_where_the_peers_are_told_is_refused(ranks):
    ranks["shift"] = 256
    with pytest.raises(UnsupportedError, match=r"rank 0: .*another address.*raised on all 2 ranks"):
        open_symmetric(SIZES, ranks["group"], CPU)


def test_memory_that_cannot_be_had_is_told_to_all_ranks(ranks):
    ranks["broken"] = "CUDA out of memory"
    with pytest.raises(UnsupportedError, match=r"CUDA out of memory.*max_tokens=N.*all 2 ranks"):
        open_symmetric(SIZES, ranks["group"], CPU)
    assert ranks["names"] == []


def test_a_group_with_the_name_of_one_that_is_gone_meets_in_its_own_store(ranks):
    open_symmetric(SIZES, ranks["group"], CPU)
    open_symmetric(SIZES, ranks["group"], CPU)
    assert ranks["names"] == ["the group", "the group"]
    ranks["group"] = Group("7")
    open_symmetric(SIZES, ranks["group"], CPU)
    open_symmetric(SIZES, ranks["group"], CPU)
    other = Group("8")
    open_symmetric(SIZES, other, CPU)
    assert ranks["names"][2:] == ["mok/7/1", "mok/7/1", "the group"]
    assert ranks["stores"] == [("mok/7/1", 1, 2, ("mok", "its store"))]


def test_memory_for_backwards_is_made_by_all_ranks_once(ranks):
    made = open_symmetric(SIZES, ranks["group"], CPU)
    agreements = ranks["agreements"]
    memory = ensure_backward(made, ranks["group"])
    assert ranks["names"] == ["the group", "the group"]
    assert ranks["agreements"] == agreements + 3  # kernels, memory, and before anybody writes there
    assert memory.symmetric is ranks["memory"]
    assert memory.bases == (0x7000 + 512, memory.symmetric.data_ptr())
    assert memory.keep.offset == 512
    region = memory.layout.local["peers"]
    table = bytes(memory.local[region.offset : region.offset + region.nbytes].numpy())
    peer = gradient_records.BackPeer.from_buffer_copy(table)
    assert peer.d_out == 0x7000 + 512 + memory.layout.symmetric["d_out"].offset
    assert peer.x == made.bases[0] + made.layout.symmetric["x"].offset
    assert peer.d_x == made.bases[0] + made.layout.symmetric["y"].offset
    assert ensure_backward(made, ranks["group"]) is memory
    assert ranks["agreements"] == agreements + 3


def test_memory_for_backwards_that_cannot_be_had_is_told_to_all_ranks(ranks):
    made = open_symmetric(SIZES, ranks["group"], CPU)
    ranks["broken"] = "CUDA out of memory"
    with pytest.raises(UnsupportedError, match=r"CUDA out of memory.*max_tokens=N.*all 2 ranks"):
        ensure_backward(made, ranks["group"])
    assert made.backward is None


def test_no_rank_keeps_memory_for_backwards_that_another_could_not_make(ranks, monkeypatch):
    made = open_symmetric(SIZES, ranks["group"], CPU)

    def gather(rows: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        ranks["agreements"] += 1
        for row in rows:
            row.copy_(mine)
        if ranks["agreements"] == last:  # what rank 0 says of its rings
            rows[0][0] = 4

    last = ranks["agreements"] + 3
    monkeypatch.setattr(checks.dist, "all_gather", gather)
    with pytest.raises(UnsupportedError, match="raised on all 2 ranks"):
        ensure_backward(made, ranks["group"])
    assert made.backward is None
    assert ensure_backward(made, ranks["group"]) is made.backward


def test_memory_for_backwards_is_that_of_the_workspaces_own_group(ranks):
    other = Fakes().workspace(dataclasses.replace(SIZES, ranks=3))
    with pytest.raises(InputError, match="a workspace of 3 ranks in a group of 2"):
        ensure_backward(other, ranks["group"])


def test_a_range_is_that_of_all_ranks(ranks):
    assert agree_range(ranks["group"], CPU, 100) == (100, 300)
    assert agree_range(ranks["group"], CPU, 400) == (300, 400)


def test_sizes_of_another_group_are_refused(ranks):
    with pytest.raises(InputError, match="sizes for 4 ranks in a group of 2"):
        open_symmetric(dataclasses.replace(SIZES, ranks=4), ranks["group"], CPU)


def _join(rank: int, port: int, backend: str, device: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(device)
    options = {"device_id": torch.device("cuda", device)} if backend == "nccl" else {}
    dist.init_process_group(backend, rank=rank, world_size=2, **options)


def _leaves(case, rank: int, device: int):
    rows = slice(0, 37) if rank == 0 else slice(37, 150)
    experts = slice(4 * rank, 4 * rank + 4)
    i = case.inputs
    parts = {"x": i.x[rows], "router": i.router_weights[rows], "topk": i.topk_experts[rows]}
    parts |= {n: getattr(i, n)[experts] for n in ("w_gate", "w_up", "w_down")}
    return rows, experts, {n: t.contiguous().cuda(device) for n, t in parts.items()}


def _exact_rank(rank: int, port: int, routing: str) -> None:
    _join(rank, port, "nccl", rank)
    case = exact_case(150, 128, 64, 8, 2, routing)
    rows, experts, given = _leaves(case, rank, rank)
    topk = given.pop("topk")
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    for _ in range(3):
        out = mok.moe(
            *(leaves["x"], topk, leaves["router"]),
            *(leaves[n] for n in ("w_gate", "w_up", "w_down")),
            group=dist.group.WORLD,
            backend="hopper",
        )
        assert same_bits(out, case.expected["out"][rows])
    grads = torch.autograd.grad(out, list(leaves.values()), case.d_out[rows].cuda(rank))
    found = dict(zip(leaves, grads, strict=True))
    assert same_bits(found["x"], case.expected["d_x"][rows])
    assert same_bits(found["router"], case.expected["d_router_weights"][rows])
    for name in ("w_gate", "w_up", "w_down"):
        assert same_bits(found[name], case.expected[f"d_{name}"][experts].bfloat16()), name
    mok.functional.clear_workspace_cache()
    dist.destroy_process_group()


def _sharing_rank(rank: int, port: int) -> None:
    _join(rank, port, "gloo", 0)
    case = exact_case(150, 128, 64, 8, 2)
    rows, _, given = _leaves(case, rank, 0)
    call = [given[n] for n in ("x", "topk", "router", "w_gate", "w_up", "w_down")]
    with pytest.raises(UnsupportedError, match="ranks 0 and 1 share one GPU"):
        mok.moe(*call, group=dist.group.WORLD, backend="hopper")
    out = mok.moe(*call, group=dist.group.WORLD)
    assert same_bits(out, case.expected["out"][rows])
    dist.destroy_process_group()


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("routing", ["balanced", "skewed", "unused-slots"])
def test_two_gpus_have_the_exact_bits_and_gradients(routing: str) -> None:
    mp.spawn(_exact_rank, args=(_port(), routing), nprocs=2)


@pytest.mark.gpu
def test_two_processes_on_one_gpu_are_refused_and_auto_goes_portable() -> None:
    mp.spawn(_sharing_rank, args=(_port(),), nprocs=2)
