"""Cases for `verify` on two GPUs: peers between NCCL all-to-alls (mok.bench.peers.nccl).

    verify run ci/gpu/peer_rank_cases.py --device cuda --ranks 2 --runs 20 --report report

Twice the tokens and the experts of `small` in peer_cases.py, in equal parts; the same reference. In
a file of its own, since on one GPU these cannot run. `--device cpu` runs the torch pipeline over
gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import peer_cases

import verify
from mok.bench.peers import PEERS
from mok.bench.peers.adapting import Peer
from mok.bench.shapes import Shape

SMALL = peer_cases.SMALL
WHOLE = Shape("ranks", 2 * SMALL.T, 2 * SMALL.E, SMALL.H, SMALL.I, SMALL.K)
SHARDED = (
    *("x", "topk_experts", "router_weights", "d_out", "w_gate_up", "w_down"),
    *("out", "d_x", "d_router", "d_gate_up", "d_down"),
)


def _case(peer: Peer) -> verify.Case:
    def setup() -> Mapping[str, Any]:
        peer_cases.require(peer)
        return {**peer_cases.routing(WHOLE, WHOLE.T), "peer": peer.name}

    return peer_cases.case_of_peer(
        peer,
        "ranks",
        f"{peer.name} between NCCL all-to-alls",
        inputs=peer_cases.specs(WHOLE, WHOLE.T),
        setup=setup,
        claims=("repeat", "process", "rank", "reference"),
        placement=dict.fromkeys(SHARDED, verify.sharded(0)),
        reference=peer_cases.reference,
        ranks=2,
    )


CASES = tuple(_case(peer) for peer in PEERS if peer.parallel)
