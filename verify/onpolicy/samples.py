"""What a dump of log-probabilities holds, whatever wrote it: samples, and what is wrong with them.

Readers fill these and judge nothing: a list of another length than the tokens stays as it is, a
value that is absent stays absent. `pairing` decides what belongs together and what can be scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRAINER, ROLLOUT = "trainer", "rollout"
SIDES = (TRAINER, ROLLOUT)


def _none() -> Mapping[str, Any]:
    return MappingProxyType({})  # a factory: Python 3.11 refuses it as a default


@dataclass(frozen=True)
class Place:
    """Where a record stands: file, and "line 7", "samples[3]" or "row 12" in it."""

    file: str
    record: str = ""

    def __str__(self) -> str:
        return f"{self.file}, {self.record}" if self.record else self.file


@dataclass(frozen=True)
class Problem:
    """One thing that could not be read, and where; the rest of the file was read.

    kind: "unreadable" (the record was left out), "bad-value" (the field was), or "note".
    what: what was given, what is allowed, what to do.
    """

    place: Place
    field: str
    what: str
    kind: str = "bad-value"


@dataclass(frozen=True, eq=False)
class Series:
    """Log-probabilities of one side, natural logarithm, as the file gives them.

    values: float64 [n], NaN and infinities as written, NaN where nothing was written. absent:
    bool [n], where the file has null or no entry. n need not be the number of tokens. stored: the
    dtype in the file where it has one ("float32", "bfloat16"), else "".
    """

    values: NDArray[np.float64]
    absent: NDArray[np.bool_]
    stored: str = ""


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that one side chose for one sample.

    experts: integers [rows, layers, k], -1 where none is recorded. start: the position in prompt
    and response together that row 0 belongs to, or -1 where the file does not say. weights: float32
    [rows, layers, k] or None. margins: float32 [rows, layers], how far the last chosen score lies
    above the first that was not chosen, or None. layers: the model's number of each layer, or None.
    """

    experts: NDArray[np.integer[Any]]
    start: int = -1
    weights: NDArray[np.float32] | None = None
    margins: NDArray[np.float32] | None = None
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """One response with what both sides, or one, say of it.

    key: what it is paired by, unique in a dump unless the file repeats it. prompt, tokens: int64
    ids [P] and [R], None where the file has none. mask: bool [R], True where a token is the
    policy's and counts, None where the file has none. series, routing: by side. top: by side, per
    position the alternatives as {token id: log-probability}, or None. text: the decoded response.
    meta: what else is known, by the names of META.
    """

    key: str
    place: Place
    prompt: NDArray[np.int64] | None = None
    tokens: NDArray[np.int64] | None = None
    mask: NDArray[np.bool_] | None = None
    series: Mapping[str, Series] = field(default_factory=_none)
    routing: Mapping[str, Routing] = field(default_factory=_none)
    top: Mapping[str, tuple[Mapping[int, float] | None, ...]] = field(default_factory=_none)
    text: str | None = None
    meta: Mapping[str, Any] = field(default_factory=_none)


META: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "float, of sampling",
        "top_p": "float, of sampling",
        "top_k": "int, of sampling; -1 or 0 for none",
        "min_p": "float, of sampling",
        "repetition_penalty": "float, of sampling",
        "presence_penalty": "float, of sampling",
        "frequency_penalty": "float, of sampling",
        "trainer_temperature": "float, what the trainer divided its logits by",
        "processed": "bool, whether the sampler's values include these parameters",
        "rollout_version": "str, the weights that sampled; a list of str [R] when they changed",
        "trainer_version": "str, the weights that scored",
        "finish_reason": "str: stop, length, abort, ...",
        "eos_token_ids": "list of int",
        "vocab_size": "int, tokens of the tokenizer",
        "logits_width": "int, columns of the head",
        "step": "int, of training",
        "rank": "int, the trainer's rank or shard that scored it",
        "rollout_rank": "int, the sampler's rank, engine or replica",
        "batch_position": "int, its place in the trainer's batch",
        "padding": "int, pad tokens left of the prompt in the trainer's batch",
        "group": "str, samples of one prompt share it",
        "cached_tokens": "int, of the prompt, taken from a prefix cache",
        "cumulative_logprob": "float, the sampler's own sum",
        "response_length": "int, as the file says it",
        "prompt_length": "int, as the file says it",
    }
)
"""The names of what a reader may put into Sample.meta; other keys of a file are left out."""

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The names of META that the sampler decides on; in a trainer's own file they are its own."""


@dataclass(frozen=True, eq=False)
class Dump:
    """What one argument of the command line holds. format: a name of the table of formats.

    A file that does not say which side its values belong to gets the side from its place on the
    command line, and its series stand under that name. config: what holds for the whole file, by
    the names of META.
    """

    format: str
    files: tuple[str, ...]
    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=_none)
