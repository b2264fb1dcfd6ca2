"""From evidence to verdicts: a pure function, without torch, tested exhaustively.

It trusts digests, not what an execution says about itself, and takes missing evidence for what it
is: a claim is VERIFIED only if every rank reported, enough executions were made under a condition
that was in effect, something was compared, and nothing differed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verify.decision import agreement, patterns, suspicions
from verify.decision.ensembles import Ensemble
from verify.decision.statistics import rate_interval, undetected_rate
from verify.evidence import BASE, COLD_CACHE, FIRST, PROBE, RETRY, Execution, Plan, Record, Trouble
from verify.reasons import Verdict, worst
from verify.verdicts import CaseVerdict, ClaimVerdict, Finding, RankEvidence

MAX_FINDINGS = 20  # of one reason in one claim; the rest is counted


def decide(
    plan: Plan, records: Iterable[Record], *, disabled: frozenset[str] = frozenset()
) -> CaseVerdict:
    """The verdict on every claim of one case, from all records of all ranks and processes.

    disabled: reasons that are not found, as if their detectors did not exist; for the controls.
    """
    mine = [record for record in records if record.case == plan.case]
    executions = [record for record in mine if isinstance(record, Execution)]
    troubles = [record for record in mine if isinstance(record, Trouble)]
    base = {e.rank: e for e in executions if e.claim == BASE and e.variant == FIRST}
    probes = [e for e in executions if e.claim == BASE and e.variant == PROBE]
    retries = [e for e in executions if e.claim == BASE and e.variant == RETRY]
    told = any(t.claim is None for t in troubles)
    common = suspicions.case_findings(plan, base, probes, told)
    claims = []
    for claim in plan.claims:
        relevant = [t for t in troubles if t.claim in (None, claim)]
        claims.append(
            _decide_claim(plan, claim, base, executions, relevant, common, retries, disabled)
        )
    notes = suspicions.notes(plan, base, probes, executions)
    return CaseVerdict(plan.case, plan.target, claims, notes)


def _decide_claim(
    plan: Plan,
    claim: str,
    base: dict[int, Execution],
    executions: Sequence[Execution],
    troubles: Sequence[Trouble],
    common: Sequence[Finding],
    retries: Sequence[Execution],
    disabled: frozenset[str],
) -> ClaimVerdict:
    own = [e for e in executions if e.claim == claim]
    findings = [*common, *(_of_trouble(trouble) for trouble in troubles)]
    lost = {t.rank for t in troubles if t.reason == "missing-rank" and t.rank is not None}
    everything = [*base.values(), *retries, *own]
    findings += suspicions.failures(
        [e for e in everything if not suspicions.after_death(e, everything, lost)]
    )
    findings += suspicions.conduct(own)
    other_inputs = suspicions.input_findings(plan, base, own)
    comparable = [
        e
        for e in own
        if e.failure is None
        and not suspicions.other_inputs_given(base, e)
        and suspicions.judged(plan, e)
    ]
    counted = [e for e in comparable if e.in_effect]
    # a difference counts although the condition was not in effect; equality then does not
    differing, _ = agreement.differences(plan, claim, base, comparable)
    _, compared = agreement.differences(plan, claim, base, counted)
    if any(f.reason == "input-mismatch" for f in common):
        # ranks that were given other inputs may differ from each other
        differing = [f for f in differing if claim != "ep" and f.reason != "ranks-differ"]
    findings += differing
    findings += other_inputs
    explained = any(f.verdict is Verdict.MISMATCH for f in findings)
    troubled = bool(troubles or other_inputs or _broken(base))
    findings += _enough(plan, claim, own, counted, troubled, explained)
    if not compared and not findings:
        left = {name: why for e in own for name, why in e.not_compared.items()}
        told = "; ".join(f"{name}: {why}" for name, why in sorted(left.items()))
        detail = "no tensor of this claim was compared"
        findings.append(Finding("nothing-compared", f"{detail} ({told})" if told else detail))
    findings = [finding for finding in findings if finding.reason not in disabled]
    # the free arm asks another question; it must not thin out or raise the rate of the first
    least = _least(plan, [e for e in counted if e.arm == "restored"])
    runs_differing = agreement.runs_that_differ(
        [f for f in differing if f.reason != "consumes-global-rng" and f.variant != "free"]
    )
    # distinct executions over all ranks; a rank that died made fewer than the others
    tried = max(
        len({(e.process, e.variant, e.run) for e in comparable if e.arm == "restored"}),
        runs_differing,
    )
    clean = not any(f.verdict is Verdict.MISMATCH for f in findings)
    verdict = worst([f.verdict for f in findings]) if findings else Verdict.VERIFIED
    seen = Ensemble(plan, claim, base, executions, comparable, differing, frozenset(compared))
    return ClaimVerdict(
        claim=claim,
        verdict=verdict,
        findings=patterns.explain(seen, _limited(findings)),
        executions=tried if runs_differing else least,
        differing=runs_differing,
        bound=undetected_rate(least) if clean and least and compared else None,
        rate=rate_interval(runs_differing, tried) if runs_differing and claim in _RATED else None,
        ranks=[_rank_evidence(rank, own, differing) for rank in range(plan.ranks)],
        compared=sorted(compared),
        not_compared={
            n: why for e in own for n, why in e.not_compared.items() if n not in compared
        },
        requested=_distinct([e.requested for e in own]),
        effective=_distinct([e.effective for e in own]),
        measurements=_worst_measurements(own),
        seconds=sum(e.seconds for e in own),
    )


_RATED = ("repeat", "process", "contention", "rank")  # the same thing again and again


def _of_trouble(trouble: Trouble) -> Finding:
    return Finding(
        trouble.reason, trouble.detail, rank=trouble.rank, process=trouble.process or None
    )


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
    needed = plan.runs.get(claim, 1)
    for rank in range(plan.ranks):
        mine = [e for e in counted if e.rank == rank]
        idle = [e for e in own if e.rank == rank and not e.in_effect]
        if claim in _EVERY_VARIANT and len(mine) >= needed:
            held = {e.variant for e in mine}
            idle = [e for e in idle if e.variant not in held]
            if idle and not troubled:
                findings += _idle(claim, idle, rank)
        elif len(mine) < needed and not troubled:
            few = Finding("too-few-runs", f"{len(mine)} executions of at least {needed}", rank=rank)
            findings += _idle(claim, idle, rank) if idle else [few]
    return findings


# one kind of load or allocation in effect says nothing about another that never was
_EVERY_VARIANT = ("memory", "contention", "stream", "sms", "graph")


def _idle(claim: str, idle: Sequence[Execution], rank: int) -> list[Finding]:
    """Executions of one rank during which the condition was not in effect, by setting."""
    findings = []
    variants = list(dict.fromkeys(e.variant for e in idle))
    for variant in variants:
        without = [e for e in idle if e.variant == variant]
        what = without[-1]
        effect = f"requested {dict(what.requested)}, in effect {dict(what.effective)}"
        if claim == "contention" and variant != COLD_CACHE:
            detail = f"{len(without)} executions without any load beside them"
            if len(variants) > 1 or "load_blocks" in what.effective:
                detail = f"{len(without)} executions without the load beside all of them: {effect}"
            findings.append(Finding("no-overlap", detail, rank=rank, variant=variant))
        else:
            findings.append(Finding("no-effect", effect, rank=rank, variant=variant))
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


_COUNTS = ("numel", "permissive", "nonfinite", "over_budget", "rounded_elsewhere", "forbidden")


def _worst_measurements(own: Sequence[Execution]) -> dict[str, Mapping[str, Any]]:
    """By tensor: counts summed over ranks, everything else from the rank with the worst ratio."""
    found: dict[str, dict[str, Any]] = {}
    for e in own:
        for name, measured in e.measurements.items():
            mine = {**measured, "rank": e.rank}
            other = found.get(name)
            if other is not None:
                counts = {key: other.get(key, 0) + mine.get(key, 0) for key in _COUNTS}
                pair = sorted((other, mine), key=lambda m: float(m.get("worst_ratio", 0.0)))
                mine = {**pair[1], **counts}
            found[name] = mine
    return dict(found)


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
