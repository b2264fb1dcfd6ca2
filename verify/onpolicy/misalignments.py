"""The closed list of ways in which two dumps do not fit together, each with what to do.

A kind with `scored` concerns something beside the values (a stated length, routing rows), or only
tokens at the end that one side lacks: the rest of the sample is compared. All others are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from verify.onpolicy.samples import Place
from verify.reasons import Verdict


@dataclass(frozen=True)
class Kind:
    """One entry of the list: `name` is stable, kebab-case and appears in JSON.

    verdict: MISMATCH for what is wrong by itself, UNVERIFIED where evidence is merely absent.
    scored: whether the tokens that both sides have are compared all the same.
    """

    name: str
    verdict: Verdict
    scored: bool
    meaning: str
    remedy: str


@dataclass(frozen=True)
class Misalignment:
    """One sample that does not fit, and where. kind: a name of KINDS. what: in numbers."""

    kind: str
    key: str
    places: tuple[Place, ...]
    what: str


_M, _U = Verdict.MISMATCH, Verdict.UNVERIFIED

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind(
                "other-tokens",
                _M,
                False,
                "the two sides have other token ids at the same place",
                "hand the sampled ids to the trainer; do not decode and encode them again",
            ),
            Kind(
                "other-id",
                _M,
                False,
                "the response of this id has another id on the other side",
                "number responses once, at the sampler, and carry the ids on: never count lines or"
                " join by place; compare where both counts begin",
            ),
            Kind(
                "other-prompt",
                _M,
                False,
                "the two sides have other prompts before the same response",
                "keep prompt and response together by id; compare templates and truncation",
            ),
            Kind(
                "length",
                _M,
                False,
                "a list of log-probabilities is longer or shorter than its tokens",
                "write one value per token; never pad, cut or slice a list to fit",
            ),
            Kind(
                "prompt-included",
                _M,
                False,
                "a list covers prompt and response, and its first entry is not empty: it may be"
                " shifted by one",
                "write the response's values only, or null for the first token of the prompt",
            ),
            Kind(
                "end-token",
                _M,
                True,
                "one side has one token more at the end of the response",
                "keep the end token as it was sampled, with its value, on both sides",
            ),
            Kind(
                "truncated",
                _M,
                True,
                "one side has only the beginning of the other's response",
                "compare the limits of length; train on what was sampled and on no more",
            ),
            Kind(
                "mask-length",
                _M,
                False,
                "a mask is longer or shorter than its tokens, so what counts is unknown",
                "write one mask entry per token of the response",
            ),
            Kind(
                "other-mask",
                _M,
                True,
                "the trainer counts tokens that the rollout does not call the policy's",
                "make the loss mask from the rollout's; tool and template tokens are 0",
            ),
            Kind(
                "response-length",
                _M,
                True,
                "the stated length is neither that of the response nor what the mask counts",
                "count the mask, not the span from the first to the last token",
            ),
            Kind(
                "prompt-length",
                _M,
                True,
                "the stated length of the prompt is not the number of its tokens",
                "write the length of the prompt that was scored, with or without its padding",
            ),
            Kind(
                "cumulative",
                _M,
                True,
                "the sampler's own sum is not the sum of the values it lists",
                "trim tokens, values and sum together",
            ),
            Kind(
                "routing-rows",
                _M,
                True,
                "the routing record has another number of rows than forwarded tokens",
                "record one row per forwarded token: all but the last",
            ),
            Kind(
                "duplicate-key",
                _M,
                False,
                "one file has the same id more than once, so which belongs to which is unknown",
                "give every response an id of its own",
            ),
            Kind(
                "one-list",
                _U,
                False,
                "one list of log-probabilities was given for both sides, and equals itself",
                "give the file that the other side wrote",
            ),
            Kind(
                "exchanged-files",
                _U,
                False,
                "each of the two files holds the values of the other's side",
                "exchange the two files: the trainer's comes first, the rollout's second",
            ),
            Kind(
                "missing-file",
                _U,
                False,
                "the only file that was given holds the values of one side",
                "give the other side's file too: verify onpolicy TRAINER ROLLOUT",
            ),
            Kind(
                "missing-sample",
                _U,
                False,
                "only one of the two files has this id",
                "give both files of the same step; filtered samples belong in neither",
            ),
            Kind(
                "no-token-ids",
                _U,
                False,
                "a side has no token ids, so that both speak of the same tokens is not known",
                "dump token ids beside the values",
            ),
            Kind(
                "no-logprobs",
                _U,
                False,
                "a side has no log-probabilities for this sample",
                "dump them: see verify.onpolicy.recorder",
            ),
        )
    }
)
