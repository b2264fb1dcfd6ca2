"""Workspaces of several GPUs: agreement and addresses with fakes; real ranks on two devices."""

from __future__ import annotations

import dataclasses
import os
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hopper_fakes import Fakes

import mok
from mok.errors import InputError, UnsupportedError
from mok.exact import exact_case, same_bits
from mok.hopper import symmetric
from mok.hopper.layout import Sizes
from mok.hopper.symmetric import Place, open_symmetric

CPU = torch.device("cpu")
SIZES = Sizes(100, 2, 4, 64, 64, 0, 2)


@pytest.fixture
def ranks(monkeypatch) -> dict[str, object]:
    """Rank 1 of two, with a peer that has 300 tokens; `places` and `memory` may be changed."""
    state: dict[str, object] = {"places": [Place("a", "0"), Place("a", "1")], "barriers": 0}

    def gather(places: list[object], mine: object, group: object) -> None:
        assert isinstance(mine, Place)
        places[:] = state["places"]  # type: ignore[call-overload]

    def reduce(tensor: torch.Tensor, op: object, group: object) -> None:
        tensor.clamp_(min=300)

    def barrier(group: object) -> None:
        state["barriers"] = int(str(state["barriers"])) + 1

    fake = SimpleNamespace(
        get_world_size=lambda group: 2,
        get_rank=lambda group: 1,
        get_backend=lambda group: "gloo",
        all_gather_object=gather,
        all_reduce=reduce,
        barrier=barrier,
        ReduceOp=dist.ReduceOp,
    )
    monkeypatch.setattr(symmetric, "dist", fake)
    monkeypatch.setattr(symmetric, "load_kernels", lambda device: Fakes().kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        state["memory"] = torch.full((nbytes,), 255, dtype=dtype, device=device)
        return state["memory"]  # type: ignore[return-value]

    def rendezvous(memory: torch.Tensor, group: object) -> object:
        shift = int(str(state.get("shift", 0)))
        return SimpleNamespace(buffer_ptrs=[0x7000, memory.data_ptr() - 512 + shift], offset=512)

    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    return state


def test_ranks_agree_on_the_largest_number_of_tokens_and_see_each_other(ranks):
    made = open_symmetric(SIZES, None, CPU)
    memory = ranks["memory"]
    assert isinstance(memory, torch.Tensor)
    assert (made.rank, made.sizes.max_tokens) == (1, 300)
    assert made.bases == (0x7000 + 512, memory.data_ptr())
    where = made.layout.symmetric
    for name in ("flags", "ids"):
        region = where[name]
        assert not memory[region.offset : region.offset + region.nbytes].any()
    assert memory[where["y"].offset] == 255
    assert ranks["barriers"] == 1


def test_ranks_on_one_gpu_are_refused_by_name(ranks):
    ranks["places"] = [Place("a", "GPU-x")] * 2
    with pytest.raises(UnsupportedError, match=r"ranks 0 and 1 share one GPU \(GPU-x\)"):
        open_symmetric(SIZES, None, CPU)
    assert "memory" not in ranks


def test_memory_that_is_not_where_the_peers_are_told_is_refused(ranks):
    ranks["shift"] = 256
    with pytest.raises(UnsupportedError, match="another address"):
        open_symmetric(SIZES, None, CPU)


def test_sizes_of_another_group_are_refused(ranks):
    with pytest.raises(InputError, match="sizes for 4 ranks in a group of 2"):
        open_symmetric(dataclasses.replace(SIZES, ranks=4), None, CPU)


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
