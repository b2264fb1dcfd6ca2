"""SwiGLU forward and backward, and the router gradient's reduction tree, element by element.

Why by hand: torch's sigmoid and silu give different bits at different positions and strides; exp
and the division do not (measured). Every operation below is one fp32 operation, rounded on its
own; no fused multiply-add is used. Refuses any reordering: the order written is the contract.

Legend: R rows, I intermediate width.

silu(g)   = g / (1 + exp(-g))
sigmoid   s = 1 / (1 + exp(-g))
silu'(g)  = s * (1 + g * (1 - s))
clamped   g_c = min(g, limit), u_c = min(max(u, -limit), limit); a gradient passes where
          g <= limit and -limit <= u <= limit, equality included (as torch.clamp does).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUTER_BLOCK = 64
_LANES = 4


def swiglu(gate_RI: torch.Tensor, up_RI: torch.Tensor, limit: float | None) -> torch.Tensor:
    """h = bf16(silu(g) * u) from fp32 g and u; returns bf16 [R, I]."""
    if limit is not None:
        gate_RI = gate_RI.clamp(max=limit)
        up_RI = up_RI.clamp(-limit, limit)
    # In place on a buffer of its own: the same operations, fewer allocations.
    work_RI = torch.neg(gate_RI).exp_().add_(1.0)
    torch.div(gate_RI, work_RI, out=work_RI)
    return work_RI.mul_(up_RI).to(torch.bfloat16)


@dataclass(frozen=True)
class SwigluGradients:
    """What one tile of the backward pass hands on.

    d_gate, d_up: bf16 [R, I]. weighted_hidden: bf16(w_k * h') [R, I]. d_router: fp32 [R].
    """

    d_gate: torch.Tensor
    d_up: torch.Tensor
    weighted_hidden: torch.Tensor
    d_router: torch.Tensor


def swiglu_backward(
    product_RI: torch.Tensor,
    gate_RI: torch.Tensor,
    up_RI: torch.Tensor,
    weight_R: torch.Tensor,
    limit: float | None,
) -> SwigluGradients:
    """Gradients of one slot from d_out w_down (fp32) and the bf16-rounded g and u.

    product_RI: fp32 d_out w_down. gate_RI, up_RI: g and u rounded to bf16, any float dtype.
    weight_R: fp32 router weight of each row. h' stays in fp32: it is rounded only as bf16(w h').
    dh = w * product; dg = (dh * u_c) * silu'(g_c); du = dh * silu(g_c).
    """
    gate_RI, up_RI = gate_RI.float(), up_RI.float()
    clamped_gate, clamped_up = gate_RI, up_RI
    if limit is not None:
        clamped_gate = gate_RI.clamp(max=limit)
        clamped_up = up_RI.clamp(-limit, limit)
    denominator_RI = torch.exp(-clamped_gate) + 1.0
    silu_RI = clamped_gate / denominator_RI
    sigmoid_RI = 1.0 / denominator_RI
    slope_RI = sigmoid_RI * (clamped_gate * (1.0 - sigmoid_RI) + 1.0)
    hidden_RI = silu_RI * clamped_up
    d_hidden_RI = weight_R[:, None] * product_RI
    d_gate_RI = (d_hidden_RI * clamped_up) * slope_RI
    d_up_RI = d_hidden_RI * silu_RI
    if limit is not None:
        d_gate_RI = torch.where(gate_RI > limit, 0.0, d_gate_RI)
        d_up_RI = torch.where((up_RI > limit) | (up_RI < -limit), 0.0, d_up_RI)
    return SwigluGradients(
        d_gate=d_gate_RI.to(torch.bfloat16),
        d_up=d_up_RI.to(torch.bfloat16),
        weighted_hidden=(weight_R[:, None] * hidden_RI).to(torch.bfloat16),
        d_router=router_dot(product_RI, hidden_RI),
    )


def router_dot(product_RI: torch.Tensor, hidden_RI: torch.Tensor) -> torch.Tensor:
    """<product, hidden> of each row by a fixed tree, fp32 [R]; independent of any tile width.

    Columns go in blocks of 64, the last one filled with zeros. Lane q of four adds, ascending and
    from zero, the 16 columns 8 j + 2 q and 8 j + 2 q + 1 (j = 0 .. 7): those that lane q of a quad
    holds in a wgmma accumulator. Then lanes are added pairwise, xor 1 before xor 2, and blocks
    ascending from zero. A product is rounded before it is added (no FMA).
    """
    rows, width = product_RI.shape
    blocks = -(-width // ROUTER_BLOCK)
    terms = torch.zeros(
        (rows, blocks * ROUTER_BLOCK), dtype=torch.float32, device=product_RI.device
    )
    torch.mul(product_RI, hidden_RI, out=terms[:, :width])
    terms = terms.view(rows, blocks, ROUTER_BLOCK // 8, _LANES, 2)
    lanes = torch.zeros((rows, blocks, _LANES), dtype=torch.float32, device=terms.device)
    for group in range(ROUTER_BLOCK // 8):
        for column in range(2):
            lanes = lanes + terms[:, :, group, :, column]
    pairs = lanes[..., 0::2] + lanes[..., 1::2]
    sums = pairs[..., 0] + pairs[..., 1]
    total = torch.zeros(rows, dtype=torch.float32, device=terms.device)
    for block in range(blocks):
        total = total + sums[:, block]
    return total
