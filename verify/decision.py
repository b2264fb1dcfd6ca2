"""From evidence to verdicts: a pure function, without torch, tested exhaustively.

It trusts digests, not what an execution says about itself, and takes missing evidence for what it
is: a claim is VERIFIED only if every rank reported, enough executions were made under a condition
that was in effect, something was compared, and nothing differed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verify import agreement
from verify.evidence import BASE, FIRST, PROBE, RETRY, Execution, Plan, Record, Trouble
from verify.placements import lookup
from verify.reasons import Verdict, worst
from verify.statistics import rate_interval, undetected_rate
from verify.verdicts import CaseVerdict, ClaimVerdict, Finding, RankEvidence

MAX_FINDINGS = 20  # of one reason in one claim; the rest is counted


def decide(plan: Plan, records: Iterable[Record]) -> CaseVerdict:
    """The verdict on every claim of one case, from all records of all ranks and processes."""
    mine = [record for record in records if record.case == plan.case]
    executions = [record for record in mine if isinstance(record, Execution)]
    troubles = [record for record in mine if isinstance(record, Trouble)]
    base = {e.rank: e for e in executions if e.claim == BASE and e.variant == FIRST}
    probes = [e for e in executions if e.claim == BASE and e.variant == PROBE]
    retries = [e for e in executions if e.claim == BASE and e.variant == RETRY]
    told = any(t.claim is None for t in troubles)
    common = _case_findings(plan, base, probes, told)
    claims = []
    for claim in plan.claims:
        own = [e for e in executions if e.claim == claim]
        relevant = [t for t in troubles if t.claim in (None, claim)]
        claims.append(_decide_claim(plan, claim, base, own, relevant, common, retries))
    return CaseVerdict(plan.case, plan.target, claims, _notes(plan, base, probes))


def _decide_claim(
    plan: Plan,
    claim: str,
    base: dict[int, Execution],
    own: Sequence[Execution],
    troubles: Sequence[Trouble],
    common: Sequence[Finding],
    retries: Sequence[Execution],
) -> ClaimVerdict:
    findings = [*common, *(_of_trouble(trouble) for trouble in troubles)]
    findings += _failures([*base.values(), *retries, *own])
    findings += _conduct(own)
    counted = [e for e in own if e.failure is None and e.in_effect]
    differing, compared = agreement.differences(plan, claim, base, counted)
    findings += differing
    findings += _inputs(plan, base, own)
    explained = any(f.verdict is Verdict.MISMATCH for f in findings)
    findings += _enough(plan, claim, own, counted, bool(troubles or _broken(base)), explained)
    if not compared and not findings:
        findings.append(Finding("nothing-compared", "no tensor of this claim was compared"))
    least = _least(plan, counted)
    runs_differing = agreement.runs_that_differ(differing)
    clean = not any(f.verdict is Verdict.MISMATCH for f in findings)
    verdict = worst([f.verdict for f in findings]) if findings else Verdict.VERIFIED
    return ClaimVerdict(
        claim=claim,
        verdict=verdict,
        findings=_limited(findings),
        executions=least,
        differing=runs_differing,
        bound=undetected_rate(least) if clean and least and claim not in _MEASURED else None,
        rate=rate_interval(runs_differing, least) if runs_differing and least else None,
        ranks=[_rank_evidence(rank, own, differing) for rank in range(plan.ranks)],
        compared=sorted(compared),
        not_compared={n: why for e in own for n, why in e.not_compared.items()},
        requested=_distinct([e.requested for e in own]),
        effective=_distinct([e.effective for e in own]),
        measurements={n: m for e in own for n, m in e.measurements.items()},
        seconds=sum(e.seconds for e in own),
    )


_MEASURED = ("reference", "exact")


def _case_findings(
    plan: Plan, base: dict[int, Execution], probes: Sequence[Execution], told: bool
) -> list[Finding]:
    """What holds for every claim, since every claim compares with the base execution.

    `told`: a trouble already says why executions are missing.
    """
    findings: list[Finding] = []
    for rank in range(plan.ranks):
        if rank not in base and not told:
            reason = "missing-rank" if plan.ranks > 1 else "not-run"
            findings.append(Finding(reason, "no base execution was reported", rank=rank))
    done = [e for e in base.values() if e.failure is None]
    if done and not any(e.outputs for e in done):
        ignored = sorted({name for e in done for name in e.not_compared})
        found = f"; it returned {', '.join(ignored)}" if ignored else ""
        findings.append(Finding("nothing-compared", f"the case returned no tensors{found}"))
    elif done and all(
        facts.constant or not facts.numel for e in done for facts in e.facts.values()
    ):
        findings.append(
            Finding("vacuous", "every output is empty or has the same value in every element")
        )
    findings += _conduct([*base.values(), *probes])
    findings += _replicas_of_inputs(plan, base)
    by_name: dict[str, set[int]] = {}
    for probe in probes:
        for name in probe.unchanged:
            if not any(lookup({pattern: True}, name) for pattern in plan.constants):
                by_name.setdefault(name, set()).add(probe.rank)
    for name, ranks in sorted(by_name.items()):
        facts = [base[r].facts.get(name) for r in base]
        informative = any(f is not None and f.numel > 1 and not f.constant for f in facts)
        if len(ranks) == len(probes) and informative:
            findings.append(
                Finding(
                    "cached-output",
                    f"{name} did not change when the inputs did",
                    tensor=name,
                    variant=PROBE,
                )
            )
    return findings


def _of_trouble(trouble: Trouble) -> Finding:
    return Finding(
        trouble.reason, trouble.detail, rank=trouble.rank, process=trouble.process or None
    )


def _failures(everything: Sequence[Execution]) -> list[Finding]:
    """Exceptions: in every execution it is a broken case, in some it is a mismatch."""
    failed = [e for e in everything if e.failure is not None and not e.failure.after_peer]
    if not failed:
        return []
    succeeded = [e for e in everything if e.failure is None]
    reason = "raises-sometimes" if succeeded else "case-error"
    return [
        Finding(
            reason,
            f"{e.failure.type}: {e.failure.message}" if e.failure else "",
            rank=e.rank,
            run=e.run,
            process=e.process or None,
            variant=e.variant,
            difference={"traceback": e.failure.traceback} if e.failure else None,
        )
        for e in failed
    ]


def _conduct(executions: Sequence[Execution]) -> list[Finding]:
    """Inputs that were written to, and results that were overwritten later."""
    findings = []
    for e in executions:
        where = {"rank": e.rank, "run": e.run, "variant": e.variant}
        for name in e.mutated:
            detail = f"input {name} has other bits after the execution"
            findings.append(Finding("input-mutated", detail, tensor=name, **where))  # type: ignore[arg-type]
        for name in e.overwritten:
            detail = f"{name}, still held by the caller, was overwritten by the next call"
            findings.append(Finding("aliased-output", detail, tensor=name, **where))  # type: ignore[arg-type]
    seen: dict[tuple[str, str | None], Finding] = {}
    for finding in findings:
        seen.setdefault((finding.reason, finding.tensor), finding)
    return list(seen.values())


def _replicas_of_inputs(plan: Plan, base: dict[int, Execution]) -> list[Finding]:
    findings = []
    names = sorted({name for e in base.values() for name in e.inputs})
    for name in names:
        if agreement.kind_of(plan, name) in ("sharded", "local"):
            continue
        values = {rank: e.inputs[name] for rank, e in base.items() if name in e.inputs}
        if len(set(values.values())) > 1:
            common = max(set(values.values()), key=list(values.values()).count)
            odd = sorted(rank for rank, value in values.items() if value != common)
            findings.append(
                Finding("input-mismatch", f"input {name} differs on ranks {odd}", tensor=name)
            )
    return findings


def _inputs(plan: Plan, base: dict[int, Execution], own: Sequence[Execution]) -> list[Finding]:
    """The same inputs in every execution that is compared with the base."""
    findings = []
    for e in own:
        first = base.get(e.rank)
        if first is None or not e.same_inputs:
            continue
        wrong = sorted(
            n for n in {*e.inputs, *first.inputs} if e.inputs.get(n) != first.inputs.get(n)
        )
        for name in wrong:
            findings.append(
                Finding(
                    "input-mismatch",
                    f"input {name} differs from the base execution's",
                    tensor=name,
                    rank=e.rank,
                    run=e.run,
                    process=e.process or None,
                    variant=e.variant,
                )
            )
    return findings


def _broken(base: dict[int, Execution]) -> bool:
    return any(e.failure is not None for e in base.values())


def _enough(
    plan: Plan,
    claim: str,
    own: Sequence[Execution],
    counted: Sequence[Execution],
    troubled: bool,
    explained: bool,
) -> list[Finding]:
    """Whether the condition was in effect, often enough, on every rank."""
    if explained:
        return []  # a difference that was seen needs no further executions
    if not own:
        return [] if troubled else [Finding("not-run", "promised, but never executed")]
    if any(e.failure is not None for e in own):
        return []
    findings: list[Finding] = []
    idle = [e for e in own if not e.in_effect]
    needed = plan.runs.get(claim, 1)
    for rank in range(plan.ranks):
        count = sum(e.rank == rank for e in counted)
        if count >= needed or troubled:
            continue
        without = sum(e.rank == rank for e in idle)
        if without and claim == "contention":
            detail = f"{without} executions without any load beside them"
            findings.append(Finding("no-overlap", detail, rank=rank))
        elif without:
            what = next(e for e in idle if e.rank == rank)
            detail = f"requested {dict(what.requested)}, in effect {dict(what.effective)}"
            findings.append(Finding("no-effect", detail, rank=rank, variant=what.variant))
        else:
            detail = f"{count} executions of at least {needed}"
            findings.append(Finding("too-few-runs", detail, rank=rank))
    return findings


def _least(plan: Plan, counted: Sequence[Execution]) -> int:
    """Executions per rank; the rank with the fewest counts."""
    return min((sum(e.rank == r for e in counted) for r in range(plan.ranks)), default=0)


def _rank_evidence(
    rank: int, own: Sequence[Execution], differing: Sequence[Finding]
) -> RankEvidence:
    mine = [e for e in own if e.rank == rank]
    return RankEvidence(
        rank=rank,
        executions=len(mine),
        differing=agreement.runs_that_differ([f for f in differing if f.rank in (rank, None)]),
        variants=list(dict.fromkeys(e.variant for e in mine)),
        outputs=mine[-1].outputs if mine else {},
    )


def _notes(plan: Plan, base: dict[int, Execution], probes: Sequence[Execution]) -> list[str]:
    """What is true and worth knowing, but no finding."""
    notes = []
    consumed = sorted({name for e in base.values() for name in e.consumed})
    if consumed:
        intended = " (declared)" if plan.random else ""
        notes.append(f"consumes global randomness: {', '.join(consumed)}{intended}")
    constant = sorted(
        {
            name
            for e in base.values()
            for name in e.facts
            if all(_constant(other, name) for other in base.values())
        }
    )
    if constant:
        notes.append(f"constant in every element, so little is proven: {', '.join(constant)}")
    nonfinite = sorted({n for e in base.values() for n, f in e.facts.items() if f.nonfinite})
    if nonfinite:
        notes.append(f"holds NaN or infinity: {', '.join(nonfinite)}")
    ignored = sorted({name for e in base.values() for name in e.not_compared})
    if ignored:
        notes.append(f"returned but no tensor, not compared: {', '.join(ignored)}")
    if any(probe.failure is not None for probe in probes):
        notes.append("raised with other inputs, so a cached result could not be ruled out")
    return notes


def _constant(e: Execution, name: str) -> bool:
    facts = e.facts.get(name)
    return facts is not None and facts.constant and facts.numel > 1


def _distinct(values: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for value in values:
        if value and value not in found:
            found.append(value)
    return found


def _limited(findings: Sequence[Finding]) -> list[Finding]:
    """The first findings of every reason; explained ones come first."""
    ordered = sorted(findings, key=lambda f: (f.verdict is not Verdict.MISMATCH, not f.difference))
    counts: dict[str, int] = {}
    kept = []
    for finding in ordered:
        counts[finding.reason] = counts.get(finding.reason, 0) + 1
        if counts[finding.reason] <= MAX_FINDINGS:
            kept.append(finding)
    return kept
