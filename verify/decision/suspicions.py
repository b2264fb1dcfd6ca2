"""What makes evidence suspect, whatever the claim: exceptions, written inputs, overwritten results,
inputs that differ, outputs that say nothing, missing base executions.

Pure and torch-free, like the rest of the decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify.decision import agreement
from verify.evidence import PROBE, UNSUPPORTED, Execution, Plan
from verify.placements import lookup
from verify.verdicts import Finding


def case_findings(
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
    blind = sorted({n for e in done for n in e.not_compared if UNSUPPORTED in n})
    findings += [Finding("unsupported", f"output {name}") for name in blind]
    findings += conduct([*base.values(), *probes])
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


def failures(everything: Sequence[Execution]) -> list[Finding]:
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


def after_death(e: Execution, everything: Sequence[Execution], lost: set[int]) -> bool:
    """Whether it raised in an execution that a lost rank never reported: that is why, or may be."""
    if e.failure is None or not lost:
        return False
    key = (e.claim, e.variant, e.run, e.process)
    done = {o.rank for o in everything if (o.claim, o.variant, o.run, o.process) == key}
    return bool(lost - done)


def conduct(executions: Sequence[Execution]) -> list[Finding]:
    """Inputs that were written to, and results that were overwritten later."""
    findings = []
    # in an order of their own: of several alike the first is told, whichever record came first
    for e in sorted(executions, key=lambda e: (e.process, e.run, e.rank, e.variant)):
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
        values = {rank: e.inputs[name] for rank, e in sorted(base.items()) if name in e.inputs}
        found = list(values.values())
        if len(set(found)) > 1:
            common = max(found, key=found.count)  # without a majority, the first rank's
            odd = sorted(rank for rank, value in values.items() if value != common)
            findings.append(
                Finding("input-mismatch", f"input {name} differs on ranks {odd}", tensor=name)
            )
    return findings


def judged(plan: Plan, e: Execution) -> bool:
    """Left free, the generators of a case that draws from them on purpose prove nothing."""
    return not (plan.random and e.arm == "free")


def other_inputs_given(base: dict[int, Execution], e: Execution) -> bool:
    """Whether an execution that should have had the base's inputs had others."""
    first = base.get(e.rank)
    return first is not None and e.same_inputs and dict(e.inputs) != dict(first.inputs)


def input_findings(
    plan: Plan, base: dict[int, Execution], own: Sequence[Execution]
) -> list[Finding]:
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


def notes(
    plan: Plan,
    base: dict[int, Execution],
    probes: Sequence[Execution],
    executions: Sequence[Execution] = (),
) -> list[str]:
    """What is true and worth knowing, but no finding."""
    notes = []
    consumed = sorted({name for e in base.values() for name in e.consumed})
    if consumed:
        intended = " (declared)" if plan.random else ""
        notes.append(f"consumes global randomness: {', '.join(consumed)}{intended}")
    notes += _too_equal(plan, base, executions)
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


def _too_equal(
    plan: Plan, base: dict[int, Execution], executions: Sequence[Execution]
) -> list[str]:
    """Declared random, yet the same whatever the generators hold, or the same on all ranks.

    Only the free arm can tell: there each rank starts from a state of its own, drawn from the
    operating system; in the restored arm all ranks have the same state by design.
    """
    free = [e for e in executions if e.arm == "free" and e.failure is None and e.rank in base]
    if not plan.random or not free:
        return []
    names = sorted({name for e in free for name in e.outputs})
    silent = not any(e.outputs.get(n) != base[e.rank].outputs.get(n) for e in free for n in names)
    drawn = sorted({g for e in free for g in e.consumed})
    if silent and drawn:
        return [
            f"too equal: declared random, and {', '.join(drawn)} is drawn from, but every output is"
            " the same whatever state the global generators start from: seeded inside, so that all"
            " calls (epoch, step, worker) draw the same numbers, or what is drawn reaches no output"
        ]
    if silent:
        return ["declared random, but nothing was drawn from a global generator"]
    copies = [name for name in names if _same_on_all_ranks(plan, base, free, name)]
    if copies:
        return [
            f"too equal: {', '.join(copies)} is declared local and random, but is the same on all"
            f" {plan.ranks} ranks, although each starts from other generator states"
        ]
    return []


def _same_on_all_ranks(
    plan: Plan, base: dict[int, Execution], free: Sequence[Execution], name: str
) -> bool:
    """Whether a rank's own output, changed by the generators, has the same bits on every rank."""
    if plan.ranks == 1 or agreement.kind_of(plan, name) != "local":
        return False
    if not any(e.outputs.get(name) != base[e.rank].outputs.get(name) for e in free):
        return False
    values: dict[int, set[str | None]] = {}
    for e in free:
        values.setdefault(e.run, set()).add(e.outputs.get(name))
    return all(len(found) == 1 for found in values.values())


def _constant(e: Execution, name: str) -> bool:
    facts = e.facts.get(name)
    return facts is not None and facts.constant and facts.numel > 1
