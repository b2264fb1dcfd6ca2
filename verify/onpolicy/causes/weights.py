"""What a comparison of the weights of both sides adds: it knows, where values can only suggest.

The document is that of `verify weights A B --format json`. Equal weights speak against weights of
another version, whatever made that likely; other weights are a cause by themselves, also where
their effect looks like noise. That the weights which were compared are those that sampled and
scored is the user's word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verify.onpolicy.causes.table import Cause, cause

NAME = "stale-weights"
LEFT_OVER = ("numeric-drift", "cannot-tell")
"""What is said where nothing else is known."""
SHOWN = 3


def problem(document: Mapping[str, Any]) -> str:
    """Why a JSON object is no document of `verify weights`; "" if it is one."""
    differences = document.get("differences")
    if document.get("verdict") not in ("VERIFIED", "MISMATCH", "UNVERIFIED"):
        return "it has no verdict"
    if not isinstance(document.get("parameters"), int) or not isinstance(differences, list):
        return "it has no number of parameters, or no list of differences"
    if not all(isinstance(one, dict) and {"name", "kind"} <= one.keys() for one in differences):
        return "a difference has no name, or no kind"
    return ""


def with_weights(causes: Sequence[Cause], document: Mapping[str, Any] | None) -> list[Cause]:
    """The causes of a mismatch, with what the weights say of them."""
    if document is None or document["verdict"] == "UNVERIFIED" or not causes:
        return list(causes)
    known = next((one for one in causes if one.name == NAME), None)
    others = [one for one in causes if one.name != NAME]
    count, differences = document["parameters"], document["differences"]
    if not differences:
        said = f"weights: {count} parameters were compared, all are equal bit for bit"
        others = [
            replace(one, for_=(*one.for_, said)) if one.name in LEFT_OVER else one for one in others
        ]
        if known is None:
            return others
        return [*others, replace(known, claimed=False, against=(said, *known.against))]
    first = [f"{one['name']} ({one['kind']})" for one in differences[:SHOWN]]
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    said = f"weights: {len(differences)} of {count} parameters differ: {', '.join(first)}{more}"
    left = [replace(one, claimed=False) if one.name in LEFT_OVER else one for one in others]
    weight = max(0.05, 1.0 - sum(one.weight for one in left if one.claimed))
    if known is None:
        return [*left, cause(NAME, weight=weight, claimed=True, for_=(said,))]
    weight = max(weight, known.weight)
    return [
        *left,
        replace(known, weight=weight, claimed=True, structural=True, for_=(said, *known.for_)),
    ]
