"""Do the digests agree? Own base, replicas on ranks, shards that add up, measured references.

The comparing half of `decision`: pure, without torch. A tensor that cannot be compared because
nobody declared its placement is a finding, never a silent omission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verify.digests import Digest
from verify.evidence import FIRST, Execution, Plan
from verify.placements import lookup
from verify.verdicts import Finding

NO_PLACEMENT = "no placement declared"


def differences(
    plan: Plan, claim: str, base: Mapping[int, Execution], counted: Sequence[Execution]
) -> tuple[list[Finding], set[str]]:
    """Findings for everything that differs, and the names of tensors that were compared."""
    findings: list[Finding] = []
    compared: set[str] = set()
    free: list[Finding] = []
    for e in sorted(counted, key=lambda e: e.arm == "free"):
        first = base.get(e.rank)
        if e.compare == "own" and first is not None and first.failure is None:
            if e.arm != "free":
                findings += _against(e, first.outputs, compared)
                findings += _generators(e, first)
            elif not plan.random:
                # a difference in this arm alone means that randomness is consumed, unless it is
                # rare and no generator was drawn from
                drawn = bool(e.consumed) or _always(e, first, counted)
                reason = None if findings or not drawn else "consumes-global-rng"
                later = _against(e, first.outputs, compared, reason=reason)
                free = [*free, *later]
        elif e.compare == "exact" and e.expected is not None:
            reason = "golden-differs" if claim == "golden" else None
            findings += _against(e, e.expected, compared, reason=reason, partial=True)
        if e.compare in ("exact", "measured"):  # one output that is lost leaves the others judged
            findings += _measured(e, compared)
    findings += free
    findings += _sums(plan, [e for e in counted if e.compare == "sum"], compared)
    if claim == "rank":
        findings += _replicas(plan, base, counted)
    if claim in ("rank", "ep", "golden"):
        findings += _unplaced(plan, base)
    if claim == "batch" and counted and not compared:
        findings.append(Finding("no-batch-dim", "no output has a declared batch dimension"))
    return findings, compared


def _generators(e: Execution, first: Execution) -> list[Finding]:
    """The state in which the global generators are left is an output, too."""
    known = sorted(set(e.generator) & set(first.generator)) if e.same_inputs else []
    return [
        _finding(
            e,
            "bits-differ",
            f"the global generator {name} is left in another state than by the base execution",
            f"generator.{name}",
        )
        for name in known
        if e.generator[name] != first.generator[name]
    ]


def _always(e: Execution, first: Execution, counted: Sequence[Execution]) -> bool:
    """Whether every execution of this rank in the arm of `e` differs from the base."""
    arm = [o for o in counted if (o.rank, o.arm, o.compare) == (e.rank, e.arm, e.compare)]
    return len(arm) > 1 and all(dict(o.outputs) != dict(first.outputs) for o in arm)


def runs_that_differ(findings: Sequence[Finding]) -> int:
    """The number of executions (not tensors, not ranks) in which something differed."""
    later = [f for f in findings if f.run is not None and f.variant != FIRST]
    return len({(f.process, f.variant, f.run) for f in later})


def kind_of(plan: Plan, name: str) -> str | None:
    """`replicated`, `sharded`, `local` or None, from the plan's declared placements."""
    found = lookup(plan.placement, name)
    if found is None and name.startswith("grad."):
        found = lookup(plan.placement, name.removeprefix("grad."))
        if found is not None and not found.startswith("sharded"):
            found = None
    return found.partition("(")[0] if found is not None else None


def _against(
    e: Execution,
    expected: Mapping[str, str],
    compared: set[str],
    *,
    reason: str | None = None,
    partial: bool = False,
) -> list[Finding]:
    findings = []
    skipped = set(e.not_compared)
    missing = sorted(set(expected) - set(e.outputs) - skipped)
    extra = [] if partial else sorted(set(e.outputs) - set(expected))
    for name in missing + extra:
        what = "is missing" if name in missing else "is there, but not in the base execution"
        findings.append(_finding(e, "outputs-differ", f"output {name} {what}", name))
    for name in sorted(set(expected) & set(e.outputs), key=_results_first):
        compared.add(name)
        if e.outputs[name] != expected[name]:
            findings.append(_differs(e, name, expected[name], e.outputs[name], reason))
    return findings


