"""From what was measured of each condition to its verdict, and to one verdict over all.

The doctor's causes come from numbers alone. Here the model is at hand, and float64 answers what
they guess: where it shows rounding, no structural cause stands; where it shows another computation,
drift does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verify.onpolicy.analysing import Analysis
from verify.onpolicy.causes.table import Cause
from verify.onpolicy.live.layouts import DECODE
from verify.onpolicy.live.widening import Wide
from verify.onpolicy.verdicts import Finding, OnPolicyVerdict
from verify.reasons import Verdict, worst

_DRIFT = ("numeric-drift", "routing-flips", "low-precision-head")
_STRUCTURAL = "structural-cause"


@dataclass(frozen=True, eq=False)
class Judged:
    """One condition. analysis: None where it was not run, for the problem. broken: where mok's
    experts gave other bits for equal inputs, or ""."""

    name: str
    analysis: Analysis | None
    wide: Wide | None
    problem: str
    broken: str = ""

    @property
    def computes_else(self) -> bool:
        """Whether float64 shows another computation."""
        return self.wide is not None and self.wide.structural

    @property
    def rounds(self) -> bool:
        """Whether float64 shows rounding alone."""
        return self.wide is not None and not self.wide.problem and not self.wide.structural

    def findings(self) -> list[Finding]:
        """The doctor's, as far as float64 does not know better, and our own."""
        if self.analysis is None:
            return [Finding("not-run", self.problem)]
        kept = [
            one
            for one in self.analysis.verdict.findings
            if not (self.rounds and one.reason == _STRUCTURAL)
        ]
        if self.broken:
            kept.insert(0, Finding("experts-differ", self.broken))
        if not self.computes_else:
            return kept
        assert self.wide is not None
        parted = self.wide.parted
        assert parted is not None
        if self.wide.moves:
            seen = f"log-probabilities differ by up to {self.wide.largest:.4g} in float64, too"
        else:
            seen = "in float64, too, a module differs, though no log-probability does"
        what = (
            f"{seen}, so it is not rounding; {parted.module} ({parted.type}) is the first module "
            "that computes something else"
        )
        return [Finding(_STRUCTURAL, what), *kept]

    def verdict(self) -> Verdict:
        """Of this condition alone."""
        return worst([Verdict.VERIFIED, *(one.verdict for one in self.findings())])


def judge(main: Analysis, conditions: Sequence[Judged]) -> OnPolicyVerdict:
    """The verdict over all conditions. Findings of one kind are told in one sentence, which names
    the conditions."""
    together: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for one in conditions:
        for finding in one.findings():
            together.setdefault((finding.reason, finding.kind), []).append((one.name, finding))
    found = [
        Finding(reason, _told(told), kind, sum(one.count for _, one in told))
        for (reason, kind), told in together.items()
    ]
    found.sort(key=lambda one: one.verdict is not Verdict.MISMATCH)
    verdict = worst([Verdict.VERIFIED, *(one.verdict for one in found)])
    return OnPolicyVerdict(verdict, tuple(found), main.verdict.outcomes)


def _told(told: Sequence[tuple[str, Finding]]) -> str:
    """In the words of the first condition, with the names of all."""
    names, (_, first) = ", ".join(name for name, _ in told), told[0]
    return f"{names}: {first.what}" + ("; others in the table" if len(told) > 1 else "")


def informed(main: Analysis, conditions: Sequence[Judged]) -> tuple[Cause, ...]:
    """The causes of sampler and trainer, with what float64 says of them."""
    decode = next(one for one in conditions if one.name == DECODE)
    return tuple(_informed(one, decode) for one in main.causes)


def _informed(cause: Cause, decode: Judged) -> Cause:
    assert decode.wide is not None or not (decode.rounds or decode.computes_else)
    size = 0.0 if decode.wide is None else decode.wide.largest or 0.0
    if decode.rounds and cause.structural and cause.claimed:
        why = f"the same two computations in float64 differ by up to {size:.4g}: rounding"
    elif decode.computes_else and cause.name in _DRIFT and cause.claimed:
        why = f"the same two computations in float64 differ by up to {size:.4g}: no rounding"
    else:
        return cause
    return replace(cause, claimed=False, against=(why, *cause.against))
