"""One finding told once: what several claims, runs and ranks saw alike becomes a single card.

A mutated input spoils every claim of its case, and an unordered sum differs in every run; a person
wants to read each of them once, with the list of places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


@dataclass
class Group:
    """The first finding of a kind, the claims that have it, and where else it was seen."""

    finding: Json
    claims: list[Json] = field(default_factory=list)
    others: list[Json] = field(default_factory=list)


def grouped(claims: Sequence[Json]) -> list[Group]:
    """The findings of some claims of a case, by verdict, reason and tensor, as first seen.

    A finding with a difference is preferred as the one to show. Findings without a tensor are told
    apart by their detail.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    for claim in claims:
        for finding in claim["findings"]:
            tensor = finding["tensor"]
            key = (finding["verdict"], finding["reason"], tensor or finding["detail"])
            group = groups.get(key)
            if group is None:
                groups[key] = Group(finding, [claim])
                continue
            if not any(claim is known for known in group.claims):
                group.claims.append(claim)
            if finding["difference"] and not group.finding["difference"]:
                finding, group.finding = group.finding, finding
            if place(finding) != place(group.finding):
                group.others.append(finding)
    order = {"MISMATCH": 0, "UNVERIFIED": 1}
    return sorted(groups.values(), key=lambda group: order.get(group.finding["verdict"], 2))


def place(finding: Json) -> tuple[Any, ...]:
    """Where a finding was made: what is not the same in the others of its group."""
    return tuple(finding[name] for name in ("rank", "run", "process", "variant"))
