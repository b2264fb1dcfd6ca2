"""Who sends which row where: the schedule, the exchange, and the combine in slot order.

The order in which an expert sees its rows is canonical: by global token index (the ranks' tokens
in rank order), then slot. Each rank sorts its own routes by (expert, token, slot) and sends them
with all_to_all_single and unequal splits; the receiver then groups what came by expert, sources in
rank order. No rank needs another rank's expert ids, only the row counts. Refuses all_gather of
unequal sizes (gloo raises) and any reduction whose order is not written here.

On a CPU nothing here may start torch's OpenMP threads from the caller's thread: they spin for some
8 ms afterwards and take a core from the experts (measured: a fifth of the forward). Advanced
indexing and repeat_interleave do so whatever the size; index_select and scatter_ of a schedule's
size do not.

Legend: T local tokens, K slots, S sent routes, R received rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mok.tiles import run_rows

UNUSED = -1


@dataclass(frozen=True)
class Schedule:
    """One routing, from this rank's point of view. All tensors are int64 on the rows' device.

    topk_TK: cleaned expert ids, -1 where a slot is unused.
    token_S, slot_S: origin of each sent route, in send order (expert, token, slot).
    position_TK: index into the S sent routes, -1 where unused.
    send_splits, receive_splits: rows per peer.
    arrival_R: index of canonical row r among the received rows.
    rows_E: rows of each local expert.
    """

    num_experts: int
    topk_TK: torch.Tensor
    token_S: torch.Tensor
    slot_S: torch.Tensor
    position_TK: torch.Tensor
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    arrival_R: torch.Tensor
    rows_E: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows that this rank's experts process."""
        return sum(self.rows_E)


@dataclass(frozen=True)
class SendPlan:
    """The part of a schedule that a rank knows without its peers. counts_PE: [ranks, E_local]."""

    token_S: torch.Tensor
    slot_S: torch.Tensor
    position_TK: torch.Tensor
    counts_PE: torch.Tensor


