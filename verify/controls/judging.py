"""Were the planted faults caught by name, and did the clean twins pass?

Pure: from the records of one execution, with any detectors switched off, as often as one likes. A
fault counts as caught only with the expected reason in the expected claim and the verdict that goes
with it; where the control says so, with no other reason and every other claim VERIFIED. A twin is
clean only if all its claims are VERIFIED. Controls that were not executed are never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verify.cases import Case
from verify.controls.launching import Collected
from verify.controls.planting import Control
from verify.decision import decide
from verify.evidence import Plan
from verify.reasons import Verdict
from verify.verdicts import CaseVerdict, ClaimVerdict


@dataclass(frozen=True)
class ControlOutcome:
    """What became of one control: was its fault caught, was its twin clean, and what was seen."""

    name: str
    detectors: tuple[str, ...]
    caught: bool
    clean: bool
    expected: str
    found: str
    twin: str

    @property
    def passed(self) -> bool:
        return self.caught and self.clean

    @property
    def detail(self) -> str:
        """Expected against found where something is wrong; otherwise what was caught."""
        wrong = []
        if not self.caught:
            wrong.append(f"expected {self.expected}, found {self.found}")
        if not self.clean:
            wrong.append(f"the clean twin has {self.twin}")
        return "; ".join(wrong) or self.expected


@dataclass(frozen=True)
class ControlsReport:
    """The outcome of all controls that were executed; `left_out` names those that this machine
    cannot execute, with what it lacks. They are neither passed nor failed."""

    outcomes: tuple[ControlOutcome, ...]
    off: tuple[str, ...] = ()
    seconds: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of controls that failed, either way."""
        return tuple(outcome.name for outcome in self.outcomes if not outcome.passed)

    @property
    def status(self) -> str:
        """`passed`, `failed`, or `not-run` when there was nothing to judge."""
        return "not-run" if not self.outcomes else "failed" if self.failed else "passed"

    @property
    def exit_code(self) -> int:
        """0 when all passed, 1 when one failed, 3 when nothing ran."""
        return {"passed": 0, "failed": 1, "not-run": 3}[self.status]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; `status`, `passed` and `failed` are what a result document keeps."""
        return {
            "status": self.status,
            "passed": len(self.outcomes) - len(self.failed),
            "failed": list(self.failed),
            "exit_code": self.exit_code,
            "disabled": list(self.off),
            "seconds": round(self.seconds, 1),
            "faults": len(self.outcomes),
            "caught": sum(outcome.caught for outcome in self.outcomes),
            "twins": len(self.outcomes),
            "clean": sum(outcome.clean for outcome in self.outcomes),
            "not_run": dict(self.left_out),
            "controls": [
                {
                    "name": outcome.name,
                    "passed": outcome.passed,
                    "fault": "caught" if outcome.caught else "missed",
                    "twin": "clean" if outcome.clean else "alarm",
                    "detail": outcome.detail,
                    "detectors": list(outcome.detectors),
                    "expected": outcome.expected,
                    "found": outcome.found,
                }
                for outcome in self.outcomes
            ],
        }


def evaluate(collected: Collected, off: frozenset[str] = frozenset()) -> ControlsReport:
    """The outcome of everything that was executed, as if the detectors in `off` did not exist."""
    outcomes = tuple(_outcome(control, collected, off) for control in collected.controls)
    return ControlsReport(outcomes, tuple(sorted(off)), collected.seconds)


def _outcome(control: Control, collected: Collected, off: frozenset[str]) -> ControlOutcome:
    fault = _decided(control.fault, collected, off)
    twin = _decided(control.twin, collected, off)
    return ControlOutcome(
        name=control.name,
        detectors=tuple(sorted(control.detectors)),
        caught=_caught(control, fault),
        clean=bool(twin) and all(c.verdict is Verdict.VERIFIED for c in twin.values()),
        expected=f"{control.claim}: {control.verdict}({control.reason})",
        found=_shown(fault, control.claim),
        twin=_shown(twin),
    )


def _decided(case: Case, collected: Collected, off: frozenset[str]) -> dict[str, ClaimVerdict]:
    """The claims of a case that are left; none when it was not executed."""
    plan = collected.plans.get(case.name)
    if plan is None:
        return {}
    left: Plan = replace(plan, claims=[claim for claim in plan.claims if claim not in off])
    verdict: CaseVerdict = decide(left, collected.records[case.name], disabled=off)
    return {claim.claim: claim for claim in verdict.claims}


def _caught(control: Control, claims: Mapping[str, ClaimVerdict]) -> bool:
    own = claims.get(control.claim)
    if own is None or own.verdict is not control.verdict:
        return False
    reasons = {finding.reason for finding in own.findings}
    others = [claim.verdict for name, claim in claims.items() if name != control.claim]
    return (
        control.reason in reasons
        and (not control.alone or reasons == {control.reason})
        and (not control.isolated or all(verdict is Verdict.VERIFIED for verdict in others))
    )


def _shown(claims: Mapping[str, ClaimVerdict], wanted: str | None = None) -> str:
    """`memory: MISMATCH(bits-differ)` for the wanted claim and those that are not VERIFIED."""
    shown = []
    for name, claim in claims.items():
        if name == wanted or claim.verdict is not Verdict.VERIFIED:
            reasons = ", ".join(dict.fromkeys(finding.reason for finding in claim.findings))
            shown.append(f"{name}: {claim.verdict}{f'({reasons})' if reasons else ''}")
    if wanted is not None and wanted not in claims:
        shown.insert(0, f"{wanted}: not executed")
    return "; ".join(shown) or ("all VERIFIED" if claims else "not executed")
