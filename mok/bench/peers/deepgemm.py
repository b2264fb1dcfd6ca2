"""DeepGEMM's bf16 grouped GEMMs, m-grouped and contiguous: GEMM-only rows, no layer.

Rows of an expert are padded to the library's alignment, with -1 as the group of padding. Its time
contains the padding, its FLOPs do not. It is compiled by nvcc at the first call of a shape, found
through CUDA_HOME.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mok.bench.contenders import Inputs, Missing
from mok.bench.peers.adapting import absence, check_routing, version_of
from mok.bench.peers.gemms import GroupedGemm

NAME = "deepgemm"
DISTRIBUTION = "sgl_deep_gemm"
MODULES = ("deep_gemm", "tvm_ffi")
INSTALL = "pip install sgl-deep-gemm==0.1.5.post1 (later ones need a newer torch)"


@dataclass(frozen=True)
class Padded:
    """groups: int32 [M], the expert of each row, -1 for padding. rows: int64 [R], where the routed
    rows lie among them, in expert order."""

    groups: Tensor
    rows: Tensor


def pad(counts: list[int], alignment: int, device: torch.device | str = "cpu") -> Padded:
    """The layout for `counts[e]` rows of expert e, each expert padded to a multiple of alignment;
    an expert without rows takes none."""
    groups: list[int] = []
    rows: list[int] = []
    for expert, count in enumerate(counts):
        rows += range(len(groups), len(groups) + count)
        groups += [expert] * count + [-1] * (-count % alignment)
    return Padded(
        torch.tensor(groups, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True)
class Products:
    """Operands of both products. x [M, H] and h [M, I] hold zeros in rows of padding."""

    padded: Padded
    x: Tensor
    h: Tensor
    gate_up: Tensor
    down: Tensor
    wide: Tensor
    narrow: Tensor

    def up(self) -> Tensor:
        """x gate_up^T into a buffer [M, 2I]."""
        return _multiply(self.x, self.gate_up, self.wide, self.padded.groups)

    def down_product(self) -> Tensor:
        """h down^T into a buffer [M, H]."""
        return _multiply(self.h, self.down, self.narrow, self.padded.groups)


def _multiply(left: Tensor, weights: Tensor, out: Tensor, groups: Tensor) -> Tensor:
    import deep_gemm

    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(left, weights, out, groups)
    return out


def products(inputs: Inputs, x_rows: Tensor, h_rows: Tensor) -> Products:
    """Pads the given rows (x_rows [T K, H], h_rows [T K, I], in expert order) and makes buffers."""
    import deep_gemm

    experts, width, hidden = inputs.w_gate_up.shape
    check_routing(NAME, inputs.topk_experts, experts)
    counts = torch.bincount(inputs.topk_experts.reshape(-1), minlength=experts).tolist()
    device = inputs.x.device
    padded = pad(counts, deep_gemm.get_mk_alignment_for_contiguous_layout(), device)
    new = partial(torch.zeros, dtype=torch.bfloat16, device=device)
    total = padded.groups.numel()
    x, h = new(total, hidden), new(total, width // 2)
    x[padded.rows], h[padded.rows] = x_rows, h_rows
    wide, narrow = new(total, width), new(total, hidden)
    return Products(padded, x, h, inputs.w_gate_up, inputs.w_down, wide, narrow)


def missing() -> Missing | None:
    """Why it cannot be loaded here, or None."""
    why = absence(MODULES, DISTRIBUTION, INSTALL)
    return Missing(NAME, why) if why else None


def grouped_gemms(inputs: Inputs) -> list[GroupedGemm]:
    """Up and down products on random rows with the routing and weights of `inputs`. One rank."""
    _, width, hidden = inputs.w_gate_up.shape
    routes = inputs.topk_experts.numel()
    random = partial(torch.randn, dtype=torch.bfloat16, device=inputs.x.device)
    made = products(inputs, random(routes, hidden), random(routes, width // 2))
    padding = made.padded.groups.numel() / routes - 1
    version = version_of(DISTRIBUTION)
    wide = 2 * routes * hidden * width
    return [
        GroupedGemm(f"{NAME} up", version, made.up, wide, padding),
        GroupedGemm(f"{NAME} down", version, made.down_product, wide // 2, padding),
    ]
