"""The outcome of a decision: findings per claim, claims per case. Torch-free, JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verify.reasons import REASONS, Verdict, worst


@dataclass(frozen=True)
class Finding:
    """One thing that was found: a reason of the closed list and where it was seen."""

    reason: str
    detail: str
    tensor: str | None = None
    rank: int | None = None
    run: int | None = None
    process: int | None = None
    variant: str | None = None
    difference: Mapping[str, Any] | None = None  # what comparison and explanation said on the spot

    @property
    def verdict(self) -> Verdict:
        return REASONS[self.reason].verdict


@dataclass(frozen=True)
class RankEvidence:
    """What one rank contributed to one claim."""

    rank: int
    executions: int
    differing: int
    variants: Sequence[str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class ClaimVerdict:
    """One claim of one case.

    `executions` is per rank (that of the rank with the fewest), `bound` the rate per execution that
    0 differing ones do not exclude.
    """

    claim: str
    verdict: Verdict
    findings: Sequence[Finding]
    executions: int
    differing: int
    bound: float | None
    rate: tuple[float, float, float] | None  # estimate, low, high at 95 %, when some differed
    ranks: Sequence[RankEvidence]
    compared: Sequence[str]
    not_compared: Mapping[str, str]
    requested: Sequence[Mapping[str, Any]]
    effective: Sequence[Mapping[str, Any]]
    measurements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class CaseVerdict:
    """All claims of one case."""

    case: str
    target: str
    claims: Sequence[ClaimVerdict]
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        return worst([claim.verdict for claim in self.claims])
