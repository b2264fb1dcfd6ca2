"""Samples with more padding differ more: position ids or masks that do not allow for it.

Two patterns: |d| of whole samples grows with the padding and vanishes without (absolute positions),
or only the first tokens of padded samples differ (a convolution that reads the padding). Null
hypothesis of the first: levels of samples and their padding are independent, by permutation.
"""

from __future__ import annotations

import numpy as np

from verify.onpolicy.causes.facts import Facts, Finding, Flags, Floats, prompt_of
from verify.onpolicy.causes.groups import BY_SAMPLE, both_levels, contrast
from verify.onpolicy.causes.statistics import permutation_tail
from verify.onpolicy.causes.table import cause

LOUDER = 3.0
SEVERAL = 6
FIRST = 8
ROUNDING = 2.0**-6
"""|d| for its entropy that other kernels give: rounding logits up to 16 to bfloat16."""


def padding(facts: Facts) -> tuple[Floats, bool] | None:
    """Pad tokens of each sample, and whether the files say so; None where neither is known.

    Where they do not, left padding to the longest prompt is taken.
    """
    stated = facts.meta("padding")
    if any(one is not None for one in stated):
        values = [float(one) if isinstance(one, int | float) else np.nan for one in stated]
        return np.array(values), True
    lengths = np.array([len(prompt_of(one)) for one in facts.pairs.samples], dtype=np.float64)
    if len(lengths) == 0 or lengths.max() == 0 or (lengths == lengths[0]).all():
        return None
    return lengths.max() - lengths, False


def detect(facts: Facts) -> Finding | None:
    """Growth with the padding that is recorded, or that left padding would give."""
    known = padding(facts)
    if known is None:
        return None
    pads, stated = known
    both = both_levels(facts)
    level = both[0]
    fit = np.isfinite(level) & np.isfinite(pads)
    padded = fit & (pads > 0)
    bare = fit & (pads == 0)
    if padded.sum() < 1 or fit.sum() < SEVERAL // 2:
        return None
    rows = padded[facts.sample]
    if not rows.any():
        return None
    early = _first_only(facts, rows)
    trend = permutation_tail(level[fit], pads[fit])
    seen = contrast(facts, padded, both)
    tests = (trend, seen.chance if bare.any() else 1.0)
    # where the padding is a guess, both tests have to agree
    chance = min(1.0, 2.0 * min(tests)) if stated else max(tests)
    exact = bool(bare.any()) and float(facts.size[bare[facts.sample]].max(initial=0.0)) == 0.0
    quiet = float(facts.size[~rows].mean()) if (~rows).any() else 0.0
    ratio = float(facts.size[rows].mean()) / quiet if quiet > 0.0 else np.inf
    if bare.any() and ratio < LOUDER:
        return None
    loud = rows if early is None else rows & (facts.position < early)
    size = float(facts.size[loud].sum() / facts.doubt[loud].sum())
    gross = size > ROUNDING
    few = fit.sum() < SEVERAL and not exact
    enough = chance < (BY_SAMPLE if stated else BY_SAMPLE / 10.0) or (
        exact and stated and rows.sum() > 20
    )
    said = [
        f"{int(padded.sum())} padded samples have mean |d| {float(facts.size[rows].mean()):.3g}, "
        + (
            f"{int(bare.sum())} without padding " + ("agree exactly" if exact else f"{quiet:.3g}")
            if bare.any()
            else "and there is none without padding"
        ),
        f"levels rise with the padding, chance {chance:.1g}"
        + ("" if stated else " (padding to the longest prompt taken; the files do not say)"),
    ]
    if early is not None:
        said.append(
            f"only the first {early} tokens of each padded response differ: a convolution or a "
            "recurrent layer reads the padding"
        )
    return Finding(
        cause(
            "positions",
            weight=seen.excess if bare.any() else facts.share(rows),
            claimed=bool(enough and not few and gross),
            chance=float(chance),
            where=f"{int(padded.sum())} padded samples",
            fitted={"ratio": float(min(ratio, 1e9)), **({"first": early} if early else {})},
            for_=tuple(said),
            against=(
                *(() if bare.any() else ("no sample without padding to compare with",)),
                *(
                    ()
                    if gross
                    else ("no more than a kernel that takes the mask another way gives",)
                ),
            ),
        ),
        rows,
    )


def _first_only(facts: Facts, rows: Flags) -> int | None:
    """How many first tokens carry all of |d| of these rows, if few do and the responses go on."""
    differs = rows & (facts.size > 0.0)
    if not differs.any():
        return None
    last = int(facts.position[differs].max())
    longest = int(facts.position[rows].max())
    return last + 1 if last < FIRST and longest > 4 * (last + 1) else None
