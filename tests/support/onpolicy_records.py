"""Records and dumps of log-probabilities made by hand, to test what comes after the readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Problem, Sample, Series

Values = Sequence[float | None]


def series(values: Values, stored: str = "") -> Series:
    """None is an absent value."""
    absent = np.array([value is None for value in values], bool)
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    return Series(numbers, absent, stored)


def sample(
    key: str,
    tokens: Sequence[int] | None = None,
    *,
    trainer: Values | None = None,
    rollout: Values | None = None,
    prompt: Sequence[int] | None = None,
    mask: Sequence[int] | None = None,
    stored: Mapping[str, str] | None = None,
    place: str = "",
    **given: Any,
) -> Sample:
    """given: text, routing, and everything else is meta."""
    names = stored or {}
    held = {
        side: series(values, names.get(side, ""))
        for side, values in ((TRAINER, trainer), (ROLLOUT, rollout))
        if values is not None
    }
    return Sample(
        key,
        Place("a.jsonl", place or f"line {key}"),
        prompt=None if prompt is None else np.array(prompt, np.int64),
        tokens=None if tokens is None else np.array(tokens, np.int64),
        mask=None if mask is None else np.array(mask, bool),
        series=held,
        routing=given.pop("routing", {}),
        text=given.pop("text", None),
        meta=given,
    )


def dump(*samples: Sample, problems: Sequence[Problem] = (), file: str = "a.jsonl") -> Dump:
    return Dump("plain", (file,), samples, tuple(problems))


def both(*samples: Sample) -> Pairs:
    """The pairs of one dump that holds both sides."""
    return pair(dump(*samples))


def lists(trainer: Values, rollout: Values, mask: Sequence[int] | None = None) -> Pairs:
    """The pairs of one sample with both lists, tokens 10, 11, ..."""
    ids = list(range(10, 10 + len(trainer)))
    return both(sample("s", ids, trainer=trainer, rollout=rollout, mask=mask))


def kinds(pairs: Pairs) -> list[str]:
    return [one.kind for one in pairs.misalignments]
