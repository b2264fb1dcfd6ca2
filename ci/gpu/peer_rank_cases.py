"""Cases for `verify` on several GPUs: peers between NCCL all-to-alls (mok.bench.peers.nccl).

    verify run ci/gpu/peer_rank_cases.py --device cuda --ranks 2 --runs 20 --report report

For each rank the tokens and the experts of `small` in peer_cases.py, in equal parts; the same
reference. In a file of its own, since on one GPU these cannot run. `--device cpu` runs the torch
pipeline over gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import peer_cases
import torch
import torch.distributed as dist

import verify
from mok.bench.peers import PEERS
from mok.bench.peers.adapting import Peer
from mok.bench.shapes import Shape
from verify.inputs import materialise

SHARDED = (
    *("x", "topk_experts", "router_weights", "d_out", "w_gate_up", "w_down"),
    *("out", "d_x", "d_router", "d_gate_up", "d_down"),
)


def whole() -> Shape:
    """What all ranks of this process's group have together; T counts the tokens of all."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    small = peer_cases.SMALL
    return replace(small, name="ranks", T=ranks * small.T, E=ranks * small.E)


def _case(peer: Peer) -> verify.Case:
    def setup(device: torch.device) -> Mapping[str, Any]:
        peer_cases.require(peer)
        shape = whole()
        made = {
            name: materialise(spec, name, device=device)
            for name, spec in peer_cases.specs(shape, shape.T).items()
        }
        return {**made, **peer_cases.routing(shape, shape.T), "peer": peer.name}

    return peer_cases.case_of_peer(
        peer,
        "ranks",
        f"{peer.name} between NCCL all-to-alls",
        setup=setup,
        claims=("repeat", "process", "rank", "reference"),
        placement=dict.fromkeys(SHARDED, verify.sharded(0)),
        reference=peer_cases.reference,
        ranks=2,
    )


CASES = tuple(_case(peer) for peer in PEERS if peer.parallel)
