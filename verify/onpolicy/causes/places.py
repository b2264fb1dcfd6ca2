"""One rank, engine or batch position whose samples stand out from all others.

Null hypothesis: levels of samples do not depend on the place. Every place of every kind is tried,
and the chance is multiplied by their number. A place with one sample is that sample, not a place.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding
from verify.onpolicy.causes.groups import BY_SAMPLE, Contrast, both_levels, contrast
from verify.onpolicy.causes.table import cause

KINDS = {
    "rank": "trainer rank",
    "rollout_rank": "sampler rank",
    "batch_position": "batch position",
}
LOUDER = 1.5
"""Mean |d| at the place over that elsewhere, from which on it is worth a name."""
MOST_PLACES = 512
MOST = 0.8
"""Share of the samples that a place may have and still be the one that stands out."""


def detect(facts: Facts) -> Finding | None:
    """The place with the smallest chance."""
    both = both_levels(facts)
    known = np.isfinite(both[0])
    tried: list[tuple[float, str, str, Contrast, np.ndarray]] = []
    for field, shown in KINDS.items():
        values = facts.meta(field)
        places = sorted({str(one) for one in values if one is not None})
        if not 2 <= len(places) <= MOST_PLACES:
            continue
        text = np.array([str(one) for one in values])
        for place in places:
            members = (text == place) & known
            if members.sum() < 2 or members.sum() > MOST * known.sum():
                continue
            seen = contrast(facts, members, both)
            tried.append((seen.chance, shown, place, seen, members))
    if not tried:
        return None
    chance, shown, place, seen, members = min(tried, key=lambda one: one[0])
    chance = min(1.0, chance * len(tried))
    if seen.ratio < LOUDER:
        return None
    rows = members[facts.sample]
    silent = float(facts.size[~rows].max(initial=0.0)) == 0.0
    rest = "all others agree exactly" if silent else f"{seen.ratio:.3g} times the others' mean"
    return Finding(
        cause(
            "outlier-place",
            weight=seen.excess,
            claimed=chance < BY_SAMPLE,
            chance=chance,
            where=f"{shown} {place}",
            fitted={"ratio": min(seen.ratio, 1e9)},
            for_=(
                f"the {seen.members} samples of {shown} {place} have mean |d| "
                f"{float(facts.size[rows].mean()):.3g}, {rest}; {len(tried)} places compared, "
                f"chance {chance:.1g}",
            ),
            against=()
            if seen.excess > 0.5
            else (f"without it {1.0 - seen.excess:.0%} of the mismatch remains",),
        ),
        rows,
        members,
    )