def _results_first(name: str) -> tuple[bool, str]:
    """A wrong result makes its gradients wrong, so it is told first."""
    return name.startswith("grad."), name


def _differs(e: Execution, name: str, wanted: str, got: str, reason: str | None = None) -> Finding:
    golden = reason == "golden-differs"
    before, after = _header(wanted), _header(got)
    if before != after:
        return _finding(e, "outputs-differ", f"{name} is {after}, expected {before}", name)
    detail = f"{name} has other bits than {'its golden' if golden else 'expected'}"
    if reason == "consumes-global-rng":
        detail = f"{name} has other bits when the global generators are left free"
    return _finding(e, reason or "bits-differ", detail, name)


def _header(text: str) -> str:
    try:
        digest = Digest.parse(text)
    except ValueError:
        return text
    return f"{digest.dtype}{list(digest.shape)}"


def _finding(e: Execution, reason: str, detail: str, name: str | None) -> Finding:
    difference = e.differences.get(name) if name is not None else None
    return Finding(
        reason,
        detail,
        tensor=name,
        rank=e.rank,
        run=e.run,
        process=e.process or None,
        variant=e.variant,
        difference=difference,
    )


def _sums(plan: Plan, executions: Sequence[Execution], compared: set[str]) -> list[Finding]:
    """Shards of each subgroup add up to what the base says the whole should be."""
    findings: list[Finding] = []
    together: dict[tuple[str, int, int], list[Execution]] = {}
    for e in executions:
        together.setdefault((e.variant, e.run, e.process), []).append(e)
    for members in together.values():
        by_rank = {e.rank: e for e in members}
        if len(by_rank) < plan.ranks:
            # half a sum proves nothing
            absent = sorted(set(range(plan.ranks)) - set(by_rank))
            detail = f"no evidence of ranks {absent} for run {members[0].run}"
            findings.append(Finding("missing-rank", detail, variant=members[0].variant))
            continue
        names = sorted({n for e in members for n in e.expected or {}})
        for e in members:
            for name in sorted(set(e.outputs) - set(names) - set(e.not_compared)):
                detail = f"output {name} is there, but not in the base execution"
                findings.append(_finding(e, "outputs-differ", detail, name))
        for name in names:
            replicated = kind_of(plan, name) == "replicated"
            wanted = total([(e.expected or {}).get(name) for e in members], replicated=replicated)
            for group in sorted({tuple(e.group) for e in members}):
                parts = [by_rank[rank].outputs.get(name) for rank in group if rank in by_rank]
                got = total(parts, replicated=replicated)
                compared.add(name)
                if got is None or got != wanted:
                    e = next(
                        (by_rank[r] for r in group if name in by_rank[r].differences),
                        by_rank[group[0]],
                    )
                    if got is None:
                        detail = f"{name} is missing on a rank, or its parts do not fit together"
                        findings.append(_finding(e, "outputs-differ", detail, name))
                    else:
                        findings.append(_differs(e, name, wanted or "nothing", got))
    return findings


def total(texts: Sequence[str | None], *, replicated: bool) -> str | None:
    """The digest of the whole: the common one of replicas, or the sum of parts.

    None when a part is missing, replicas differ, or parts do not belong together.
    """
    known = [text for text in texts if text is not None]
    if len(known) != len(texts) or not known:
        return None
    if replicated:
        return known[0] if len(set(known)) == 1 else None
    try:
        added = Digest.parse(known[0])
        for text in known[1:]:
            added = added + Digest.parse(text)
    except ValueError:
        return None
    return str(added)


