"""The portable expert MLP: forward, recompute and backward over rows grouped by expert.

Torch operations only. Rows arrive in canonical order (mok.dispatch), so everything here is local
to one rank and to one expert. All rounding places are those of the numerics contract; GEMMs run on
fixed tiles (mok.tiles). The shared expert is the same code with one expert that owns all rows.

Legend: R rows of all local experts, E local experts, H hidden size, I intermediate width.

Order of the accumulations that the contract asks to state:
* g and u come from ONE fp32 GEMM over [w_gate ; w_up]; each has its own columns and order along K.
* dx_k is ONE fp32 GEMM with K = 2 I over [dg | du] and [w_gate ; w_up], so the gate part comes
  before the up part inside the same accumulator, which starts from zero.
* A weight gradient is one fp32 GEMM per expert and matrix, K = its rows padded with zeros to a
  multiple of 64; it starts from zero and is not split, whatever the minibatch or the EP degree.
* Inside a GEMM the order along K is BLAS's, fixed by (64, N, K) alone; BLAS uses FMA. MKL takes the
  tiles of a strip in one batched call, which changes no bit (mok.tiles).
Promise: on a CPU the bits of a row depend on that row and the weights only. Other devices run the
same tiles one after another and promise what is measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mok.activations import swiglu, swiglu_backward
from mok.stages import Tell
from mok.tiles import Piece, multiply, padded, run_pieces, stacked, strips, widened


@dataclass(frozen=True)
class ExpertWeights:
    """gate, up: bf16 [E, I, H]; down: bf16 [E, H, I]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class SavedRows:
    """g and u rounded to bf16, [R, I] each: all that backward reads of the forward pass."""

    gate: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True)
class RowGradients:
    """d_x: bf16 [R, H] per slot. d_router: fp32 [R]. Weight gradients: fp32, like the weights."""

    d_x: torch.Tensor
    d_router: torch.Tensor
    d_gate: torch.Tensor | None
    d_up: torch.Tensor | None
    d_down: torch.Tensor | None


def _minibatches(
    rows_E: Sequence[int], minibatch: int, work: Callable[[int, int, int], None]
) -> list[Piece]:
    """One piece per (expert, minibatch), longest first so that threads end together.

    Borders are counted from the expert's own row 0.
    """
    pieces: list[Piece] = []
    heights: list[int] = []
    base = 0
    for expert, rows in enumerate(rows_E):
        for start in range(0, rows, minibatch):
            stop = min(start + minibatch, rows)
            pieces.append(partial(work, expert, base + start, base + stop))
            heights.append(stop - start)
        base += rows
    order = sorted(range(len(pieces)), key=heights.__getitem__, reverse=True)
    return [pieces[place] for place in order]


def _saved_rows(x_RH: torch.Tensor, width: int) -> SavedRows:
    """Room for g and u; the pieces of _minibatches write every row, so nothing is read before."""
    shape = (x_RH.shape[0], width)
    return SavedRows(
        gate=torch.empty(shape, dtype=torch.bfloat16, device=x_RH.device),
        up=torch.empty(shape, dtype=torch.bfloat16, device=x_RH.device),
    )


def expert_forward(
    x_RH: torch.Tensor,
    rows_E: Sequence[int],
    weights: ExpertWeights,
    limit: float | None,
    minibatch: int,
    tell: Tell | None = None,
) -> tuple[torch.Tensor, SavedRows]:
    """y = bf16(h w_down^T), bf16 [R, H], and the rows that backward needs.

    tell: gets gate, up and hidden (mok.stages).
    """
    width = weights.gate.shape[1]
    y_RH = torch.empty_like(x_RH)
    saved = _saved_rows(x_RH, width)
    told_hidden = None if tell is None else torch.empty_like(saved.gate)

    def work(expert: int, start: int, stop: int) -> None:
        gate_up_H2I = stacked(weights.gate[expert], weights.up[expert]).t()
        down_IH = widened(weights.down[expert]).t()
        for first, last in strips(start, stop):
            rows = last - first
            both_strip = multiply(padded(x_RH[first:last]), gate_up_H2I)
            gate_strip, up_strip = both_strip[:, :width], both_strip[:, width:]
            saved.gate[first:last].copy_(gate_strip[:rows])
            saved.up[first:last].copy_(up_strip[:rows])
            hidden_strip = swiglu(gate_strip, up_strip, limit)
            if told_hidden is not None:
                told_hidden[first:last].copy_(hidden_strip[:rows])
            y_RH[first:last].copy_(multiply(hidden_strip.float(), down_IH)[:rows])

    run_pieces(_minibatches(rows_E, minibatch, work), x_RH.device)
    if tell is not None:
        tell("gate", saved.gate)
        tell("up", saved.up)
        tell("hidden", told_hidden)
    return y_RH, saved


