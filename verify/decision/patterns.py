"""What all executions of a claim say together, added to the findings that are there already.

One difference is explained where it was seen (`explanation`); this says which settings, ranks and
processes differ, which agree, and which outputs never differed. Pure and torch-free. It refuses to
decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from verify.decision.causes import CAUSES
from verify.decision.ensembles import (
    UNCHANGED,
    VARIED,
    Ensemble,
    by_rank,
    content,
    listed,
    process_groups,
    process_settings,
    ranks_of,
    split,
    unchanged,
)
from verify.verdicts import Finding

_STORED = "golden-differs"  # one execution: other runs say nothing about it
_TOLD = ("bits-differ", "outputs-differ", "ranks-differ", "consumes-global-rng")


def explain(evidence: Ensemble, findings: Sequence[Finding]) -> list[Finding]:
    """The findings; to the first of every tensor is added what all executions say of it."""
    told: set[str] = set()
    explained = []
    for finding in findings:
        name = finding.tensor
        if name is not None and name not in told and finding.reason in (*_TOLD, _STORED):
            told.add(name)
            rules = finding.reason in _TOLD
            lines = [text for rule in _FACTS for text in rule(evidence, name)] if rules else []
            suggests = [text for rule in CAUSES if rules and (text := rule(evidence, name))]
            if len(told) == 1:
                lines += _equal_outputs(evidence)
            if lines or suggests:
                known = dict(finding.difference or {})
                known["lines"] = [*known.get("lines", ()), *lines]
                known["suggests"] = [*suggests, *known.get("suggests", ())]
                finding = replace(finding, difference=known)
        explained.append(finding)
    return explained


def _equal_outputs(e: Ensemble) -> list[str]:
    """Which other outputs never differed: a fault in one of three gradients is a clue."""
    wrong = {finding.tensor for finding in e.differing}
    equal = sorted(name for name in e.compared if name not in wrong)
    return [f"equal in all executions of this claim: {listed(equal)}"] if equal else []


def _settings(e: Ensemble, name: str) -> list[str]:
    """Which settings differ and which do not; loads of different kinds are settings, too."""
    if e.claim not in (*VARIED, "contention"):
        return []
    wrong, equal = split(e, name)
    if not wrong or (e.claim == "contention" and not equal):
        return []
    line = f"{name} differs at {listed(wrong)}"
    line += f"; equal at {listed(equal)}" if equal else " (every setting)"
    return [line]


def _again(e: Ensemble, name: str) -> list[str]:
    """Whether a setting that differs does so in the same way each time, and unchanged calls."""
    if e.claim not in VARIED:
        return []
    lines = []
    for variant in split(e, name)[0]:
        for rank, found in by_rank(e, name, variant).items():
            if len(found) > 1:
                on = f" on rank {rank}" if e.plan.ranks > 1 else ""
                kinds = len(set(found))
                said = "the same result" if kinds == 1 else f"{kinds} different results"
                lines.append(f"{variant}: {len(found)} runs{on}, {said}")
    different, runs = unchanged(e, name)
    if runs:
        lines.append(f"repeated without a change: {different} of {runs} runs differ")
    return lines


def _results(e: Ensemble, name: str) -> list[str]:
    """How many results there are: two of a kind are another fault than a new one every time."""
    own = e.restored(e.claim)
    wrong = ranks_of(e, name)
    if e.claim not in UNCHANGED or not wrong:
        return []
    lines = []
    for rank in wrong:
        found = [e.first(rank, name), *(content(o, name) for o in own if o.rank == rank)]
        where = f"rank {rank}: " if e.plan.ranks > 1 else ""
        lines.append(f"{where}{len(found)} executions, {len(set(found))} different results")
    equal = [str(rank) for rank in range(e.plan.ranks) if rank not in wrong and rank in e.base]
    if equal:
        lines.append(f"ranks without any difference to their first result: {listed(equal)}")
    return lines


def _groups(e: Ensemble, name: str) -> list[str]:
    """Which fresh processes agree with each other and with the main one."""
    if e.claim != "process":
        return []
    groups = process_groups(e, name)
    if len(groups) < 2:
        return []
    shown = " ".join("{" + ", ".join(_process(p) for p in group) + "}" for group in groups)
    lines = [f"{len(groups)} groups of processes that agree: {shown}"]
    wrong, runs = unchanged(e, name)
    if runs:
        lines.append(f"within a process: {wrong} of {runs} runs differ")
    for setting, values in sorted(process_settings(e).items()):
        told = ", ".join(f"{_process(p)}: {values[p]}" for p in sorted(values))
        inside = [{values.get(p) for p in group} for group in groups]
        alike = all(len(one) == 1 for one in inside)
        apart = len(set.union(*inside)) == sum(len(one) for one in inside)
        how = "follows the groups" if alike and apart else "does not follow the groups"
        lines.append(f"{setting} ({told}) {how}")
    return lines


def _generators_drawn(e: Ensemble, name: str) -> list[str]:
    """Which generators a result that differs in the free arm drew from."""
    if not any(f.tensor == name and f.reason == "consumes-global-rng" for f in e.differing):
        return []
    drawn = sorted({g for o in [*e.base.values(), *e.own] for g in o.consumed})
    return [f"global generators drawn from: {listed(drawn)}"] if drawn else []


def _process(number: int) -> str:
    return f"process {number}" if number else "main"


Facts = Callable[[Ensemble, str], list[str]]
_FACTS: Sequence[Facts] = (_settings, _again, _results, _groups, _generators_drawn)
