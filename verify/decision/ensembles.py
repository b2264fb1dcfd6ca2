"""The executions of one claim as a whole: by setting, by rank, by process, with nothing changed.

Pure and torch-free, like the rest of the decision. It counts and groups digests; it refuses to say
what that means, which is up to `patterns` and `causes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from verify.digests import Digest
from verify.evidence import Execution, Plan
from verify.verdicts import Finding

UNCHANGED = ("repeat", "rank", "contention")  # nothing about the call itself is varied
VARIED = (
    "memory",
    "threads",
    "history",
    "stream",
    "sms",
    "graph",
    "batch",
    "schedule",
    "vary",
    "ep",
)
LEAST_LATER = 3  # later calls that agree with each other, before the first is called the odd one
SHOWN = 12
GENERATOR = "generator."


@dataclass(frozen=True)
class Ensemble:
    """All that one claim of a case is judged by. own: its comparable executions, in any order."""

    plan: Plan
    claim: str
    base: Mapping[int, Execution]
    executions: Sequence[Execution]  # of all claims
    own: Sequence[Execution]
    differing: Sequence[Finding]
    compared: frozenset[str]

    def restored(self, *claims: str) -> Sequence[Execution]:
        """Executions of these claims that are compared with this process's own base, in order."""
        if claims == UNCHANGED:
            return self._unchanged
        found = [e for claim in claims for e in self._restored.get(claim, ())]
        return found if len(claims) == 1 else sorted(found, key=place)

    @cached_property
    def _restored(self) -> Mapping[str, Sequence[Execution]]:
        """By claim, for all tensors and rules that will ask: looking through all of them costs."""
        found: dict[str, list[Execution]] = {}
        inputs = {rank: dict(first.inputs) for rank, first in self.base.items()}
        for e in self.executions:
            if e.compare != "own" or e.arm == "free" or e.failure is not None:
                continue
            if e.rank in inputs and (not e.same_inputs or dict(e.inputs) == inputs[e.rank]):
                found.setdefault(e.claim, []).append(e)
        return {claim: sorted(own, key=place) for claim, own in found.items()}

    @cached_property
    def _unchanged(self) -> Sequence[Execution]:
        return sorted((e for claim in UNCHANGED for e in self._restored.get(claim, ())), key=place)

    @cached_property
    def ordered(self) -> Sequence[Execution]:
        """Its own executions, in order."""
        return sorted(self.own, key=place)

    def first(self, rank: int, name: str) -> str | None:
        return content(self.base[rank], name) if rank in self.base else None


def content(e: Execution, name: str) -> str | None:
    """The digest of an output, or of the state in which a global generator was left."""
    if name.startswith(GENERATOR):
        return e.generator.get(name.removeprefix(GENERATOR))
    return e.outputs.get(name)


def split(e: Ensemble, name: str) -> tuple[list[str], list[str]]:
    """The variants at which this tensor differs, and those at which it was compared and equal."""
    wrong = {f.variant for f in e.differing if f.tensor == name}
    given = e.claim in ("vary", "schedule")  # an argument that equals the default was given, too
    order = list(dict.fromkeys(o.variant for o in e.ordered if o.arm != "free"))
    held = {o.variant for o in e.own if content(o, name) is not None and (o.in_effect or given)}
    return [v for v in order if v in wrong], [v for v in order if v not in wrong and v in held]


def unchanged(e: Ensemble, name: str) -> tuple[int, int]:
    """Runs of the main process with nothing changed: how many differ from the first, and all."""
    runs: dict[tuple[str, int], bool] = {}
    for o in e.restored(*UNCHANGED):
        if o.process == 0:
            wrong = content(o, name) != e.first(o.rank, name)
            runs[o.claim, o.run] = wrong or runs.get((o.claim, o.run), False)
    return sum(runs.values()), len(runs)


def by_rank(e: Ensemble, name: str, variant: str) -> dict[int, list[str | None]]:
    found: dict[int, list[str | None]] = {}
    for o in e.restored(e.claim):
        if o.variant == variant:
            found.setdefault(o.rank, []).append(content(o, name))
    return found


def later_result(e: Ensemble, rank: int, name: str) -> list[str]:
    """The one result of all later calls with nothing changed; empty when there is no such one."""
    found = [content(o, name) for o in e.restored(*UNCHANGED) if o.rank == rank]
    agree = len(found) >= LEAST_LATER and len(set(found)) == 1 and found[0] != e.first(rank, name)
    return [text for text in found if text is not None] if agree else []


def ranks_of(e: Ensemble, name: str) -> list[int]:
    """The ranks on which this tensor differs from their own first result."""
    return sorted(
        {o.rank for o in e.restored(e.claim) if content(o, name) != e.first(o.rank, name)}
    )


def process_groups(e: Ensemble, name: str) -> list[list[int]]:
    results: dict[int, list[tuple[int, str | None]]] = {
        0: [(rank, e.first(rank, name)) for rank in sorted(e.base)]
    }
    for o in e.restored("process"):
        results.setdefault(o.process, []).append((o.rank, content(o, name)))
    groups: dict[tuple[tuple[int, str | None], ...], list[int]] = {}
    for process, found in sorted(results.items()):
        groups.setdefault(tuple(sorted(found, key=lambda pair: pair[0])), []).append(process)
    return sorted(groups.values())


def process_settings(e: Ensemble) -> dict[str, dict[int, str]]:
    """What is recorded of each process's surroundings and is not the same in all of them."""
    found: dict[str, dict[int, str]] = {}
    for o in [*e.base.values(), *e.restored("process")]:
        for name, value in o.effective.items():
            found.setdefault(name, {})[o.process] = str(value)
    return {name: values for name, values in found.items() if len(set(values.values())) > 1}


def header(text: str) -> tuple[str, tuple[int, ...]]:
    try:
        digest = Digest.parse(text)
    except ValueError:
        return "", ()
    return digest.dtype, digest.shape


def place(e: Execution) -> tuple[int, int, int, str, str]:
    return e.process, e.rank, e.run, e.claim, e.variant


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
