"""A rank of `test_ranks.py`: data parallel, sharded and fully sharded models, recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import verify


def model_and_data(rank: int) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.randn(4, 5) + rank


def state(model: nn.Module) -> str:
    tensors = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    return str(verify.digest(tensors))


def run(kind: str, folder: Path | None, rank: int) -> str:
    model, x = model_and_data(rank)
    trained: nn.Module = model
    if kind == "ddp":
        trained = DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    elif kind == "sharded":
        mesh = init_device_mesh("cpu", (2,))
        for layer, dim in ((model[0], 0), (model[2], 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(dim)]))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [Shard(0)]))
        x = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)

    def steps() -> None:
        for _ in range(2):
            loss = trained(x).square().mean()
            (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    if folder is None:
        steps()
    else:
        with verify.record(folder / kind, trained):
            steps()
    return state(model)


def main() -> None:
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in ("ddp", "fsdp", "sharded"):
        plain, recorded = (run(kind, folder, rank) for folder in (None, store.parent))
        assert plain == recorded, kind
        (store.parent / f"{kind}-{rank}.txt").write_text(recorded)
    dist.barrier()
    print(f"rank {rank} checked everything", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
