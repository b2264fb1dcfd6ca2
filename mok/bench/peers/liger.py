"""Liger's fused mixture of experts: Triton kernels with a gather in the first GEMM.

Its router gradient is added up with floating-point atomics over tiles of the width; the order of
these additions is whatever the scheduler makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mok.bench.peers import tuning
from mok.bench.peers.adapting import Loaded, Peer

GEMMS = (
    "_fused_up_proj_swiglu_kernel",
    "_fused_down_proj_kernel",
    "_moe_bwd_down_proj_kernel",
    "_moe_bwd_dX_expanded_kernel",
)
WEIGHT_GRADIENTS = ("_moe_bwd_dW2_kernel", "_moe_bwd_dW1_kernel")
GATHERS = ("_token_gather_weighted_sum_kernel",)

# columns, depth, warps, stages; of the 32 that the library tries
_GEMM_TILES = (
    (128, 64, 8, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 4),
    (64, 64, 4, 4),
    (128, 32, 8, 4),
    (128, 32, 4, 4),
)
# rows, columns, warps; of 16
_WEIGHT_TILES = ((128, 128, 8), (128, 128, 4), (64, 128, 4), (128, 64, 4))
# columns, slots; of 40
_GATHER_TILES = ((512, 4), (512, 8), (256, 8))

CANDIDATES = {
    tuning.SHORT: max(len(_GEMM_TILES), len(_WEIGHT_TILES), len(_GATHER_TILES)),
    tuning.FULL: 40,
}
"""Of the longest list by tuning mode; `warming` compiles as many."""


def load() -> Loaded:
    """Imports Liger and, unless full tuning is asked for, shortens its candidate lists."""
    import triton
    from liger_kernel.ops import fused_moe_kernels

    kernels = {
        name: getattr(fused_moe_kernels, name) for name in (*GEMMS, *WEIGHT_GRADIENTS, *GATHERS)
    }
    if tuning.mode() == tuning.SHORT:
        lists = {
            GEMMS: [
                triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
                for n, k, warps, stages in _GEMM_TILES
            ],
            WEIGHT_GRADIENTS: [
                triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 32}, warps, 2)
                for m, n, warps in _WEIGHT_TILES
            ],
            GATHERS: [triton.Config({"BLOCK_H": h, "BLOCK_K": k}, 4, 4) for h, k in _GATHER_TILES],
        }
        for names, configs in lists.items():
            for name in names:
                tuning.shorten(kernels[name], configs)
    return loaded(list(kernels.values()))


def loaded(kernels: Sequence[Any]) -> Loaded:
    """The layer, with the candidates that its kernels have now."""
    from liger_kernel.ops import fused_moe

    return Loaded(fused_moe.LigerFusedMoEFunction.apply, lambda: tuning.picked(kernels))


PEER = Peer(
    name="liger",
    distribution="liger_kernel",
    modules=("liger_kernel", "triton"),
    install="pip install liger-kernel==0.8.5",
    load=load,
    index_dtype=torch.int32,
    score_dtype=torch.float32,
)
