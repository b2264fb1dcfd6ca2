"""How a causal language model is called: the convention of transformers, of any of its versions.

    out = model(input_ids=..., attention_mask=..., position_ids=..., cache=..., use_cache=True)
    out.logits, out.cache

The cache is called `cache` or `past_key_values`; mask, positions and cache are given only to a
model whose forward names them. use_cache goes to one that hands on what it does not name as well:
left to its configuration it would make a cache in a pass that shall have none, and one with a cache
does not look for packed sequences. Nothing of `generate` is used: neither its processors nor its
defaults can come between logits and tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verify.errors import UnsupportedError
from verify.targets import told

_CACHES = ("cache", "past_key_values")


@dataclass(frozen=True, eq=False)
class Pass:
    """One call. ids: int64 [B, S]. places: int64 [B, S] of `sequences`, -1 for padding. mask: int64
    [B, past + S] or None. positions: int64 [B, S] or None. All on the CPU."""

    ids: Tensor
    places: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class Convention:
    """What a model's forward takes. cache: the name of the argument, or ""."""

    cache: str
    mask: bool
    positions: bool
    use_cache: bool


def convention(model: nn.Module) -> Convention:
    """Raises UnsupportedError for a model that is not called so."""
    kind = type(model).__name__
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{kind}.forward has no signature: {error}") from None
    names = set(parameters)
    rest = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    config = getattr(model, "config", None)
    if "input_ids" not in names:
        raise UnsupportedError(
            f"{kind}.forward takes {', '.join(sorted(names)) or 'nothing'}; needed is input_ids, "
            "and cache (or past_key_values) as in models of transformers"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{kind} has an encoder; only decoders are sampled here")
    return Convention(
        next((name for name in _CACHES if name in names), ""),
        "attention_mask" in names,
        "position_ids" in names,
        "use_cache" in names or (rest and hasattr(config, "use_cache")),
    )


def call(
    model: nn.Module, how: Convention, one: Pass, cache: Any = None, *, keep: bool = False
) -> tuple[Tensor, Any]:
    """Logits [B, S, V] and the cache. keep: whether a cache is to be filled.

    Whatever the model raises becomes an UnsupportedError that says which call it was.
    """
    device = device_of(model)
    given: dict[str, Any] = {"input_ids": one.ids.to(device)}
    if one.mask is not None:
        given["attention_mask"] = one.mask.to(device)
    if one.positions is not None:
        given["position_ids"] = one.positions.to(device)
    if how.use_cache:
        given["use_cache"] = keep
    if cache is not None:
        given[how.cache] = cache
    try:
        out = model(**given)
    except Exception as error:  # whatever somebody's model raises
        what = ", ".join(
            f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name
            for name, value in given.items()
        )
        raise UnsupportedError(
            f"{type(model).__name__} raised {type(error).__name__} when called with {what}: "
            f"{told(error)}"
        ) from error
    logits = _part(out, "logits", 0)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != one.ids.shape:
        given_shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedError(
            f"{type(model).__name__} gave logits {given_shape} for input_ids "
            f"{list(one.ids.shape)}; needed are logits [batch, tokens, vocabulary]"
        )
    held = None
    if keep:
        held = next((found for name in _CACHES if (found := _part(out, name, 1)) is not None), None)
        if held is None:
            raise UnsupportedError(
                f"{type(model).__name__} returned no cache; it must return it as "
                f"{' or '.join(_CACHES)} when it is called with use_cache=True"
            )
    return logits, held


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is."""
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def logprob(logits: Tensor, token: int) -> float:
    """float32 log-probability of a token by its logits [V], at temperature 1.

    Each row is computed alone in every layout, so that this step never makes a difference.
    """
    row = logits.detach().to(torch.float32).contiguous().clone()
    return float(torch.log_softmax(row, dim=-1)[token])


def _part(out: Any, name: str, position: int) -> Any:
    if isinstance(out, Mapping):
        return out.get(name)
    if isinstance(out, tuple):
        return out[position] if len(out) > position else None
    return getattr(out, name, None) if not isinstance(out, Tensor) or name != "logits" else out
