"""All-to-all around a peer that knows one rank only: rows travel, the peer runs, rows come back.

The plain way to expert parallelism, with torch.distributed alone: one row for every route, sent
with its router weight and its expert's number on the receiving rank, in four exchanges a forward
(counts, rows, numbers and weights) and one back. The peer sees tokens with one slot each; the
sender adds a token's K returned rows in slot order. Row counts are read by the host, as splits of
all_to_all_single must be. Refuses unused slots.

Legend: T tokens, K slots, S = T K sent routes, R received rows, E experts of a rank, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.bench.peers.adapting import Layer
from mok.bench.peers.torch_pipeline import GatherTokens, Reorder


@dataclass(frozen=True)
class Routes:
    """What one rank sends, a pure function of its expert ids.

    order [S]: flat routes (token K + slot) by expert, so by rank; equal ones by token. inverse [S]:
    the inverse permutation. local [S]: expert numbers on the receiving rank, in send order. counts
    [ranks]: routes for each rank.
    """

    order: Tensor
    inverse: Tensor
    local: Tensor
    counts: Tensor


def plan(topk_experts: Tensor, experts: int, ranks: int) -> Routes:
    """The routes of int64 [T, K] ids, rank r having experts r E .. (r + 1) E - 1; no host sync."""
    ids, order = torch.sort(topk_experts.reshape(-1), stable=True)
    numbers = torch.arange(order.numel(), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, numbers)
    borders = torch.arange(ranks + 1, device=ids.device, dtype=ids.dtype) * experts
    counts = torch.searchsorted(ids, borders).diff()
    return Routes(order, inverse, ids % experts, counts)


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows with unequal splits; backward sends gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.splits), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def spread(layer: Layer, group: dist.ProcessGroup, experts: int, index_dtype: torch.dtype) -> Layer:
    """A layer over all ranks of the group from one that runs `experts` experts on one rank.

    The result takes global ids (int64 [T, K]) and is collective, forward and backward. A rank that
    receives nothing runs the peer on one row of zeros, since not every peer takes none.
    """
    ranks = dist.get_world_size(group)

    def parallel(
        x: Tensor, gate_up: Tensor, down: Tensor, topk_experts: Tensor, router: Tensor
    ) -> Tensor:
        tokens, slots = topk_experts.shape
        routes = plan(topk_experts, experts, ranks)
        arriving = torch.empty_like(routes.counts)
        dist.all_to_all_single(arriving, routes.counts, group=group)
        sent, received = torch.stack((routes.counts, arriving)).tolist()
        rows = GatherTokens.apply(x, routes.order, routes.inverse, slots)
        weights = Reorder.apply(router.reshape(-1), routes.order, routes.inverse)
        ids = _exchange(routes.local, sent, received, group).to(index_dtype)
        rows = Exchange.apply(rows, sent, received, group)
        weights = Exchange.apply(weights, sent, received, group)
        count = ids.numel()
        if count == 0:
            ids = ids.new_zeros(1)
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
            weights = torch.cat((weights, weights.new_zeros(1)))
        y = layer(rows, gate_up, down, ids.unsqueeze(1), weights.unsqueeze(1))[:count]
        y = Exchange.apply(y, received, sent, group)
        y = Reorder.apply(y, routes.inverse, routes.order)
        return y.view(tokens, slots, -1).sum(1)

    return parallel
