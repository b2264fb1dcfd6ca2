"""What a table of reports says of each, and files that several tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onpolicy_cases import (
    RAW,
    Files,
    drawn,
    lines,
    noisy,
)


@dataclass(frozen=True)
class Report:
    """One report, or one variant, and what must be said of it.

    first: causes of which one must be claimed first, none for "no cause has to be". also: what else
    may be claimed; noise and doubt always may. misaligned: kinds that must be reported. replay:
    kinds of routing faults. says: patterns of all that is said. verdict: as the document has it.
    """

    id: str
    variant: str
    make: Callable[[], Files]
    first: tuple[str, ...] = ()
    misaligned: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    verdict: str = "MISMATCH"


@dataclass(frozen=True)
class Twin:
    """The same without the fault, or what only looks like one: MISMATCH must not be said.

    claims: what may be claimed of it.
    """

    id: str
    variant: str
    make: Callable[[], Files]
    says: tuple[str, ...] = ()
    claims: tuple[str, ...] = ("numeric-drift",)


TURNS = np.array(([1] * 9 + [0] * 5) * 2 + [1] * 12)


def masked(ours: Any, theirs: Any, level: float = 1e-4) -> Files:
    """Two tool turns, of which the sampler has no values: 0.0 stands there."""
    samples = drawn(47, RAW)
    values = samples.values(RAW)
    filled = [[float(x) for x in np.where(TURNS == 1, one, 0.0)] for one in values]
    trainer = lines(samples, None, noisy(values, level), mask=np.asarray(ours).tolist())
    mask = {} if theirs is None else {"mask": np.asarray(theirs).tolist()}
    return Files(trainer, lines(samples, filled, None, **mask))
