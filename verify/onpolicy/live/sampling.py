"""Samples tokens one at a time with a key-value cache, at temperature 1 over the whole vocabulary.

Tokens are drawn by a generator of our own, by inversion, so that nothing else is consumed; the
log-probability of a token is what the pass that drew it gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verify.errors import UnsupportedError
from verify.onpolicy.live.calling import Convention, Pass, call, logprob
from verify.onpolicy.live.capturing import Capture
from verify.onpolicy.live.layouts import DECODE
from verify.onpolicy.live.models import Live
from verify.onpolicy.live.scoring import Scored
from verify.onpolicy.live.sequences import Sampled, places

_SHORTEST, _STEP = 5, 3  # tokens of the first prompt that is drawn, and how much the next is longer


def prompts(live: Live, count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` prompts: the model's own, in turn, or random ids of different lengths."""
    if live.prompts:
        return [live.prompts[number % len(live.prompts)] for number in range(count)]
    generator = np.random.Generator(np.random.Philox(key=seed))
    special = {*live.ends, live.pad}
    allowed = [token for token in range(live.vocabulary) if token not in special] or [0]
    return [
        tuple(int(one) for one in generator.choice(allowed, _SHORTEST + _STEP * number))
        for number in range(count)
    ]


def sample(
    live: Live, how: Convention, given: Sequence[tuple[int, ...]], tokens: int, seed: int
) -> tuple[list[Sampled], Scored]:
    """At most `tokens` tokens behind each prompt; an end token of the model's ends a response.

    Raises UnsupportedError for a model without a cache, positions beyond its longest, and logits
    from which nothing can be drawn.
    """
    if not how.cache:
        raise UnsupportedError(
            f"{type(live.model).__name__}.forward takes no cache (cache or past_key_values), so it "
            "cannot sample as an engine does"
        )
    longest = max(len(prompt) for prompt in given) + tokens
    if live.longest is not None and longest > live.longest:
        raise UnsupportedError(
            f"prompts and responses are up to {longest} tokens long, the model takes "
            f"{live.longest}; give fewer with --tokens or --samples"
        )
    capture = Capture(live.model)
    found, values = [], []
    with torch.no_grad(), capture.listening():
        for number, prompt in enumerate(given):
            generator = np.random.Generator(np.random.Philox(key=[seed, number + 1]))
            one, series = _respond(live, how, capture, number, prompt, tokens, generator)
            found.append(one)
            values.append(series)
    return found, Scored(DECODE, tuple(values), capture.taken())


def _respond(
    live: Live,
    how: Convention,
    capture: Capture,
    number: int,
    prompt: tuple[int, ...],
    tokens: int,
    generator: np.random.Generator,
) -> tuple[Sampled, NDArray[np.float32]]:
    cache: Any = None
    response: list[int] = []
    series: list[float] = []
    step, done = prompt, 0
    while True:
        one = Pass(torch.tensor([step]), places(number, done, done + len(step))[None])
        capture.begin(one.places)
        logits, cache = call(live.model, how, one, cache, keep=True)
        token = _drawn(live, logits[0, -1], generator)
        response.append(token)
        series.append(logprob(logits[0, -1], token))
        stopped = token in live.ends
        if stopped or len(response) == tokens:
            break
        done, step = done + len(step), (token,)
    return Sampled(prompt, tuple(response), stopped), np.array(series, dtype=np.float32)


def _drawn(live: Live, logits: torch.Tensor, generator: np.random.Generator) -> int:
    """A token by its probability, by inversion of the cumulative sum in float64."""
    wide = logits.detach().to("cpu", torch.float64)
    edges = torch.softmax(wide, dim=-1).cumsum(dim=-1).numpy()
    if not np.isfinite(edges[-1]):
        raise UnsupportedError(
            f"{type(live.model).__name__} gave logits that are not finite; nothing can be sampled. "
            "Look for NaN in its weights, or give --dtype float32"
        )
    at = int(np.searchsorted(edges, generator.random() * edges[-1], side="right"))
    return min(at, len(edges) - 1)