def expert_recompute(
    x_RH: torch.Tensor,
    rows_E: Sequence[int],
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    minibatch: int,
) -> SavedRows:
    """The saved rows of expert_forward, again: the same GEMMs, hence the same bits."""
    width = w_gate.shape[1]
    saved = _saved_rows(x_RH, width)

    def work(expert: int, start: int, stop: int) -> None:
        gate_up_H2I = stacked(w_gate[expert], w_up[expert]).t()
        for first, last in strips(start, stop):
            rows = last - first
            both_strip = multiply(padded(x_RH[first:last]), gate_up_H2I)
            saved.gate[first:last].copy_(both_strip[:rows, :width])
            saved.up[first:last].copy_(both_strip[:rows, width:])

    run_pieces(_minibatches(rows_E, minibatch, work), x_RH.device)
    return saved


def expert_backward(
    d_out_RH: torch.Tensor,
    x_RH: torch.Tensor,
    saved: SavedRows,
    weight_R: torch.Tensor,
    rows_E: Sequence[int],
    weights: ExpertWeights,
    limit: float | None,
    minibatch: int,
    need_weights: bool = True,
    tell: Tell | None = None,
) -> RowGradients:
    """Gradients of the rows of all experts, and of the experts' weights unless not needed.

    d_out_RH: bf16, the upstream gradient of each row's token. weight_R: fp32 router weights.
    tell: gets gradients of gate and up, and weighted_hidden (mok.stages).
    """
    device = x_RH.device
    width = weights.gate.shape[1]
    d_x_RH = torch.empty_like(x_RH)
    d_router_R = torch.empty(x_RH.shape[0], dtype=torch.float32, device=device)
    d_gate_RI, d_up_RI, weighted_RI = (
        torch.empty((x_RH.shape[0], width), dtype=torch.bfloat16, device=device) for _ in range(3)
    )

    def rows_work(expert: int, start: int, stop: int) -> None:
        down_HI = widened(weights.down[expert])
        gate_up_2IH = stacked(weights.gate[expert], weights.up[expert])
        for first, last in strips(start, stop):
            rows = last - first
            gradients = swiglu_backward(
                multiply(padded(d_out_RH[first:last]), down_HI),
                padded(saved.gate[first:last]),
                padded(saved.up[first:last]),
                padded(weight_R[first:last]),
                limit,
            )
            both_strip = torch.cat([gradients.d_gate, gradients.d_up], dim=1).float()
            d_x_RH[first:last].copy_(multiply(both_strip, gate_up_2IH)[:rows])
            d_router_R[first:last].copy_(gradients.d_router[:rows])
            d_gate_RI[first:last].copy_(gradients.d_gate[:rows])
            d_up_RI[first:last].copy_(gradients.d_up[:rows])
            weighted_RI[first:last].copy_(gradients.weighted_hidden[:rows])

    run_pieces(_minibatches(rows_E, minibatch, rows_work), device)
    if tell is not None:
        tell("gate", d_gate_RI)
        tell("up", d_up_RI)
        tell("weighted_hidden", weighted_RI)
    if not need_weights:
        return RowGradients(d_x_RH, d_router_R, None, None, None)
    return RowGradients(
        d_x_RH,
        d_router_R,
        *_weight_gradients(
            [(d_gate_RI, x_RH), (d_up_RI, x_RH), (d_out_RH, weighted_RI)],
            [weights.gate, weights.up, weights.down],
            rows_E,
        ),
    )


def _weight_gradients(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[torch.Tensor],
    rows_E: Sequence[int],
) -> list[torch.Tensor]:
    """left^T right over all rows of each expert, fp32; zero for an expert without rows."""
    results = [torch.empty(w.shape, dtype=torch.float32, device=w.device) for w in weights]

    def work(which: int, expert: int, start: int, stop: int) -> None:
        if start == stop:
            results[which][expert].zero_()
            return
        left, right = operands[which]
        results[which][expert].copy_(padded(left[start:stop]).t() @ padded(right[start:stop]))

    pieces: list[Piece] = []
    for which in range(len(operands)):
        base = 0
        for expert, rows in enumerate(rows_E):
            pieces.append(partial(work, which, expert, base, base + rows))
            base += rows
    run_pieces(pieces, weights[0].device)
    return results
