"""What detectors look at: columns of the tokens under test, and quantities derived from them once.

A detector gets Facts and returns a Finding or None. Tokens that one cause explains are taken out
before the next kind of cause is looked for (`without`), so that a few sentinels do not hide a
temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.table import Cause, Evidence
from verify.onpolicy.pairing import Paired, Pairs
from verify.onpolicy.samples import SAMPLING

CAP = 50.0
"""Nats: what one token can count for. Placeholders such as -9999 would outweigh all else."""

NEARLY = 1e-3
"""Nats: twice what rounding to three decimals gives."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause and the rows of the facts' columns that it explains; None where it is all of them.

    members: bool [samples], the samples concerned, where the cause is told by samples.
    """

    cause: Cause
    explains: Flags | None = None
    members: Flags | None = None


Detector = Callable[["Facts"], Finding | None]


@dataclass(frozen=True, eq=False)
class Context:
    """Quantities of all tokens of all pairs, whether scored or not."""

    pairs: Pairs

    @cached_property
    def seen(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """How often a token occurred before: int32 [N] in prompt and response, and in the response.

        -1 where a token's id is unknown.
        """
        pairs = self.pairs
        prompts = [prompt_of(one) for one in pairs.samples]
        lengths = np.array([len(one) for one in prompts], dtype=np.int64)
        owner = np.concatenate([np.repeat(np.arange(len(prompts)), lengths), pairs.sample])
        token = np.concatenate([*prompts, pairs.token]) if prompts else pairs.token
        known = token >= 0
        span = int(token.max(initial=0)) + 2
        keys = owner.astype(np.int64) * span + np.where(known, token, span - 1)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        fresh = np.ones(len(ordered), dtype=bool)
        fresh[1:] = ordered[1:] != ordered[:-1]
        starts = np.flatnonzero(fresh)
        group = np.cumsum(fresh) - 1
        before = np.arange(len(ordered)) - starts[group]
        in_prompt = np.bincount(group, weights=order < int(lengths.sum()), minlength=len(starts))
        total = np.empty(len(ordered), dtype=np.int32)
        total[order] = before
        response = np.empty(len(ordered), dtype=np.int32)
        response[order] = before - in_prompt[group].astype(np.int64)
        total[~known] = -1
        response[~known] = -1
        first = int(lengths.sum())
        return total[first:], response[first:]

    @cached_property
    def prefixes(self) -> NDArray[np.uint64]:
        """uint64 [N]: a digest of prompt and response before and at each token.

        Equal where two samples came to the same token by the same context (or by a chance of
        about N^2 / 2^65). 0 where an id is unknown.
        """
        pairs = self.pairs
        mixed = _mixed(pairs.token, pairs.position)
        with np.errstate(over="ignore"):
            running = np.cumsum(mixed, dtype=np.uint64)
            digests = np.zeros(len(mixed), dtype=np.uint64)
            for one in pairs.samples:
                if one.stop <= one.start:
                    continue
                base = running[one.start - 1] if one.start else np.uint64(0)
                prompt = prompt_of(one)
                places = np.arange(-len(prompt), 0)
                own = _mixed(prompt, places).sum(dtype=np.uint64)
                digests[one.start : one.stop] = running[one.start : one.stop] - base + own
        digests[pairs.token < 0] = 0
        return digests


def _mixed(token: NDArray[np.int64], place: NDArray[Any]) -> NDArray[np.uint64]:
    """uint64: splitmix64's finaliser of token and place, so that sums of them are digests."""
    with np.errstate(over="ignore"):
        x = token.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += (place.astype(np.int64) + np.int64(1 << 40)).astype(np.uint64) * np.uint64(
            0xD1B54A32D192ED03
        )
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def prompt_of(one: Paired) -> NDArray[np.int64]:
    """The prompt's ids of a pair, empty where neither side has them."""
    for side in (one.trainer, one.rollout):
        if side.prompt is not None:
            return side.prompt
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Facts:
    """The tokens under test. rows: int64 [n], into the columns of the pairs: scored and finite,
    ascending. kept: what other modules derived and want once.
    """

    context: Context
    evidence: Evidence
    rows: Rows
    kept: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def bounds(self) -> Rows:
        """int64 [samples + 1]: rows bounds[i] .. bounds[i + 1] - 1 belong to sample i."""
        return np.searchsorted(self.sample, np.arange(len(self.pairs.samples) + 1))

    @property
    def pairs(self) -> Pairs:
        """The pairs that the rows belong to."""
        return self.context.pairs

    def without(self, taken: Flags) -> Facts:
        """The facts of the other rows."""
        return Facts(self.context, self.evidence, self.rows[~taken])

    def only(self, kept: Flags) -> Facts:
        """The facts of these rows."""
        return Facts(self.context, self.evidence, self.rows[kept])

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def trainer(self) -> Floats:
        """float64 [n]."""
        return self.pairs.trainer[self.rows]

    @cached_property
    def rollout(self) -> Floats:
        """float64 [n]."""
        return self.pairs.rollout[self.rows]

    @cached_property
    def d(self) -> Floats:
        """float64 [n]: trainer - rollout."""
        return self.pairs.difference[self.rows]

    @cached_property
    def clipped(self) -> Floats:
        """float64 [n]: d within CAP, so that no single value outweighs a law that all obey."""
        return np.clip(self.d, -CAP, CAP)

    @cached_property
    def size(self) -> Floats:
        """float64 [n]: |d|, at most CAP."""
        return np.abs(self.clipped)

    @cached_property
    def total(self) -> float:
        """Sum of |d|."""
        return float(self.size.sum())

    @cached_property
    def sample(self) -> NDArray[np.int32]:
        """int32 [n], index into pairs.samples."""
        return self.pairs.sample[self.rows]

    @cached_property
    def position(self) -> NDArray[np.int32]:
        """int32 [n], in the response."""
        return self.pairs.position[self.rows]

    @cached_property
    def token(self) -> NDArray[np.int64]:
        """int64 [n]."""
        return self.pairs.token[self.rows]

    @cached_property
    def kind(self) -> NDArray[np.int64]:
        """int64 [n]: numbers from 0, equal for equal tokens; rows of unknown tokens are alone.

        A model in a loop says the same tokens again with the same d, which proves no more than
        once: tests that count tokens count kinds.
        """
        token = self.token.copy()
        unknown = token < 0
        token[unknown] = -1 - np.arange(int(unknown.sum()))
        return np.unique(token, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def middle(self) -> Floats:
        """float64 [n]: mean of both sides, by which tokens are sorted without favouring either."""
        return self.trainer / 2.0 + self.rollout / 2.0

    @cached_property
    def rounded(self) -> Flags:
        """bool [n]: exactly 0.0 on one side and nearly on the other. No value is above 0, so there
        rounding decides the sign of d, not a law.
        """
        return ((self.trainer == 0.0) | (self.rollout == 0.0)) & (self.size < NEARLY)

    @cached_property
    def doubt(self) -> Floats:
        """float64 [n], 0 to 1: 1 - probability, in which noise of the logits shows."""
        return np.maximum(-np.expm1(np.minimum(self.middle, 0.0)), 1e-12)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64 [samples]: tokens under test of each sample."""
        return np.bincount(self.sample, minlength=len(self.pairs.samples)).astype(np.int64)

    @cached_property
    def sums(self) -> Floats:
        """float64 [samples]: sum of |d| of each sample."""
        sums = np.bincount(self.sample, weights=self.size, minlength=len(self.pairs.samples))
        return np.asarray(sums, dtype=np.float64)

    @cached_property
    def means(self) -> Floats:
        """float64 [samples]: mean |d| of each sample, NaN where it has no token under test."""
        return self.by_sample(self.size)

    def by_sample(self, values: Floats) -> Floats:
        """float64 [samples]: the mean of a column over each sample, NaN of nothing."""
        sums = np.bincount(self.sample, weights=values, minlength=len(self.pairs.samples))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(sums / self.counts, dtype=np.float64)

    def share(self, rows: Flags) -> float:
        """The share of the sum of |d| that these rows carry."""
        return float(self.size[rows].sum()) / self.total if self.total > 0.0 else 0.0

    def meta(self, name: str) -> list[Any]:
        """One value of META for each sample: one side's word, else the other's, else None.

        The rollout's word comes first for what the sampler did, the trainer's for all else.
        """
        sampled = name in SAMPLING or name == "processed"
        found = []
        for one in self.pairs.samples:
            first, second = (one.rollout, one.trainer) if sampled else (one.trainer, one.rollout)
            value = first.meta.get(name)
            found.append(second.meta.get(name) if value is None else value)
        return found


def gather(pairs: Pairs, evidence: Evidence) -> Facts:
    """The facts of all rows that are scored and finite on both sides."""
    return Facts(Context(pairs), evidence, np.flatnonzero(pairs.finite).astype(np.int64))


def names(facts: Facts, samples: NDArray[np.integer[Any]], shown: int = 4) -> str:
    """`samples a, b and 3 more`."""
    keys = [facts.pairs.samples[int(index)].key for index in samples[:shown]]
    more = f" and {len(samples) - shown} more" if len(samples) > shown else ""
    return f"sample{'s' if len(samples) != 1 else ''} {', '.join(keys)}{more}"
