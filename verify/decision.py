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
    common = _case_findings(plan, base, probes, told)
    claims = []
    for claim in plan.claims:
        own = [e for e in executions if e.claim == claim]
        relevant = [t for t in troubles if t.claim in (None, claim)]
        claims.append(_decide_claim(plan, claim, base, own, relevant, common, retries, disabled))
    return CaseVerdict(plan.case, plan.target, claims, _notes(plan, base, probes))


def _decide_claim(
    plan: Plan,
    claim: str,
    base: dict[int, Execution],
    own: Sequence[Execution],
    troubles: Sequence[Trouble],
    common: Sequence[Finding],
    retries: Sequence[Execution],
    disabled: frozenset[str],
) -> ClaimVerdict:
    findings = [*common, *(_of_trouble(trouble) for trouble in troubles)]
    lost = {t.rank for t in troubles if t.reason == "missing-rank" and t.rank is not None}
    everything = [*base.values(), *retries, *own]
    findings += _failures([e for e in everything if not _after_death(e, everything, lost)])
    findings += _conduct(own)
    other_inputs = _inputs(plan, base, own)
    comparable = [
        e for e in own if e.failure is None and not _other_inputs(base, e) and _judged(plan, e)
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
        findings.append(Finding("nothing-compared", "no tensor of this claim was compared"))
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
    return ClaimVerdict(
        claim=claim,
        verdict=verdict,
        findings=_limited(findings),
        executions=tried if runs_differing else least,
        differing=runs_differing,
        bound=undetected_rate(least)
        if clean and least and compared and claim not in _MEASURED
        else None,
        rate=rate_interval(runs_differing, tried) if runs_differing else None,
        ranks=[_rank_evidence(rank, own, differing) for rank in range(plan.ranks)],
        compared=sorted(compared),
        not_compared={n: why for e in own for n, why in e.not_compared.items()},
        requested=_distinct([e.requested for e in own]),
        effective=_distinct([e.effective for e in own]),
        measurements=_worst_measurements(own),
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
        # one element may well stay the same, unless nothing at all responded to the inputs
        silent = all(
            set(base[p.rank].outputs) <= set(p.unchanged) for p in probes if p.rank in base
        )
        least = 1 if silent else 2
        informative = any(f is not None and f.numel >= least and not f.constant for f in facts)
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
        # a peer's failure that no peer reported: the evidence of that peer is missing
        return [
            Finding("missing-rank", e.failure.message, rank=e.rank, run=e.run, variant=e.variant)
            for e in everything
            if e.failure is not None
        ]
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


def _after_death(e: Execution, everything: Sequence[Execution], lost: set[int]) -> bool:
    """Whether it raised in an execution that a lost rank never reported: that is why, or may be."""
    if e.failure is None or not lost:
        return False
    key = (e.claim, e.variant, e.run, e.process)
    done = {o.rank for o in everything if (o.claim, o.variant, o.run, o.process) == key}
    return bool(lost - done)


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


def _judged(plan: Plan, e: Execution) -> bool:
    """Left free, the generators of a case that draws from them on purpose prove nothing."""
    return not (plan.random and e.arm == "free")


def _other_inputs(base: dict[int, Execution], e: Execution) -> bool:
    """Whether an execution that should have had the base's inputs had others."""
    first = base.get(e.rank)
    return first is not None and e.same_inputs and dict(e.inputs) != dict(first.inputs)


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


_COUNTS = ("numel", "nonfinite", "over_budget", "rounded_elsewhere", "forbidden")


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
