"""Small pairs of dumps for tests of causes: logits of a toy model, and what two sides make of them.

Not the generator of mismatches: here every strength is chosen so that the answer is beyond doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.facts import Facts, gather
from verify.onpolicy.causes.table import Evidence
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Routing, Sample, Series

Floats = NDArray[np.float64]
SAMPLES, LENGTH, WORDS = 16, 40, 200


def log_softmax(logits: Floats) -> Floats:
    """Natural logarithms, over the last axis."""
    peak = logits.max(axis=-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))


def logits(seed: int, samples: int = SAMPLES, length: int = LENGTH, words: int = WORDS) -> Floats:
    """[S, R, V]: some contexts nearly certain, some wide open."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(samples, length, words)) * rng.uniform(0.5, 2.5, (samples, length, 1))
    best = rng.integers(0, words, (samples, length))
    place = np.arange(samples)[:, None], np.arange(length)[None, :], best
    found[place] += rng.exponential(5.0, (samples, length))
    return found


def drawn(values: Floats, seed: int = 1) -> NDArray[np.int64]:
    """[S, R]: tokens sampled from log-probabilities [S, R, V]."""
    rng = np.random.default_rng(seed)
    return np.asarray((values + rng.gumbel(size=values.shape)).argmax(axis=-1), dtype=np.int64)


def chosen(values: Floats, tokens: NDArray[np.int64]) -> Floats:
    """[S, R] as float32 gives them: the values of these tokens."""
    picked = np.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
    return picked.astype(np.float32).astype(np.float64)


def noise(size: float, shape: Sequence[int], seed: int = 2) -> Floats:
    """Normal numbers of this standard deviation."""
    return size * np.random.default_rng(seed).normal(size=tuple(shape))


def samples(
    side: str,
    values: Sequence[Floats] | Floats,
    tokens: Sequence[NDArray[np.int64]] | NDArray[np.int64],
    *,
    masks: Sequence[NDArray[np.bool_]] | None = None,
    prompts: Sequence[NDArray[np.int64]] | None = None,
    meta: Callable[[int], Mapping[str, Any]] | None = None,
    routing: Callable[[int], Routing] | None = None,
    top: Callable[[int], tuple[Mapping[int, float] | None, ...]] | None = None,
) -> Dump:
    """One side's dump."""
    made = []
    for index, (own, ids) in enumerate(zip(values, tokens, strict=True)):
        prompt = np.array([1, 2, 3]) if prompts is None else prompts[index]
        series = Series(np.asarray(own, dtype=np.float64), np.isnan(own) & False, "float32")
        made.append(
            Sample(
                key=f"s{index}",
                place=Place(f"{side}.jsonl", f"line {index + 1}"),
                prompt=prompt.astype(np.int64),
                tokens=np.asarray(ids, dtype=np.int64),
                mask=None if masks is None else masks[index],
                series={side: series},
                routing={side: routing(index)} if routing else {},
                top={side: top(index)} if top else {},
                meta=meta(index) if meta else {},
            )
        )
    return Dump("plain", (f"{side}.jsonl",), tuple(made))


def pairs(
    trainer: Sequence[Floats] | Floats,
    rollout: Sequence[Floats] | Floats,
    tokens: Sequence[NDArray[np.int64]] | NDArray[np.int64],
    **more: Any,
) -> Pairs:
    """Both sides; what `more` says holds for both."""
    return pair(
        samples(TRAINER, trainer, tokens, **more), samples(ROLLOUT, rollout, tokens, **more)
    )


def facts(trainer: Any, rollout: Any, tokens: Any, **more: Any) -> Facts:
    """What detectors look at. evidence: an Evidence."""
    evidence = more.pop("evidence", Evidence())
    return gather(pairs(trainer, rollout, tokens, **more), evidence)


def drifting(size: float, seed: int = 3, **more: Any) -> Facts:
    """A clean pair: noise of the logits of this standard deviation, and nothing else."""
    given = logits(seed)
    values = log_softmax(given)
    tokens = drawn(values)
    other = log_softmax(given + noise(size, given.shape)) if size else values
    return facts(chosen(other, tokens), chosen(values, tokens), tokens, **more)