def clean_topk(topk_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with every bad one replaced by -1, and the mask of the bad ones (bool [T, K]).

    Bad: below -1, num_experts or above, or equal to an earlier slot's id of the same token.
    """
    bad_TK = (topk_TK < UNUSED) | (topk_TK >= num_experts)
    used_TK = topk_TK >= 0
    for distance in range(1, topk_TK.shape[1]):
        same = topk_TK[:, distance:] == topk_TK[:, :-distance]
        bad_TK[:, distance:] |= same & used_TK[:, distance:]
    return torch.where(bad_TK, UNUSED, topk_TK), bad_TK


def plan_sends(topk_TK: torch.Tensor, num_local_experts: int, num_ranks: int) -> SendPlan:
    """Sort this rank's routes by (expert, token, slot); a pure function of cleaned ids."""
    slots = topk_TK.shape[1]
    flat = topk_TK.reshape(-1)
    # UNUSED is the lowest id, so the unused routes come first and are cut off.
    counts = torch.bincount(flat - UNUSED, minlength=1 + num_ranks * num_local_experts)
    route_S = torch.sort(flat, stable=True).indices[int(counts[0]) :]
    position = torch.full_like(flat, UNUSED)
    position.scatter_(0, route_S, torch.arange(route_S.numel(), device=flat.device))
    token_S = torch.div(route_S, slots, rounding_mode="floor")
    return SendPlan(
        token_S=token_S,
        slot_S=route_S - token_S * slots,
        position_TK=position.view_as(topk_TK),
        counts_PE=counts[1:].view(num_ranks, num_local_experts),
    )


def arrival_order(counts_PE: torch.Tensor) -> torch.Tensor:
    """Index of each canonical row among rows that came by (source, expert, token, slot)."""
    sources, experts = counts_PE.shape
    ends = counts_PE.reshape(-1).cumsum(0)
    rows = int(ends[-1])
    if sources == 1:
        return torch.arange(rows, device=counts_PE.device)
    # Each row's block (source, expert): how many blocks have ended at or before it.
    ended = torch.zeros(rows + 1, dtype=torch.int64, device=counts_PE.device)
    ended.index_add_(0, ends, torch.ones_like(ends))
    return torch.sort(ended[:rows].cumsum(0) % experts, stable=True).indices


def make_schedule(
    topk_TK: torch.Tensor, num_local_experts: int, group: dist.ProcessGroup | None
) -> Schedule:
    """The schedule of cleaned ids. Collective over the group; reads the counts on the host."""
    num_ranks = 1 if group is None else dist.get_world_size(group)
    plan = plan_sends(topk_TK, num_local_experts, num_ranks)
    received_PE = plan.counts_PE
    if group is not None:
        received_PE = torch.empty_like(plan.counts_PE)
        dist.all_to_all_single(received_PE, plan.counts_PE.contiguous(), group=group)
    return Schedule(
        num_experts=num_local_experts * num_ranks,
        topk_TK=topk_TK,
        token_S=plan.token_S,
        slot_S=plan.slot_S,
        position_TK=plan.position_TK,
        send_splits=tuple(plan.counts_PE.sum(dim=1).tolist()),
        receive_splits=tuple(received_PE.sum(dim=1).tolist()),
        arrival_R=arrival_order(received_PE),
        rows_E=tuple(received_PE.sum(dim=0).tolist()),
    )


def _exchange(
    rows: torch.Tensor,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def dispatch(
    values_S: torch.Tensor, schedule: Schedule, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Values of the sent routes, [S, ...], to their experts: canonical rows, [R, ...]."""
    if group is None:  # a rank's own send order is canonical
        return values_S
    received = _exchange(values_S, schedule.send_splits, schedule.receive_splits, group)
    return received.index_select(0, schedule.arrival_R)


def give_back(
    values_R: torch.Tensor, schedule: Schedule, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The inverse of dispatch: canonical rows, [R, ...], to the routes' owners, [S, ...]."""
    if group is None:
        return values_R
    arrived = torch.empty_like(values_R)
    arrived.index_copy_(0, schedule.arrival_R, values_R)
    return _exchange(arrived, schedule.receive_splits, schedule.send_splits, group)


def combine(
    start_TH: torch.Tensor | None,
    values_SH: torch.Tensor,
    schedule: Schedule,
    router_weights_TK: torch.Tensor | None,
) -> torch.Tensor:
    """bf16(start + sum over k of w_k * values_k) in fp32, slots ascending, bf16 [T, H].

    start None is +0. Without router weights the values are added as they are. Multiply and add are
    rounded separately (no FMA); an unused slot adds nothing, not even a zero.
    """
    tokens, slots = schedule.topk_TK.shape
    shape = (tokens, values_SH.shape[1])
    out_TH = torch.empty(shape, dtype=torch.bfloat16, device=values_SH.device)

    def work(first: int, last: int) -> None:
        if start_TH is None:
            total = torch.zeros((last - first, shape[1]), device=out_TH.device, dtype=torch.float32)
        else:
            total = start_TH[first:last].to(torch.float32, copy=True)
        for slot in range(slots):
            position = schedule.position_TK[first:last, slot]
            weight = (
                None if router_weights_TK is None else router_weights_TK[first:last, slot, None]
            )
            _add_slot(total, values_SH, position, weight, tokens * slots == values_SH.shape[0])
        out_TH[first:last].copy_(total)

    run_rows(tokens, work, out_TH.device)
    return out_TH


def _add_slot(
    total: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    weight: torch.Tensor | None,
    all_used: bool,
) -> None:
    if all_used:
        term = values.index_select(0, position).float()
        total.add_(term if weight is None else term.mul_(weight))
        return
    token = torch.nonzero(position >= 0).squeeze(1)
    term = values.index_select(0, position[token]).float()
    if weight is not None:
        term.mul_(weight[token])
    total[token] = total[token] + term


def rows_to_send(values_TH: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The tokens' rows [T, H] in send order, [S, H]."""
    shape = (schedule.token_S.numel(), values_TH.shape[1])
    sent = torch.empty(shape, dtype=values_TH.dtype, device=values_TH.device)

    def work(first: int, last: int) -> None:
        torch.index_select(values_TH, 0, schedule.token_S[first:last], out=sent[first:last])

    run_rows(shape[0], work, sent.device)
    return sent
