"""What pairing refused to score: other token ids, other prompts, masks and lengths that do not fit.

Nothing is estimated here: ids are equal or they are not. How much of |d| such samples would carry
is unknown, so the weight is the share of samples concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verify.onpolicy.causes.table import Cause, cause
from verify.onpolicy.misalignments import KINDS, Misalignment
from verify.onpolicy.pairing import Pairs

CAUSE_OF = {
    "other-tokens": "other-tokens",
    "other-id": "other-tokens",
    "end-token": "other-tokens",
    "truncated": "other-tokens",
    "other-prompt": "wrong-prompt",
    "mask-length": "mask",
    "other-mask": "mask",
    "response-length": "mask",
}
"""Kinds of misalignment that are a cause; the others say for themselves what is missing."""
SHOWN = 3


def detect(pairs: Pairs) -> list[Cause]:
    """One cause for each name that misalignments speak for."""
    by_name: dict[str, list[Misalignment]] = {}
    for one in pairs.misalignments:
        name = CAUSE_OF.get(one.kind)
        if name is not None:
            by_name.setdefault(name, []).append(one)
    return [_cause(name, found, pairs) for name, found in by_name.items()]


def _cause(name: str, found: Sequence[Misalignment], pairs: Pairs) -> Cause:
    keys = list(dict.fromkeys(one.key for one in found))
    everything = {one.key for one in pairs.samples} | {one.key for one in pairs.misalignments}
    kinds = Counter(one.kind for one in found)
    ((most, _),) = kinds.most_common(1)
    found = sorted(found, key=lambda one: one.kind != most)  # what it shows most often, first
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    said = [f"sample {one.key}: {one.what}" for one in found[:SHOWN]]
    said += [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    scored = [kind for kind in kinds if KINDS[kind].scored]
    return cause(
        name,
        weight=len(keys) / max(1, len(everything)),
        claimed=True,
        where=f"samples {', '.join(keys[:SHOWN])}{more}",
        fitted={"samples": float(len(keys))},
        for_=tuple(said),
        against=("the tokens that both sides have are compared all the same",) if scored else (),
        remedy=KINDS[most].remedy,
        of="of the samples",
    )
