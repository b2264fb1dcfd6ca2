"""The numbers nobody argues with: how many tokens differ, which first, by how much; unclamped.

d = trainer - rollout of every token that the mask counts and both sides have a finite value for.
Ratios exp(d) and what is made of them may leave float64: they are `inf` then, and counted. A figure
that nothing was measured for is None, never 0. `figures.FIGURES` says what each one is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.figures import FIGURES, Value, measure_columns
from verify.onpolicy.pairing import Pairs
from verify.onpolicy.samples import ROLLOUT, TRAINER
from verify.onpolicy.spelling import NARROWEST_FIRST, rounded

__all__ = ["FIGURES", "Numbers", "Spot", "measure"]


@dataclass(frozen=True)
class Spot:
    """One token: sample key, position in the response, token id (-1 unknown), both values."""

    key: str
    position: int
    token: int
    trainer: float
    rollout: float

    def to_json(self) -> dict[str, Any]:
        return {one.name: told(getattr(self, one.name)) for one in fields(self)}


@dataclass(frozen=True, eq=False)
class Numbers:
    """What was measured. Every figure is an attribute too: `numbers.differing_tokens`.

    figures: by the names of FIGURES. first: the first token that differs. largest: the one with the
    largest |d| above 0. largest_sum: key of the sample with the largest |sum of d|. sums: float64
    [samples], sum of d, in the pairs' order. misalignments: their number by kind.
    """

    figures: Mapping[str, Value]
    first: Spot | None = None
    largest: Spot | None = None
    largest_sum: str | None = None
    misalignments: Mapping[str, int] = field(default_factory=dict)
    sums: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __getattr__(self, name: str) -> Any:
        if name in FIGURES:
            return self.figures[name]
        raise AttributeError(f"Numbers has no figure {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies, and for gathering the ranks': a read-only mapping cannot be pickled."""
        held = (self.first, self.largest, self.largest_sum, dict(self.misalignments), self.sums)
        return Numbers, (dict(self.figures), *held)

    def to_json(self) -> dict[str, Any]:
        """JSON's own types; NaN and infinities become the strings "nan", "inf" and "-inf"."""
        return {
            **{name: told(self.figures[name]) for name in FIGURES},
            "first": self.first.to_json() if self.first else None,
            "largest": self.largest.to_json() if self.largest else None,
            "largest_sum": self.largest_sum,
            "misalignments": dict(sorted(self.misalignments.items())),
        }


def measure(pairs: Pairs) -> Numbers:
    """Measures all aligned tokens. Raises nothing; what is empty is None."""
    bounds = np.array([*(one.start for one in pairs.samples), len(pairs.trainer)], np.int64)
    found = measure_columns(pairs.trainer, pairs.rollout, bounds, pairs.counted, pairs.present)
    values = {
        **found.values,
        "misaligned_samples": len({one.key for one in pairs.misalignments}),
        "differing_beyond_storage": _beyond_storage(pairs),
    }
    return Numbers(
        MappingProxyType(values),
        _spot(pairs, found.first),
        _spot(pairs, found.largest),
        None if found.largest_sum < 0 else pairs.samples[found.largest_sum].key,
        MappingProxyType(dict(Counter(one.kind for one in pairs.misalignments))),
        found.sums,
    )


def told(value: Any) -> Any:
    """A value of JSON: a float that is not finite as a string."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _spot(pairs: Pairs, row: int) -> Spot | None:
    if row < 0:
        return None
    return Spot(
        pairs.samples[int(pairs.sample[row])].key,
        int(pairs.position[row]),
        int(pairs.token[row]),
        float(pairs.trainer[row]),
        float(pairs.rollout[row]),
    )


def _beyond_storage(pairs: Pairs) -> Value:
    """Tokens that still differ in the narrower of both stored dtypes; None where a file has none.

    It tells a value that was stored in bfloat16 from one that is another: only stored so, it is
    equal here and differs in differing_tokens, because training uses what was stored.
    """
    narrower: dict[str, list[tuple[int, int]]] = {}
    for one in pairs.samples:
        if one.stop > one.start:
            stored = (one.trainer.series[TRAINER].stored, one.rollout.series[ROLLOUT].stored)
            if not set(stored) <= set(NARROWEST_FIRST):
                return None
            narrower.setdefault(min(stored, key=NARROWEST_FIRST.index), []).append(
                (one.start, one.stop)
            )
    if not narrower:
        return None
    count = 0
    for dtype, spans in narrower.items():
        rows = np.zeros(len(pairs.trainer), bool)
        for start, stop in spans:
            rows[start:stop] = True
        rows &= pairs.scored
        a, b = rounded(pairs.trainer[rows], dtype), rounded(pairs.rollout[rows], dtype)
        count += int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
    return count