def _replicas(
    plan: Plan, base: Mapping[int, Execution], counted: Sequence[Execution]
) -> list[Finding]:
    """Replicated tensors are equal on all ranks, in the base and in every execution."""
    findings = []
    together: dict[tuple[str, int], list[Execution]] = {("first", 0): list(base.values())}
    for e in counted:
        together.setdefault((e.variant, e.run), []).append(e)
    for members in together.values():
        for name in sorted({n for e in members for n in e.outputs}):
            if kind_of(plan, name) != "replicated":
                continue
            values = {e.rank: e.outputs.get(name) for e in sorted(members, key=lambda e: e.rank)}
            distinct = list(values.values())
            if len(set(distinct)) > 1:
                common = max(distinct, key=distinct.count)  # without a majority, the first rank's
                odd = sorted(rank for rank, value in values.items() if value != common)
                e = next(e for e in members if e.rank == odd[0])
                detail = f"replicated {name} differs on ranks {odd} of {plan.ranks}"
                findings.append(_finding(e, "ranks-differ", detail, name))
    return findings


def _unplaced(plan: Plan, base: Mapping[int, Execution]) -> list[Finding]:
    names = sorted({n for e in base.values() for n in e.outputs if kind_of(plan, n) is None})
    if plan.ranks == 1 or not names:
        return []
    return [Finding("no-placement", f"placement of {', '.join(names)} is not declared")]


def _measured(e: Execution, compared: set[str]) -> list[Finding]:
    """The two parts of `reference`: error budget and rounding places."""
    findings = []
    for name in sorted(e.measurements, key=_results_first):
        measured = e.measurements[name]
        compared.add(name)
        if 2 * measured.get("permissive", 0) > measured.get("numel", 0):
            detail = f"{name}: the budget is as large as the value in over half of the elements"
            findings.append(_finding(e, "vacuous", detail, name))
        checks: tuple[tuple[str, str, str], ...] = (
            ("nonfinite", "non-finite", "non-finite where the reference is finite"),
            ("over_budget", "over-budget", "outside the error budget"),
            ("forbidden", "wrong-rounding", "rounded away from every rounding border"),
        )
        for key, reason, text in checks:
            count = measured.get(key, 0)
            if count and not (key == "over_budget" and measured.get("nonfinite") == count):
                findings.append(_measured_finding(e, name, reason, count, text, measured))
    return findings


def _not_less_exact(measured: Mapping[str, Any]) -> list[str]:
    """Other bits are no larger error: a fused kernel that rounds less is nearer to float64."""
    error, plain = measured.get("relative_l2"), measured.get("plain_relative_l2")
    if not isinstance(error, float) or not isinstance(plain, float) or not 0 < error <= plain:
        return []
    return [
        f"its error against float64 is {error / plain:.2f} of that of a plain low-precision run: "
        "not less exact; a rounding that the contract asks for is missing, or a value is kept wider"
    ]


def _measured_finding(
    e: Execution, name: str, reason: str, count: int, text: str, measured: Mapping[str, Any]
) -> Finding:
    numel = max(int(measured.get("numel", 1)), 1)
    detail = f"{name}: {count} of {numel} elements ({100 * count / numel:.3g} %) {text}"
    key = {"non-finite": "nonfinite", "over-budget": "over_budget"}.get(reason, "forbidden")
    first = measured.get(f"first_{key}")
    lines = []
    if first:
        lines.append(
            f"first at {first['index']}: {first['actual']}, reference {first['reference']}"
        )
    if reason == "over-budget":
        worst_rows = ", ".join(
            f"row {row['row']}: {row['ratio']}" for row in measured.get("worst_rows", ())
        )
        lines.append(f"worst error / budget: {measured.get('worst_ratio')} ({worst_rows})")
    if reason == "wrong-rounding" and not measured.get("over_budget", 0):
        lines += _not_less_exact(measured)
    kinds = ("nonfinite", "over_budget", "forbidden")
    explanation = e.differences.get(name, {})
    if key != next((kind for kind in kinds if measured.get(kind, 0)), key):
        explanation = {}  # said once for a tensor, with the first of its findings
    lines += explanation.get("lines", ())
    return Finding(
        reason,
        detail,
        tensor=name,
        rank=e.rank,
        run=e.run,
        variant=e.variant,
        difference={"lines": lines, "suggests": [*explanation.get("suggests", ())], **measured},
    )
