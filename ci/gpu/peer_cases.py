"""Cases for `verify`: are other people's mixture-of-experts layers bit-deterministic?

    verify run ci/gpu/peer_cases.py --device cuda --runs 20 --report report
    verify run 'ci/gpu/peer_cases.py::peers/liger/small' --device cuda --runs 20

Each executes a peer's forward and backward as `mok bench layer` times them. `small` has T=512,
E=8, H=1024, I=512, K=2 and is also held against float64, with the spread of a pipeline that rounds
everything to bf16 as its budget (mok.bench.peers.float64): peers promise none. `qwen3-30b` is
whole. Every process autotunes anew, as it would on another machine; what tuning may do to bits is
asked once more, without luck, by `sonicmoe/tiles`, which takes one candidate of a tuner after the
other. A peer that is not installed is UNVERIFIED with the reason. Of several ranks:
peer_rank_cases.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import verify
from mok.bench.contenders import Inputs, Missing
from mok.bench.peers import PEERS, deepgemm, float64
from mok.bench.peers.adapting import Peer, contender_of, prepare_peer, version_of
from mok.bench.shapes import SHAPES, Shape
from verify.builtin.layer import weights

BY_NAME = {peer.name: peer for peer in PEERS}
SMALL, BIG = SHAPES["small"], SHAPES["qwen3-30b"]
EIGHT_SLOTS = Shape("eight-slots", 512, 16, 1024, 512, 8)
SMALL_CLAIMS = ("repeat", "process", "memory", "history", "contention", "reference")


def require(peer: Peer) -> None:
    """Raises when the peer is not installed; says so here, before its first execution."""
    found = contender_of(peer)
    if isinstance(found, Missing):
        raise RuntimeError(f"{found.name} is left out: {found.reason}")
    # QuACK would take what an earlier process chose from its folder; Triton chooses anew anyway
    os.environ.setdefault("QUACK_FORCE_CACHE_UPDATE", "1")


def routing(shape: Shape, tokens: int) -> dict[str, Tensor]:
    """Top-K of random scores, softmax over them, representable in bf16; the same everywhere."""
    scores = verify.generate("router.scores", (tokens, shape.E), torch.float32)
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, : shape.K].contiguous()
    best = torch.gather(scores, 1, order).double().softmax(1)
    return {"topk_experts": order, "router_weights": best.bfloat16().float()}


def specs(shape: Shape, tokens: int) -> dict[str, Any]:
    """Inputs with the same bits on every machine."""
    return {
        "x": verify.normal(tokens, shape.H, dtype=torch.bfloat16),
        "w_gate_up": weights(shape.E, 2 * shape.I, shape.H),
        "w_down": weights(shape.E, shape.H, shape.I),
        "d_out": verify.normal(tokens, shape.H, dtype=torch.bfloat16),
    }


def _generated(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Inputs of the device's own generator: quick at any size, equal on one kind of device."""
    generator = torch.Generator(device).manual_seed(1234)
    random = partial(torch.randn, device=device, generator=generator)
    normal = partial(random, dtype=torch.bfloat16)
    scores, chosen = random(shape.T, shape.E).topk(shape.K, dim=1)
    return {
        "x": normal(shape.T, shape.H),
        "w_gate_up": normal(shape.E, 2 * shape.I, shape.H) * shape.H**-0.5,
        "w_down": normal(shape.E, shape.H, shape.I) * shape.I**-0.5,
        "topk_experts": chosen,
        "router_weights": scores.softmax(1).bfloat16().float(),
        "d_out": normal(shape.T, shape.H),
    }


def layer(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    d_out: Tensor,
    peer: str,
    group: Any = None,
) -> dict[str, Tensor]:
    """Output and gradients of a peer for the given upstream gradient, in our layout."""
    inputs = Inputs(
        x.detach(),
        w_gate_up.detach(),
        w_down.detach(),
        topk_experts,
        router_weights.detach(),
        d_out.detach(),
        group,
    )
    prepared = prepare_peer(BY_NAME[peer], inputs)
    out = prepared.forward()
    return {"out": out.detach(), **prepared.arrange(prepared.backward(out, False))}


def reference(
    inputs: Mapping[str, Tensor], _upstream: Mapping[str, Tensor], _view: Any
) -> dict[str, verify.Reference]:
    """Float64 with a bf16 pipeline's spread as the budget, on the CPU whatever runs the layer."""
    names = ("x", "w_gate_up", "w_down", "topk_experts", "router_weights", "d_out")
    expected = float64.layer(*(inputs[name].detach().cpu() for name in names))
    found = {}
    for name, spread in expected.items():
        allowed = float64.budget(spread)
        # where a peer rounds is not known, so any place inside the budget is allowed
        found[name] = verify.Reference(spread.v, allowed, spread.v, allowed)
    return found


def case_of_peer(peer: Peer, kind: str, description: str, **options: Any) -> verify.Case:
    """A case whose description begins with the peer's name, and gets its version after that: what
    was checked is then known from the result alone (mok.bench.determinism reads it)."""
    version = version_of(peer.distribution)
    if version:
        description = f"{peer.name} {version}{description.removeprefix(peer.name)}"
    device = "" if "cpu" in peer.devices else "cuda"
    name = f"peers/{peer.name}/{kind}"
    given = {"execute": layer, "device": device, "description": description, **options}
    return verify.Case(name=name, **given)


