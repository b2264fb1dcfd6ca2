"""The closed list of causes, each with what it means and what to do next; and what evidence is.

A cause is never invented elsewhere: detectors pick from this list, reports print from it. A name is
stable, kebab-case and appears in JSON. `structural` is what makes a mismatch by itself: the two
sides did not compute the same quantity. Noise, of whatever size, is measured and judged by bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.samples import Dump
from verify.rendering.phrases import percent

UNKNOWN = "cannot-tell"
MISMATCH = "of the mismatch"


@dataclass(frozen=True)
class Known:
    """One entry of the list."""

    name: str
    structural: bool
    meaning: str
    remedy: str


CAUSES: Mapping[str, Known] = MappingProxyType(
    {
        known.name: known
        for known in (
            Known(
                "other-tokens",
                True,
                "the two sides scored other tokens, or other responses under the same key",
                "pass token ids from the sampler to the trainer; never decode and encode again, "
                "and join by id, not by line",
            ),
            Known(
                "temperature",
                True,
                "one side divided its logits by another temperature than the other, or twice",
                "divide by the sampling temperature exactly once on both sides, or have the "
                "sampler return processed log-probabilities; record both temperatures",
            ),
            Known(
                "truncated-support",
                True,
                "one side renormalised over the tokens that top-p, top-k or min-p kept, the "
                "other over the whole vocabulary",
                "sample with top_p=1, top_k=-1, min_p=0 set explicitly (an engine may take them "
                "from generation_config.json), or apply the same mask in the trainer",
            ),
            Known(
                "penalties",
                True,
                "the sampler lowered the logits of tokens that were already in the context",
                "set repetition_penalty=1, presence_penalty=0 and frequency_penalty=0 explicitly "
                "(an engine may take them from generation_config.json)",
            ),
            Known(
                "shift",
                True,
                "one list of log-probabilities is displaced against the other",
                "the log-probability of token i comes from the logits at position i - 1; cut both "
                "lists in the same way",
            ),
            Known(
                "padded-vocabulary",
                True,
                "rows that only pad the head to a round size took part in one side's softmax",
                "set the logits of padding rows to -inf before the softmax",
            ),
            Known(
                "low-precision-head",
                False,
                "logits or log-probabilities of one side were rounded to bfloat16 or float16",
                "compute the head and the log-softmax in float32 on both sides, and store the "
                "log-probabilities as float32",
            ),
            Known(
                "stale-weights",
                True,
                "the sampler used other weights than the trainer",
                "compare the weights of both sides (verify weights), and record the version that "
                "sampled and the version that scored with every sample",
            ),
            Known(
                "dropout",
                True,
                "a random operation, such as dropout, was active while the trainer scored",
                "score in evaluation mode with dropout set to 0; score the same tokens twice and "
                "give the second file as trainer_again",
            ),
            Known(
                "routing-flips",
                False,
                "tokens for which the router chose other experts carry the mismatch",
                "replay the recorded experts in the trainer, or keep the router in float32 on both "
                "sides",
            ),
            Known(
                "numeric-drift",
                False,
                "unbiased noise, as other kernels, shapes or dtypes give it",
                "set a bound with --fail-on, or make both sides batch-invariant; with routing "
                "recorded, its share can be told",
            ),
            Known(
                "outlier-place",
                False,
                "one rank, engine or batch position stands out",
                "run the same samples on another rank; compare weights and environment of the one "
                "that stands out",
            ),
            Known(
                "sentinel",
                True,
                "values that are no log-probabilities stand where log-probabilities should be",
                "write null, not a number, for what was not computed, and take such tokens out "
                "of the mask",
            ),
            Known(
                "wrong-prompt",
                True,
                "responses were scored behind another prompt than they were sampled from",
                "join prompts, responses and log-probabilities by id on every rank",
            ),
            Known(
                "mask",
                True,
                "tokens that the policy did not sample are counted, or its own are not",
                "let the mask be 1 exactly for sampled tokens; use its sum, not a span, as length",
            ),
            Known(
                "positions",
                True,
                "samples with more padding differ more: positions or masks do not allow for it",
                "derive position ids from the attention mask, and mask what convolutions read",
            ),
            Known(
                "cannot-tell",
                False,
                "there is a mismatch, and these files fit several causes or none",
                "record more; verify.onpolicy.recorder is ten lines for the engine",
            ),
        )
    }
)
"""By name, in the order of the documentation."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What may be known beside the two lists of log-probabilities; all of it is optional.

    run_config, generation_config: what the run, and the model's folder, set, by the names of
    samples.META. weights: a document of `verify weights`. trainer_again: a second scoring of the
    same tokens by the trainer with the same weights. steps: further scorings by other versions of
    the trainer's weights, by version. logits: by side and key, float [R, V] of the response's
    tokens, before temperature and truncation.
    """

    run_config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None
    weights: Mapping[str, Any] | None = None
    trainer_again: Dump | None = None
    steps: Mapping[str, Dump] | None = None
    logits: Mapping[str, Mapping[str, NDArray[np.floating[Any]]]] | None = None


@dataclass(frozen=True)
class Cause:
    """One cause with what speaks for and against it, in numbers.

    weight: 0 to 1, the share of the sum of |d| that this cause carries by its own evidence.
    claimed: the evidence suffices by the error rates that the detector states. where: samples,
    ranks or tokens concerned, "" for all. fitted: what was estimated, such as {"ratio": 0.6}.
    for_, against: one sentence each, with numbers; texts from files are in them as they are, so
    escape them when printing. chance: of evidence as strong without this cause, None where the
    detector has no such number. of: what weight is a share of.
    """

    name: str
    weight: float
    structural: bool
    claimed: bool
    where: str = ""
    fitted: Mapping[str, float] = field(default_factory=dict)
    for_: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    remedy: str = ""
    chance: float | None = None
    of: str = MISMATCH

    @property
    def share(self) -> str:
        """`carries 43 % of the mismatch`; "" where no share is known."""
        if not self.weight or self.name == UNKNOWN:
            return ""
        return (
            f"{'carries' if self.of == MISMATCH else 'concerns'} {percent(self.weight)} {self.of}"
        )

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of the report."""
        return {
            "name": self.name,
            "weight": self.weight,
            "structural": self.structural,
            "claimed": self.claimed,
            "where": self.where,
            "fitted": dict(self.fitted),
            "for": list(self.for_),
            "against": list(self.against),
            "remedy": self.remedy,
        }


def cause(
    name: str,
    *,
    weight: float,
    claimed: bool,
    where: str = "",
    fitted: Mapping[str, float] | None = None,
    for_: tuple[str, ...] = (),
    against: tuple[str, ...] = (),
    remedy: str = "",
    structural: bool | None = None,
    chance: float | None = None,
    of: str = MISMATCH,
) -> Cause:
    """A cause of the table; `remedy` and `structural` overrule what the table says."""
    known = CAUSES[name]
    return Cause(
        name=name,
        weight=float(min(1.0, max(0.0, weight))),
        structural=known.structural if structural is None else structural,
        claimed=claimed,
        where=where,
        fitted=dict(fitted or {}),
        for_=for_,
        against=against,
        remedy=remedy or known.remedy,
        chance=chance,
        of=of,
    )
