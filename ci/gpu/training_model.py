"""The transformer of ci/gpu/training.py: attention and a mok.MoE in each layer, small enough to
train in seconds.

It exists so that a trained model's bits can be compared at several numbers of ranks. What ranks
replicate is used once for each sequence, as a leaf of its own, so that its gradients come one for
each sequence and can be added in one order, whoever had the sequence; only the MoE layers see all
of a rank's tokens at once. Every operation around them has one order of sums on a device: products
of matrices, and no scatter or embedding. What adds over tokens or weights is done for one sequence
at a time, so that its order cannot depend on how many there are; what stays within an element or a
row is done for all at once, since a step waits for the host that starts its many small operations.

Legend: B sequences of all ranks, b those of this rank, S tokens of each, V words, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mok

LAYERS, HEADS = 2, 4
V, H, I, E, K, I_SHARED = 128, 128, 192, 8, 2, 64  # noqa: E741 - the layer's names
B, S = 8, 33  # the last token of a sequence is only predicted
MARGIN = 1e-6


@dataclass(frozen=True)
class Model:
    """replicated: fp32 leaves by name, equal on all ranks. layers: each with its rank's experts."""

    replicated: Mapping[str, Tensor]
    layers: Sequence[mok.MoE]

    @property
    def parameters(self) -> list[Tensor]:
        """All that an optimizer changes."""
        return [
            *self.replicated.values(),
            *(p for layer in self.layers for p in layer.parameters()),
        ]


def make_model(
    shared: bool, group: dist.ProcessGroup | None, device: torch.device, seed: int = 7
) -> Model:
    """The same model for any number of ranks; each holds its own experts."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[0] ** -0.5

    replicated = {"embedding": weight(V, H) * V**0.5, "head": weight(H, V), "norm": torch.ones(H)}
    for layer in range(LAYERS):
        replicated |= {
            f"{layer}.attention": weight(H, 3 * H),
            f"{layer}.joined": weight(H, H),
            f"{layer}.router": weight(H, E),
            f"{layer}.before attention": torch.ones(H),
            f"{layer}.before experts": torch.ones(H),
        }
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = slice(rank * E // ranks, (rank + 1) * E // ranks)
    layers = []
    for _ in range(LAYERS):
        made = mok.MoE(
            E, H, I, shared_size=I_SHARED if shared else None, group=group, device=device
        )
        for parameter in made.parameters():
            whole = (E, *parameter.shape[1:]) if parameter.dim() == 3 else tuple(parameter.shape)
            value = torch.randn(whole, generator=generator) * whole[-1] ** -0.5
            with torch.no_grad():
                parameter.copy_(value[own] if parameter.dim() == 3 else value)
        layers.append(made)
    moved = {name: value.to(device).requires_grad_() for name, value in replicated.items()}
    return Model(moved, layers)


@functools.cache  # every training of a process has the same
def sequences(step: int) -> Tensor:
    """int64 [B, S] of a step: each word follows from the one before, with a word of noise.

    Not to be written to.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    words = [torch.randint(V, (B,), generator=generator)]
    for _ in range(S - 1):
        last = words[-1]
        words.append((5 * last + 3 + last % 3) % V)
    made = torch.stack(words, 1)
    place = torch.randint(S, (B,), generator=generator)
    made[torch.arange(B), place] = torch.randint(V, (B,), generator=generator)
    return made


def losses_and_gradients(
    model: Model, words: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Of a rank's sequences, int64 [b, S] on the device: losses fp32 [b], each a B-th of its mean;
    gradients of `replicated` fp32 [b, all of them in a row]; and those of each layer's parameters.
    """
    own = [
        {name: value.detach().requires_grad_() for name, value in model.replicated.items()}
        for _ in range(words.shape[0])
    ]
    spelt = F.one_hot(words, V).float()
    x = torch.stack([one @ mine["embedding"] for one, mine in zip(spelt[:, :-1], own, strict=True)])
    for index in range(LAYERS):
        if recompute:
            x = checkpoint(_layer, x, model, own, index, use_reentrant=False)
        else:
            x = _layer(x, model, own, index)
    ends = [row * mine["norm"] @ mine["head"] for row, mine in zip(_normed(x), own, strict=True)]
    told = F.log_softmax(torch.stack(ends), -1) * spelt[:, 1:]
    losses = [-row.sum() / (row.shape[0] * B) for row in told]
    leaves = [value for mine in own for value in mine.values()]
    experts = [list(layer.parameters()) for layer in model.layers]
    found = torch.autograd.grad(losses, [*leaves, *(p for some in experts for p in some)])
    count = len(model.replicated)
    rows = [
        torch.cat([grad.flatten() for grad in found[at * count : (at + 1) * count]])
        for at in range(len(own))
    ]
    rest = iter(found[len(leaves) :])
    return (
        torch.stack([loss.detach() for loss in losses]),
        torch.stack(rows),
        [[next(rest) for _ in some] for some in experts],
    )


def _layer(x: Tensor, model: Model, own: Sequence[Mapping[str, Tensor]], index: int) -> Tensor:
    """Attention, then experts, each beside the rows themselves. x: fp32 [b, S - 1, H]."""
    x = x + _attention(x, own, index)
    name, router = f"{index}.before experts", f"{index}.router"
    normed = [row * mine[name] for row, mine in zip(_normed(x), own, strict=True)]
    routed = [row @ mine[router] for row, mine in zip(normed, own, strict=True)]
    scores = F.softmax(torch.cat(routed), -1)
    chosen = scores.detach().topk(K, -1)[1]
    weights = (scores[:, None, :] * F.one_hot(chosen, E)).sum(-1)  # one term, and zeros
    out = model.layers[index](torch.cat(normed).bfloat16(), chosen, weights).float()
    return x + out.view(x.shape)


def _attention(x: Tensor, own: Sequence[Mapping[str, Tensor]], index: int) -> Tensor:
    """What is added to x, fp32 [b, S - 1, H]."""
    tokens, values, scores = x.shape[1], [], []
    for row, mine in zip(_normed(x), own, strict=True):
        mixed = (row * mine[f"{index}.before attention"]) @ mine[f"{index}.attention"]
        q, k, v = mixed.view(tokens, 3, HEADS, -1).permute(1, 2, 0, 3)
        scores.append(q @ k.transpose(1, 2))
        values.append(v)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    scaled = torch.stack(scores) * (H // HEADS) ** -0.5
    shares = F.softmax(scaled.masked_fill(later, -torch.inf), -1)
    seen = torch.stack([one @ value for one, value in zip(shares, values, strict=True)])
    rows = seen.transpose(1, 2).reshape(x.shape)
    name = f"{index}.joined"
    return torch.stack([row @ mine[name] for row, mine in zip(rows, own, strict=True)])


def _normed(x: Tensor) -> Tensor:
    """Rows of a mean square of 1; each sequence multiplies its own weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MARGIN)


def set_gradients(model: Model, replicated: Tensor, layers: Sequence[Sequence[Tensor]]) -> None:
    """What the optimizer reads. replicated: all of them in a row."""
    sizes = [value.numel() for value in model.replicated.values()]
    for value, grad in zip(model.replicated.values(), replicated.split(sizes), strict=True):
        value.grad = grad.view(value.shape)
    for layer, grads in zip(model.layers, layers, strict=True):
        for parameter, grad in zip(layer.parameters(), grads, strict=True):
            assert isinstance(parameter, nn.Parameter)
            parameter.grad = grad
