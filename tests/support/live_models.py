"""Small causal models in plain torch that are called as transformers' are, and faults in them.

Every sum is made of single operations in the order of its terms, and a key that must not be seen
adds zero: the bits of a row depend on no layout. `fused=True` computes as usual instead.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, EXPERTS, SLOTS, LONGEST = 29, 16, 2, 4, 2, 64


def summed(terms: Tensor) -> Tensor:
    """Over the last dimension, one term after the other; no kernel chooses an order."""
    total = terms[..., 0]
    for at in range(1, terms.shape[-1]):
        total = total + terms[..., at]
    return total


class Rows(nn.Linear):
    """A product whose rows do not depend on each other; fused: as torch computes it."""

    def __init__(self, given: int, made: int, fused: bool) -> None:
        super().__init__(given, made, bias=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.fused else summed(x[..., None, :] * self.weight)


class Attention(nn.Module):
    """q, k and v of one layer, with a cache of its own: [past, mask of past]."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Rows(WIDTH, WIDTH, fused) for _ in range(4))
        self.fused = fused

    def forward(self, x: Tensor, allowed: Tensor, past: tuple[Tensor, Tensor] | None) -> Any:
        """allowed: bool [B, S, past + S]."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        mixed = self.whole(q, k, v, allowed) if self.fused else self.rows(q, k, v, allowed)
        return self.o(mixed), (k, v)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        parts = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v)]
        mask = allowed | ~allowed.any(dim=-1, keepdim=True)
        out = nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask[:, None])
        return out.transpose(1, 2).flatten(2)

    def rows(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        total, norm = torch.zeros_like(q), torch.zeros_like(q)
        for at in range(k.shape[1]):  # keys in the order of the sequence
            scores = summed((q * k[:, at : at + 1]).unflatten(-1, (HEADS, -1)))
            weight = torch.exp(scores / 3.0) * allowed[:, :, at, None]
            weight = weight.repeat_interleave(WIDTH // HEADS, dim=-1)
            total, norm = total + weight * v[:, at : at + 1], norm + weight
        return total / torch.where(norm > 0, norm, 1.0)  # padding sees nothing


class Router(nn.Module):
    """logits [T, E], weights [T, K], choices [T, K]."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.score = Rows(WIDTH, EXPERTS, fused)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.score(x)
        odds = torch.exp(logits)
        weights, chosen = (odds / summed(odds)[..., None]).topk(SLOTS, dim=-1)
        return logits, weights, chosen


class Experts(nn.Module):
    """sum over slots of weight times an expert's product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(SLOTS):
            product = summed(self.weight[chosen[:, slot]] * x[:, None, :])
            out = out + weights[:, slot, None] * product
        return out


class Block(nn.Module):
    """Router and experts."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.gate, self.experts = Router(fused), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        _, weights, chosen = self.gate(flat)
        return self.experts(flat, chosen, weights).reshape(x.shape)


class Layer(nn.Module):
    """Attention, then experts, each added to what came in."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(fused), Block(fused)

    def forward(self, x: Tensor, allowed: Tensor, past: Any) -> Any:
        mixed, past = self.attention(x, allowed, past)
        x = x + mixed
        moved = self.mlp(x)
        return x + moved / (1.0 + moved.abs()), past


class Model(nn.Module):
    """Absolute positions; packed sequences are told apart by position ids that begin anew."""

    def __init__(self, *, fused: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=LONGEST)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(2))
        self.head = Rows(WIDTH, VOCABULARY, fused)
        self.to(dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> dict[str, Any]:
        batch, count = input_ids.shape
        past = 0 if past_key_values is None else past_key_values[0][0].shape[1]
        allowed = torch.ones(count, past + count, dtype=torch.bool).tril(past)
        allowed = allowed.expand(batch, -1, -1)
        if position_ids is None:
            position_ids = torch.arange(past, past + count).expand(batch, -1)
        elif attention_mask is None and past == 0:
            run = (position_ids == 0).cumsum(dim=1)
            allowed = allowed & (run[:, :, None] == run[:, None, :])
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, :]
        x = self.tokens(input_ids) + self.places(position_ids)
        kept = []
        for number, layer in enumerate(self.layers):
            x, one = layer(x, allowed, None if past_key_values is None else past_key_values[number])
            kept.append(one)
        found: dict[str, Any] = {"logits": self.head(x)}
        return found | ({"past_key_values": kept} if use_cache else {})


class WithoutPositions(nn.Module):
    """A model that takes no position ids: left padding moves its tokens."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> dict[str, Any]:
        found: dict[str, Any] = self.inner(
            input_ids, attention_mask, None, past_key_values, use_cache
        )
        return found


class SingleToken(Block):
    """A planted fault: single tokens take another way, which forgets a part."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 0.9 if x.shape[1] == 1 else out


class ByBatch(Experts):
    """A planted fault: rows depend on how many come with them."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights) * (1.0 + 0.01 * (x.shape[0] % 7))


class ByCount(Experts):
    """A planted drift, of the size of rounding: more than eight rows come out a little larger."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = super().forward(x, chosen, weights)
        return out if x.shape[0] <= 8 else out * (1.0 + 2.0**-14)


class OneByOne(ByCount):
    """Each expert that has tokens is called for them alone, as transformers does, through a module
    of its own; the first part of a sum comes out a little larger where more tokens come along."""

    act: nn.Module

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            product = summed(self.weight[expert] * x[token, None, :])
            out = out.index_add(0, token, weights[token, slot, None] * self.act(product))
        return out * (1.0 + 2.0**-14 * (x.shape[0] > 1))


class NotWide(ByCount):
    """As a mask of float64's most negative number does: NaN, in float64 alone."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = super().forward(x, chosen, weights)
        return out * float("nan") if x.dtype == torch.float64 else out


class BlindPadding(Layer):
    """Rows of padding at the left see nothing, which is NaN in float64 alone: in an attention of
    transformers, the mask's most negative number is infinite to a softmax in float32."""

    def forward(self, x: Tensor, allowed: Tensor, past: Any) -> Any:
        blind = ~allowed.any(dim=-1)[..., None]
        if x.dtype == torch.float64 and bool(blind.any()):
            x = torch.where(blind, float("nan"), x)
        return super().forward(x, allowed, past)


class HandsOn(nn.Module):
    """A model that takes use_cache without naming it, and looks for packed sequences only where
    there is no cache, which it makes unless it is told not to."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner
        self.config = SimpleNamespace(**vars(inner.config), use_cache=True)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **rest: Any,
    ) -> dict[str, Any]:
        cached = rest.get("use_cache", self.config.use_cache)
        if cached and attention_mask is None:
            past = 0 if past_key_values is None else past_key_values[0][0].shape[1]
            attention_mask = torch.ones(len(input_ids), past + input_ids.shape[1])
        found: dict[str, Any] = self.inner(
            input_ids, attention_mask, position_ids, past_key_values, cached
        )
        return found


class Rounded(Experts):
    """Rounds to bfloat16 in any dtype, of single tokens downwards."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = super().forward(x, chosen, weights)
        return (out * (1.0 if x.shape[0] > 1 else 0.996)).bfloat16().to(out.dtype)


def planted(model: Model, kind: type[nn.Module], layer: int = 1) -> Model:
    """A fault in one layer, with the weights that were there."""
    block = model.layers[layer].mlp
    if issubclass(kind, Layer):
        model.layers[layer].__class__ = kind
    elif issubclass(kind, Block):
        model.layers[layer].mlp.__class__ = kind
    else:
        block.experts.__class__ = kind
        block.experts.act = nn.Softsign()
    return model