def _small(peer: Peer) -> verify.Case:
    def setup() -> Mapping[str, Any]:
        require(peer)
        return {**routing(SMALL, SMALL.T), "peer": peer.name}

    return case_of_peer(
        peer,
        "small",
        f"{peer.name}, T={SMALL.T} E={SMALL.E} H={SMALL.H} I={SMALL.I} K={SMALL.K}",
        inputs=specs(SMALL, SMALL.T),
        setup=setup,
        claims=SMALL_CLAIMS,
        reference=reference,
    )


def _big(peer: Peer) -> verify.Case:
    def setup(device: torch.device) -> Mapping[str, Any]:
        require(peer)
        return {**_generated(BIG, device), "peer": peer.name}

    return case_of_peer(
        peer,
        BIG.name,
        f"{peer.name}, T={BIG.T} E={BIG.E} H={BIG.H} I={BIG.I} K={BIG.K}",
        setup=setup,
        claims=("repeat", "process"),
        device="cuda",
    )


@contextmanager
def _only(tuner: Any, wanted: Callable[[Any], bool]) -> Iterator[None]:
    """Lets an autotuner choose one candidate; without a choice it does not time anything."""
    whole = tuner.configs
    chosen = [config for config in whole if wanted(config)]
    if not chosen:
        raise RuntimeError("the tuner has no such candidate; its package has another version")
    tuner.configs = chosen[:1]
    try:
        yield
    finally:
        tuner.configs = whole


def sonic_tiles(
    gather_slots: int | None = None, router_columns: int | None = None, **arguments: Any
) -> dict[str, Tensor]:
    """SonicMoE with one candidate of its gather-sum, or of the GEMM that makes d_router."""
    prepare_peer(BY_NAME["sonicmoe"], _inputs_of(arguments))  # it imports, and shortens lists
    import quack.gemm_interface as gemms
    from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel

    def of_columns(config: Any) -> bool:
        tile = config.kwargs["config"]
        size = (tile.tile_m, tile.tile_n, tile.cluster_m, tile.device_capacity)
        return size == (128, router_columns, 2, 9) and not tile.swap_ab

    gather: Any = nullcontext()
    router: Any = nullcontext()
    if gather_slots is not None:
        gather = _only(token_gather_sum_kernel, lambda c: c.kwargs["BLOCK_K"] == gather_slots)
    if router_columns is not None:
        router = _only(gemms.gemm_dgated_tuned, of_columns)
    with gather, router:
        return layer(**arguments)


def _inputs_of(arguments: Mapping[str, Any]) -> Inputs:
    names = ("x", "w_gate_up", "w_down", "topk_experts", "router_weights", "d_out")
    return Inputs(*(arguments[name].detach() for name in names))


def _tiles() -> verify.Case:
    peer = BY_NAME["sonicmoe"]

    def setup() -> Mapping[str, Any]:
        require(peer)
        return {**routing(EIGHT_SLOTS, EIGHT_SLOTS.T), "peer": peer.name}

    return case_of_peer(
        peer,
        "tiles",
        "sonicmoe with other candidates of its autotuners; K=8",
        execute=sonic_tiles,
        inputs=specs(EIGHT_SLOTS, EIGHT_SLOTS.T),
        setup=setup,
        claims=("repeat", "vary"),
        vary={"gather_slots": (2, 4, 8), "router_columns": (128, 192, 256)},
    )


def deepgemm_products(
    x_rows: Tensor, h_rows: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_experts: Tensor
) -> dict[str, Tensor]:
    """Both products of DeepGEMM on the routed rows; rows of padding are left out."""
    unused = x_rows.new_empty(0)
    inputs = Inputs(x_rows, w_gate_up.detach(), w_down.detach(), topk_experts, unused, unused)
    made = deepgemm.products(inputs, x_rows, h_rows)
    return {"up": made.up()[made.padded.rows], "down": made.down_product()[made.padded.rows]}


def _deepgemm() -> verify.Case:
    def setup() -> Mapping[str, Any]:
        missing = deepgemm.missing()
        if missing is not None:
            raise RuntimeError(f"{missing.name} is left out: {missing.reason}")
        return {"topk_experts": routing(SMALL, SMALL.T)["topk_experts"]}

    routes = SMALL.T * SMALL.K
    return verify.Case(
        name="peers/deepgemm/small",
        description="DeepGEMM's grouped GEMMs, up and down, without a layer",
        execute=deepgemm_products,
        inputs={
            "x_rows": verify.normal(routes, SMALL.H, dtype=torch.bfloat16),
            "h_rows": verify.normal(routes, SMALL.I, dtype=torch.bfloat16),
            "w_gate_up": weights(SMALL.E, 2 * SMALL.I, SMALL.H),
            "w_down": weights(SMALL.E, SMALL.H, SMALL.I),
        },
        setup=setup,
        claims=("repeat", "process", "memory", "history", "contention"),
        device="cuda",
    )


SMALL_CASES = (*(_small(peer) for peer in PEERS), _deepgemm())
BIG_CASES = tuple(_big(peer) for peer in PEERS)
TILE_CASES = (_tiles(),)
