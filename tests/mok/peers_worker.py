"""One of two gloo ranks: the torch pipeline between all-to-alls, against the whole in float64.

python peers_worker.py RANK STORE. Uneven tokens, and routings in which a rank receives nothing.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from mok.bench.contenders import Inputs
from mok.bench.peers import float64, torch_pipeline
from mok.bench.peers.adapting import prepare_peer
from mok.endings import end_process

TOKENS, SPLIT, EXPERTS, HIDDEN, WIDTH, SLOTS = 24, 9, 8, 32, 16, 2
HALF = EXPERTS // 2


def whole(routing: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scores = random(TOKENS, EXPERTS)
    if routing == "all-to-one":
        scores[:, HALF:] -= 100
    weights, chosen = scores.topk(SLOTS, 1)
    return (
        random(TOKENS, HIDDEN).bfloat16(),
        (random(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5).bfloat16(),
        (random(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5).bfloat16(),
        chosen,
        weights.softmax(1).bfloat16().float(),
        random(TOKENS, HIDDEN).bfloat16(),
    )


def check(rank: int, routing: str) -> None:
    everything = whole(routing)
    x, gate_up, down, ids, weights, d_out = everything
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, TOKENS)
    experts = slice(HALF * rank, HALF * rank + HALF)
    mine = Inputs(
        x[rows],
        gate_up[experts],
        down[experts],
        ids[rows],
        weights[rows],
        d_out[rows],
        dist.group.WORLD,
    )
    prepared = prepare_peer(torch_pipeline.PEER, mine)
    for keep in (True, False):  # the graph survives a backward that keeps it
        out = prepared.forward()
        gradients = prepared.backward(out, keep)
    found = {"out": out.detach(), **prepared.arrange(gradients)}
    for name, spread in float64.layer(*everything).items():
        part = experts if name in ("d_gate_up", "d_down") else rows
        error = (found[name].double() - spread.v[part]).abs()
        allowed = float64.budget(spread)[part]
        assert found[name].shape == error.shape, name
        assert bool((error <= allowed).all()), (routing, name)


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for routing in ("random", "all-to-one"):
        check(rank, routing)
    dist.destroy_process_group()
    print(f"rank {rank} checked everything")


if __name__ == "__main__":
    main()
    end_process()
