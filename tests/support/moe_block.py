"""A block as people build it around the layer: router, top-k, mok.MoE, dropout, residual.

For tests in one process and for the scripts of several. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mok
from mok.exact import same_bits

HIDDEN, WIDTH, SHARED, EXPERTS, SLOTS = 32, 24, 16, 4, 2


class Block(nn.Module):
    """x [T, 32] to [T, 32]; the router is a linear layer in the dtype of its parameters."""

    def __init__(
        self,
        dropout: float = 0.0,
        shared: int | None = SHARED,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.moe = mok.MoE(EXPERTS, HIDDEN, WIDTH, shared_size=shared, group=group)
        self.dropout = nn.Dropout(dropout)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and router weights of every token."""
        scores = F.softmax(self.router(x.float()), dim=-1)
        weights, experts = torch.topk(scores, SLOTS, dim=-1)
        return experts, weights

    def forward(self, x: Tensor) -> Tensor:
        """x + dropout(moe(x))."""
        experts, weights = self.route(x)
        return x + self.dropout(self.moe(x, experts, weights))


def batch(tokens: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values [tokens, 32] that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype)


def step(
    call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, d_out: Tensor
) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward, which starts from seed 5."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    out = call(x)
    out.backward(d_out)
    assert x.grad is not None
    return {"out": out.detach(), "d_x": x.grad, **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient; a missing one is an error."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
    return found


def different(expected: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that are not the same bit for bit."""
    assert set(expected) == set(got)
    return [name for name in expected if not same_bits(expected[name], got[name])]
