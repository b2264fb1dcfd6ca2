"""SonicMoE: CuTe-DSL grouped GEMMs of QuACK with fused gathers, activations and router gradient.

QuACK picks a tile for each GEMM and Triton one for the gather-sum, both by timing, and tiles decide
bits: a process that times differently computes differently. QuACK keeps its choices on disk (in
QUACK_CACHE_DIR), Triton does not. QUACK_FORCE_CACHE_UPDATE=1 makes every process choose anew, as on
another machine. Its gate and up rows alternate.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mok.bench.peers import tuning
from mok.bench.peers.adapting import Loaded, Peer

_GEMM_TUNERS = ("gemm_gated_tuned", "gemm_dgated_tuned", "gemm_tuned")
_WIDE = (1024, 2048, 4096)
_SLOTS = (2, 4, 8)


def _choices(gather_sum: object) -> Mapping[str, str]:
    import quack.gemm_interface as gemms

    found = tuning.picked([gather_sum])
    for name in _GEMM_TUNERS:
        for key, chosen in getattr(gemms, name).cache.items():
            tile = chosen.kwargs["config"]
            sizes = " ".join(part for part in key if "Size" in part)
            found[f"{name} {sizes}"] = (
                f"{tile.tile_m}x{tile.tile_n} {'pingpong' if tile.pingpong else 'cooperative'} "
                f"cluster {tile.cluster_m}x{tile.cluster_n}"
            )
    return found


def load() -> Loaded:
    """Imports SonicMoE and makes a CUDA context first, which QuACK's occupancy queries need."""
    torch.zeros(1, device="cuda")
    from quack.cute_dsl_utils import get_max_active_clusters
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel

    for size in (1, 2):  # both are asked for later, under autotuning, where an error is swallowed
        get_max_active_clusters(size)
    if tuning.mode() == tuning.SHORT:
        short = [
            config
            for config in token_gather_sum_kernel.configs
            if config.kwargs["BLOCK_H"] in _WIDE and config.kwargs["BLOCK_K"] in _SLOTS
        ]
        tuning.shorten(token_gather_sum_kernel, short)
    swiglu = ActivationType.SWIGLU

    def layer(
        x: Tensor, gate_up: Tensor, down: Tensor, topk_experts: Tensor, router: Tensor
    ) -> Tensor:
        (tokens, slots), experts = topk_experts.shape, gate_up.shape[0]
        routes = tokens * slots

        def integers(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=x.device)

        counts, offsets = integers(experts), integers(experts + 1)
        gather, scatter, reverse = integers(routes), integers(routes), integers(routes)
        functional.TC_topk_router_metadata_triton(
            topk_experts, experts, counts, offsets, gather, scatter, reverse
        )
        hidden, before = functional._UpProjection.apply(
            x,
            gate_up.permute(1, 2, 0),
            None,
            offsets,
            routes,
            slots,
            gather,
            scatter,
            reverse,
            None,
            False,
            swiglu,
            False,
            False,
        )
        out: Tensor = functional._DownProjection.apply(
            hidden,
            before,
            down.permute(1, 2, 0),
            None,
            router,
            offsets,
            tokens,
            slots,
            gather,
            scatter,
            reverse,
            None,
            False,
            swiglu,
        )
        return out

    return Loaded(layer, lambda: _choices(token_gather_sum_kernel))


PEER = Peer(
    name="sonicmoe",
    distribution="sonic_moe",
    modules=("sonicmoe", "quack", "cutlass", "tvm_ffi", "triton"),
    install="see mok.bench.peers: its dependencies are pinned by hand",
    load=load,
    index_dtype=torch.int32,
    score_dtype=torch.float32,
    interleaved=True,
    parallel=True,
)
