"""One of two gloo ranks, started by test_wrappers_ranks.py as a script: RANK STORE_FILE.

DistributedDataParallel around a block with a whole mok.MoE on every rank, and one checkpoint loaded
at two expert-parallel degrees. Exits with a traceback when a check fails.
"""

from __future__ import annotations

import copy
import datetime
import pickle
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from moe_block import (
    EXPERTS,
    SHARED,
    Block,
    batch,
    different,
    gradients,
    step,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mok.endings import end_process
from mok.errors import InputError

RANKS = 2
ROUTED = ("w_gate", "w_up", "w_down")
Batches = Sequence[tuple[Tensor, Tensor]]
Tensors = dict[str, Tensor]


def batches(tokens: Sequence[int], steps: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """x and d_out of every rank and step; each rank's may have another number of tokens."""
    return [
        [(batch(count, 10 * rank + at), batch(count, 100 + 10 * rank + at)) for at in range(steps)]
        for rank, count in enumerate(tokens)
    ]


def accumulated(model: nn.Module, given: Batches, call: Callable[[Tensor], Tensor]) -> None:
    for x, d_out in given:
        call(x).backward(d_out)


def mean_of_ranks(make: Callable[[], Block], given: list[list[tuple[Tensor, Tensor]]]) -> Tensors:
    """What DDP must give: half of each rank's own gradient, added; a sum of two has one order."""
    own = []
    for mine in given:
        model = make()
        accumulated(model, mine, model)
        own.append(gradients(model))
    return {name: own[0][name] / RANKS + own[1][name] / RANKS for name in own[0]}


def biased(shared: int | None = SHARED) -> Block:
    """A block whose router never chooses experts 2 and 3."""
    model = Block(shared=shared)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([50.0, 50.0, -50.0, -50.0]))
    return model


class Checkpointed(nn.Module):
    """The block, recomputed in the backward; parameter names stay."""

    def __init__(self, block: Block, reentrant: bool) -> None:
        super().__init__()
        self.router, self.moe = block.router, block.moe
        self.run = (lambda x: checkpoint(block, x, use_reentrant=reentrant),)

    def forward(self, x: Tensor) -> Tensor:
        return self.run[0](x)


def check_averages(rank: int) -> None:
    """Gradients are the mean bit for bit, however DDP is set and wherever tokens are missing."""
    for tokens in ((20, 13), (20, 0)):
        for make in (Block, lambda: Block(shared=None), biased):
            given = batches(tokens)
            expected = mean_of_ranks(make, given)
            for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
                model = DistributedDataParallel(make(), **options)
                for _ in range(2):
                    model.zero_grad()
                    accumulated(model, given[rank], model)
                    got = gradients(model.module)
                    assert different(expected, got) == [], (tokens, options)
            if make is biased:
                for name in ROUTED:
                    gradient = got[f"moe.{name}"]
                    assert gradient[2:].count_nonzero() == 0, "experts without tokens"
                    assert gradient[:2].count_nonzero() > 0


def check_accumulation(rank: int) -> None:
    """Two steps without synchronisation, the third with it: the mean of the ranks' sums."""
    given = batches((20, 13), steps=3)
    expected = mean_of_ranks(Block, given)
    model = DistributedDataParallel(Block())
    with model.no_sync():
        accumulated(model, given[rank][:2], model)
    local = gradients(model.module)
    assert different(expected, local) != [], "nothing is averaged yet"
    accumulated(model, given[rank][2:], model)
    assert different(expected, gradients(model.module)) == []


def check_checkpointed(rank: int) -> None:
    given = batches((20, 13))
    expected = mean_of_ranks(Block, given)
    for reentrant in (False, True):
        model = DistributedDataParallel(Checkpointed(Block(), reentrant), static_graph=True)
        for _ in range(2):
            model.zero_grad()
            x, d_out = given[rank][0]
            model(x.clone().requires_grad_()).backward(d_out)
            assert different(expected, gradients(model.module)) == [], reentrant


def check_frozen(rank: int) -> None:
    """Frozen experts under DDP: only the router is averaged."""

    def frozen() -> Block:
        model = Block()
        model.moe.requires_grad_(False)
        return model

    given = batches((20, 13))
    expected = mean_of_ranks(Block, given)
    model = DistributedDataParallel(frozen())
    accumulated(model, given[rank], model)
    assert (
        different(
            {name: expected[f"router.{name}"] for name in ("weight", "bias")},
            gradients(model.module.router),
        )
        == []
    )
    assert all(parameter.grad is None for parameter in model.module.moe.parameters())


def part_of(state: Tensors, rank: int) -> Tensors:
    """A rank's part of a whole layer's state: its experts, and the shared expert as it is."""
    local = EXPERTS // RANKS
    mine = slice(local * rank, local * (rank + 1))
    return {name: value[mine] if name in ROUTED else value for name, value in state.items()}


def check_degrees(rank: int, group: dist.ProcessGroup) -> None:
    """One checkpoint at degree 1 and 2: the same output and gradients, and the same file again."""
    whole, split = Block(), Block(group=group, seed=7)
    state = whole.moe.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for w_gate"):
        split.moe.load_state_dict(state)
    split.router.load_state_dict(whole.router.state_dict())
    split.moe.load_state_dict(part_of(state, rank))
    x, d_out = batch(33), batch(33, 2)
    rows = (slice(0, 20), slice(20, 33))[rank]
    expected = step(whole, whole, x, d_out)
    alone = step(whole, whole, x[rows], d_out[rows])
    wanted = {name: expected[name][rows] for name in ("out", "d_x")}
    routed = {name: expected[f"moe.{name}"] for name in ROUTED}
    wanted |= {f"moe.{name}": value for name, value in part_of(routed, rank).items()}
    wanted |= {name: value for name, value in alone.items() if name not in wanted}
    twin = copy.deepcopy(split)
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    for model, call in (
        (split, split),
        (split, compiled),
        (split, lambda x: checkpoint(split, x, use_reentrant=False)),
        (twin, twin),
    ):
        assert different(wanted, step(call, model, x[rows], d_out[rows])) == []
    assert twin.moe.group is group
    with pytest.raises(InputError, match="with a process group cannot be pickled"):
        pickle.dumps(split)
    again = {}
    for name, value in split.moe.state_dict().items():
        parts = [torch.empty_like(value) for _ in range(RANKS)]
        dist.all_gather(parts, value, group=group)
        again[name] = torch.cat(parts) if name in ROUTED else parts[0]
    assert different(dict(state), again) == []
    check_autocast(whole, split, x, rows)


def check_autocast(whole: Block, split: Block, x: Tensor, rows: slice) -> None:
    """fp32 parameters under autocast, at both degrees."""
    for model in (whole, split):
        model.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = whole(x)[rows], split(x[rows])
    assert different({"out": expected}, {"out": got}) == []


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    check_averages(rank)
    check_accumulation(rank)
    check_checkpointed(rank)
    check_frozen(rank)
    group = dist.group.WORLD
    assert group is not None
    check_degrees(rank, group)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} checked everything")


if __name__ == "__main__":
    main()
    end_process()
