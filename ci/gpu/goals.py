"""What the digest is meant to reach on a GPU, beside what it reached. A miss is told, not hidden.

Speeds hang on the card, so that a missed goal fails no test; README's table must say it instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARE_OF_READ = 0.92  # of the int64 sum of the same 2 GB, in one rotation
SHARE_OF_HASH = 1.0  # of torch.hash_tensor, and more than that
HOST = {"plan_replay_us": ("replay", 15.0), "plan_build_us": ("build", 100.0)}
YES, NO, UNKNOWN = "yes", "NO", "not measured"


@dataclass(frozen=True)
class Judged:
    """One figure: what it is, its goal and itself as text, and whether it met the goal."""

    what: str
    goal: str
    measured: str
    met: str

    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.goal, self.measured, self.met


def judged(document: Mapping[str, Any]) -> list[Judged]:
    """Every goal of the digest against the document of `mok bench digest --device cuda`.

    What the document lacks is "not measured", never left out.
    """
    found = []
    rows: Sequence[Mapping[str, Any]] = document.get("rows") or [{"dtype": "every dtype"}]
    for row in rows:
        dtype = row.get("dtype")
        share, hashed = row.get("of the read"), row.get("of hash_tensor")
        found.append(
            Judged(
                f"{dtype}: digest / int64 sum",
                f"{SHARE_OF_READ} or more",
                *_outcome(share, "", share is not None and share >= SHARE_OF_READ),
            )
        )
        found.append(
            Judged(
                f"{dtype}: digest / torch.hash_tensor",
                "above 1",
                *_outcome(hashed, "", hashed is not None and hashed > SHARE_OF_HASH),
            )
        )
    for key, (what, bound) in HOST.items():
        value = document.get(key)
        found.append(
            Judged(
                f"host time to {what} a plan of {document.get('plan_tensors', 64)} tensors",
                f"{bound:g} us or less",
                *_outcome(value, " us", value is not None and value <= bound),
            )
        )
    return found


def _outcome(value: float | None, unit: str, met: bool) -> tuple[str, str]:
    """Rounded to the worse side: what just misses its goal must not look like it."""
    if value is None:
        return "-", UNKNOWN
    if unit:
        text = f"{math.ceil(round(value * 10, 6)) / 10:.1f}{unit}"
    else:
        text = f"{math.floor(round(value * 1000, 6)) / 1000:.3f}"
    return text, YES if met else NO


def summary(found: list[Judged]) -> str:
    """One sentence: how many goals are met, and which are not."""
    missed = [one.what for one in found if one.met != YES]
    met = f"{len(found) - len(missed)} of {len(found)} goals met"
    return f"{met}; not met: {', '.join(missed)}." if missed else f"{met}."
