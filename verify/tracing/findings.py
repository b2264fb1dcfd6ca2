"""What comparing two recordings finds, as values: places, culprits, ranks, and the whole.

Everything that prints or writes a comparison reads only these, and `documents` writes them as they
are. They hold no digests but those shown, so a comparison of two long runs stays small.
"""

from __future__ import annotations

from dataclasses import dataclass

from verify.reasons import Verdict
from verify.tracing.calls import ROOTS
from verify.tracing.causes import Cause

SHOWN = 20  # of each list that could be long; the rest is counted


@dataclass(frozen=True)
class Place:
    """An event that differs. rank: None for a sum over the ranks. difference: "bits", "dtype",
    "shape" or "replicas" (ranks of one run disagree). a, b: digests, as text."""

    rank: int | None
    step: int
    index: int
    name: str
    kind: str
    path: str
    occurrence: int
    module: str
    difference: str
    a: str
    b: str


@dataclass(frozen=True)
class Culprit:
    """Where a difference came in: what it was made of is equal, it is not.

    place: its first event. names: of the modules or parameters at fault. around: the module whose
    code ran, `name` or `name (Class)`, None outside of the model. after: the last equal event
    before, in words. collective: another rank differs earlier; this may have come from there.
    unrecorded: the first and the last of the steps that it came in with, where those were not
    recorded in full; else None.
    """

    cause: Cause
    place: Place
    names: tuple[str, ...]
    around: str | None
    after: str | None
    hints: tuple[str, ...]
    collective: bool = False
    unrecorded: tuple[int, int] | None = None


@dataclass(frozen=True)
class Form:
    """An event stored in another dtype or shape. steps: in how many steps of which first."""

    rank: int | None
    name: str
    kind: str
    path: str
    occurrence: int
    difference: str
    a: str
    b: str
    first_step: int
    steps: int


@dataclass(frozen=True)
class Unmatched:
    """An event that only one side has. side: "a" or "b"."""

    rank: int | None
    side: str
    name: str
    kind: str
    path: str
    occurrence: int
    first_step: int
    steps: int


@dataclass(frozen=True)
class Left:
    """Events that were not compared, and why. events: how many, over steps, ranks and both runs.
    open: whether the comparison cannot be VERIFIED without them."""

    reason: str
    open: bool
    events: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class RankDiff:
    """One rank, or the sums over all (rank None). steps: that were compared, the start not counted.
    cause: of its first difference, None when that inherits. moved: events that came in another
    order."""

    rank: int | None
    steps: int
    compared: int
    differing: int
    first: Place | None
    cause: Cause | None
    only_a: int
    only_b: int
    moved: int


@dataclass(frozen=True)
class TraceDiff:
    """The comparison of two recordings. steps: from, up to but not including; None is open.

    others: further culprits; inherits: events that differ because of one; each of them at most
    SHOWN, and counted. reasons: why it is not VERIFIED though nothing differs.
    """

    a: str
    b: str
    verdict: Verdict
    reasons: tuple[str, ...]
    steps: tuple[int | None, int | None]
    worlds: tuple[int, int]
    compared: int
    differing: int
    culprit: Culprit | None
    others: tuple[Culprit, ...]
    others_count: int
    inherits: tuple[Place, ...]
    inherits_count: int
    ranks: tuple[RankDiff, ...]
    forms: tuple[Form, ...]
    forms_count: int
    unmatched: tuple[Unmatched, ...]
    unmatched_count: int
    left: tuple[Left, ...]
    notes: tuple[str, ...]


def label(name: str, kind: str, path: str, occurrence: int = 0) -> str:
    """An event in words: `output 0 of layers.1.mlp (call 2)`. Not made printable."""
    what = kind.replace("_", " ") + (f" {path}" if path else "")
    owner = f" of {name}" if name not in ROOTS else " of the model"
    if kind in ("rng", "probe"):
        what = "generator" if kind == "rng" else kind
        owner = f" {name}" + (f" {path}" if path else "")
    elif kind in ("parameter", "buffer", "grad"):
        what = "gradient" if kind == "grad" else kind
        owner = f"{' of' if kind == 'grad' else ''} {name}"
    call = f" (call {occurrence + 1})" if occurrence else ""
    return f"{what}{owner}{call}"
