"""Decides what pairs, numbers, causes and gates together support. Pure; missing evidence no pass.

What is structurally wrong (misalignments, values that cannot be log-probabilities, a structural
cause that is claimed) is a MISMATCH by itself. Numeric drift is measured, and judged only by a
bound that the user set. The reasons are a closed list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from verify.onpolicy.causes.table import Cause
from verify.onpolicy.gates import Gate, Outcome, look
from verify.onpolicy.misalignments import KINDS, Misalignment
from verify.onpolicy.numbers import Numbers
from verify.onpolicy.pairing import Pairs
from verify.onpolicy.routing import RoutingCheck
from verify.onpolicy.routing_table import FAULTS, WRONG, Fault
from verify.onpolicy.samples import Problem
from verify.reasons import EXIT_CODES, Reason, Verdict, worst

_M, _U = Verdict.MISMATCH, Verdict.UNVERIFIED
ROUNDING = 0.1  # above 0: what logit - logsumexp can leave in bfloat16 for logits below 32

ONPOLICY_REASONS: Mapping[str, Reason] = MappingProxyType(
    {
        reason.name: reason
        for reason in (
            Reason(
                "misaligned",
                _M,
                "the two sides do not speak of the same tokens, or a record contradicts itself",
                "see the kind of misalignment; nothing that is misaligned was scored",
            ),
            Reason(
                "structural-cause",
                _M,
                "the two sides did not compute the same quantity",
                "see the cause, its evidence and its remedy",
            ),
            Reason(
                "routing-record",
                _M,
                "recorded experts are not those of their tokens or layers: a replay would be wrong",
                "see the fault of the record",
            ),
            Reason(
                "non-finite",
                _M,
                "NaN or infinity as the log-probability of a token that counts",
                "look for non-finite logits; do not replace the value. -inf is no probability of"
                " a token that was sampled: look at what cut the support",
            ),
            Reason(
                "no-probability",
                _M,
                "a log-probability above 0 by more than rounding, of a token that counts",
                "dump log-probabilities: no probabilities, no losses (-log p), no logits",
            ),
            Reason(
                "experts-differ",
                _M,
                "mok's experts gave equal rows other bits in other company, which they never do",
                "report it, with the shapes and the device: it is a fault of mok",
            ),
            Reason(
                "bound-exceeded",
                _M,
                "a figure is beyond a bound that was set",
                "see the causes; or set another bound",
            ),
            Reason(
                "nothing-compared",
                _U,
                "no token has a value on both sides and counts",
                "see misalignments, mask and problems; give log-probabilities of both sides",
            ),
            Reason(
                "vacuous",
                _U,
                "every compared value is the same number, so equal values prove nothing",
                "dump the values that were computed",
            ),
            Reason(
                "missing-sample",
                _U,
                "samples of one file have nothing to be compared with",
                "give both files of the same step, with ids and values for every sample",
            ),
            Reason(
                "missing-values",
                _U,
                "tokens that count have no value on a side",
                "dump a value for every token that counts; null is no value",
            ),
            Reason(
                "not-read",
                _U,
                "a record or a field could not be read",
                "see problems; mend the file",
            ),
            Reason(
                "not-measured",
                _U,
                "a bound was set on a figure that was not measured, or is NaN",
                "see why; NaN is neither under nor over a bound",
            ),
            Reason(
                "not-run",
                _U,
                "a condition of a model that was asked for could not be made",
                "give a model that takes what it needs, or leave it out: --layout NAME",
            ),
            Reason(
                "no-bound",
                _U,
                "values differ, nothing structural was found, and no bound says how much may be",
                'set one, such as --fail-on "differing_tokens>0" or "abs_p99>0.05"',
            ),
        )
    }
)


@dataclass(frozen=True)
class Finding:
    """One reason that applies. what: in numbers, with texts from files as they are: escape them.

    kind: a name of KINDS for misaligned and missing-sample, of the cause, of the routing's fault,
    or of the gate's figure.
    count: samples, tokens or records concerned. advice: what to do, where it is not that of the
    kind or of the reason.
    """

    reason: str
    what: str
    kind: str = ""
    count: int = 1
    advice: str = ""

    @property
    def verdict(self) -> Verdict:
        return ONPOLICY_REASONS[self.reason].verdict

    @property
    def remedy(self) -> str:
        """What to do, of the cause or the kind of misalignment where there is one."""
        if self.advice:
            return self.advice
        if self.reason == "routing-record":
            return FAULTS[self.kind]
        kind = KINDS.get(self.kind) if self.reason in ("misaligned", "missing-sample") else None
        return kind.remedy if kind else ONPOLICY_REASONS[self.reason].remedy

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of the report."""
        return {
            "reason": self.reason,
            "verdict": str(self.verdict),
            "kind": self.kind,
            "count": self.count,
            "what": self.what,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class OnPolicyVerdict:
    """The verdict with all findings, MISMATCH first, and what each gate said."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def judge(
    pairs: Pairs,
    numbers: Numbers,
    causes: Sequence[Cause] = (),
    gates: Sequence[Gate] = (),
    routing: RoutingCheck | None = None,
) -> OnPolicyVerdict:
    """The verdict on one pair of dumps. routing: what `routing.check` says of recorded experts.

    VERIFIED: nothing is structurally wrong or missing, and every compared token has equal values
    or every gate that limits the mismatch holds. MISMATCH: a structural fault, or a gate fired.
    UNVERIFIED: nothing was compared, evidence is missing, or values differ and no bound was set.
    """
    outcomes = look(gates, pairs, numbers)
    found = [
        *_misaligned(pairs.misalignments),
        *(
            Finding("structural-cause", _cause(cause), cause.name, advice=cause.remedy)
            for cause in causes
            if cause.structural and cause.claimed
        ),
        *_routing(routing),
        *_non_finite(pairs, numbers),
        *_no_probability(pairs, numbers),
        *(
            Finding("bound-exceeded", f"{one.gate.text}: {_value(one)}", one.gate.name)
            for one in outcomes
            if one.fired
        ),
        *_missing(pairs, numbers),
        *(
            Finding("not-measured", f"{one.gate.text}: {_unmeasured(one)}", one.gate.name)
            for one in outcomes
            if one.fired is None
        ),
    ]
    if numbers.figures["differing_tokens"] and not any(one.gate.limits for one in outcomes):
        found.append(
            Finding(
                "no-bound",
                _drift(numbers) + (_UNLIMITED if gates else ""),
                count=_count(numbers, "differing_tokens"),
            )
        )
    found.sort(key=lambda one: one.verdict is not _M)
    verdict = worst([one.verdict for one in found]) if found else Verdict.VERIFIED
    return OnPolicyVerdict(verdict, tuple(found), outcomes)


def _misaligned(misalignments: Sequence[Misalignment]) -> list[Finding]:
    by_kind: dict[str, list[Misalignment]] = {}
    for one in misalignments:
        by_kind.setdefault(one.kind, []).append(one)
    found = []
    for name in sorted(by_kind, key=tuple(KINDS).index):
        ones = by_kind[name]
        reason = "misaligned" if KINDS[name].verdict is _M else "missing-sample"
        samples = len({one.key for one in ones})  # which both sides may lack something of
        said = "1 sample" if samples == 1 else f"{samples:,} samples"
        what = f"{said}, first {ones[0].key}: {ones[0].what}"
        found.append(Finding(reason, what, name, samples))
    return found


def _routing(check: RoutingCheck | None) -> list[Finding]:
    by_kind: dict[str, list[Fault]] = {}
    for one in check.faults if check is not None else ():
        if one.kind in WRONG:
            by_kind.setdefault(one.kind, []).append(one)
    return [
        Finding("routing-record", f"{ones[0].where}: {ones[0].what}", kind, len(ones))
        for kind, ones in by_kind.items()
    ]


def _cause(cause: Cause) -> str:
    where = f" ({cause.where})" if cause.where else ""
    return f"{cause.name}{where}" + (f": {cause.for_[0]}" if cause.for_ else "")


def _non_finite(pairs: Pairs, numbers: Numbers) -> list[Finding]:
    found = []
    for side, column in (("trainer", pairs.trainer), ("rollout", pairs.rollout)):
        count = _count(numbers, f"nan_{side}") + _count(numbers, f"inf_{side}")
        if count:
            row = int(np.flatnonzero(pairs.scored & ~np.isfinite(column))[0])
            key = pairs.samples[int(pairs.sample[row])].key
            what = (
                f"{count:,} of the {side}, first {key} position {pairs.position[row]}:"
                f" {column[row]}"
            )
            found.append(Finding("non-finite", what, side, count))
    return found


def _no_probability(pairs: Pairs, numbers: Numbers) -> list[Finding]:
    """Values above 0 on either side; equal ones too, since equal losses are no evidence."""
    found = []
    for side, column in (("trainer", pairs.trainer), ("rollout", pairs.rollout)):
        if not numbers.figures[f"above_zero_{side}"]:
            continue
        rows = np.flatnonzero(pairs.finite & (column > ROUNDING))
        if rows.size:
            row = int(rows[0])
            key = pairs.samples[int(pairs.sample[row])].key
            what = (
                f"{rows.size:,} of the {side}, first {key} position {pairs.position[row]}:"
                f" {column[row]}"
            )
            found.append(Finding("no-probability", what, side, int(rows.size)))
    return found


def _missing(pairs: Pairs, numbers: Numbers) -> list[Finding]:
    found = []
    compared = _count(numbers, "finite_tokens")
    if not compared:
        found.append(Finding("nothing-compared", _nothing(numbers), advice=_of_all(pairs)))
    elif not numbers.figures["differing_tokens"] and _constant(pairs):
        value = pairs.trainer[pairs.scored][0]
        found.append(
            Finding("vacuous", f"{compared:,} tokens, all of them {value}", count=compared)
        )
    absent = [
        f"{count:,} of the {side}"
        for side in ("trainer", "rollout")
        if (count := _count(numbers, f"absent_{side}"))
    ]
    if absent:
        rows = pairs.counted & ~pairs.present
        row = int(np.flatnonzero(rows)[0])
        key = pairs.samples[int(pairs.sample[row])].key
        what = f"{' and '.join(absent)}, first {key} position {pairs.position[row]}"
        found.append(Finding("missing-values", what, count=int(np.count_nonzero(rows))))
    unread = [problem for problem in pairs.problems if problem.kind != "note"]
    if unread:
        found.append(Finding("not-read", _problem(unread[0], len(unread)), count=len(unread)))
    return found


def _constant(pairs: Pairs) -> bool:
    """All values are one number; a single value says nothing of that, unless it is 0."""
    values = pairs.trainer[pairs.scored]
    return bool(np.all(values == values[0])) and (len(values) > 1 or values[0] == 0)


def _nothing(numbers: Numbers) -> str:
    figures = numbers.figures
    return (
        f"aligned samples: {figures['samples']:,}, misaligned: {figures['misaligned_samples']:,};"
        f" tokens: {figures['tokens']:,}, masked: {figures['masked_tokens']:,}"
    )


def _of_all(pairs: Pairs) -> str:
    """What to do of the only kind of misalignment that there is, "" where it is not of all."""
    kinds = {one.kind for one in pairs.misalignments}
    return KINDS[kinds.pop()].remedy if len(kinds) == 1 and not pairs.samples else ""


def _problem(problem: Problem, count: int) -> str:
    of = f", {problem.field}" if problem.field else ""
    return f"{count:,} in all, first {problem.place}{of}: {problem.what}"


def _value(outcome: Outcome) -> str:
    return f"{outcome.value:,}" if isinstance(outcome.value, int) else str(outcome.value)


def _unmeasured(outcome: Outcome) -> str:
    return "not measured" if outcome.value is None else "NaN"


def _drift(numbers: Numbers) -> str:
    figures = numbers.figures
    differing, compared = figures["differing_tokens"], figures["compared_tokens"]
    largest = figures["abs_max"]
    size = "" if largest is None else f", largest |d| {largest:.4g}"
    return f"{differing:,} of {compared:,} tokens differ{size}"


_UNLIMITED = (
    "; the bounds that were set let a wide mismatch pass: signed means cancel, extremes see one"
    " sign, spreads no constant; set one on differing_tokens, abs_mean, abs_p99, abs_max or k3"
)


def _count(numbers: Numbers, name: str) -> int:
    return int(numbers.figures[name] or 0)
