"""How often a fault shows under each condition, and how often a plain check would have seen it.

The plain check is what people write first: the step three times in one process, with gradients of
ones, on a quiet device, and the bits compared. The engine's own executions are counted from its
records, under the conditions that were in effect. Counting and drawing need no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from verify.captures import flatten, fresh_copy, same_bits
from verify.cases import CLAIMS, Case
from verify.conduct import conduct, set_up
from verify.controls import gpu_margins
from verify.controls.catalogue import module_of
from verify.controls.planting import Control
from verify.decision import decide
from verify.decision.statistics import rate_interval, undetected_rate
from verify.errors import CaseError
from verify.evidence import BASE, FIRST, Execution, Failure, Plan, Record
from verify.inputs import materialise
from verify.plans import RunOptions, plan_of
from verify.reasons import Verdict
from verify.sessions import Session
from verify.targets import Found

REPLAYS = 3


@dataclass(frozen=True)
class Tally:
    """Executions that count, and how many of them gave other bits than the first one; by variant
    as well, as (differing, executions)."""

    executions: int = 0
    differing: int = 0
    variants: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def interval(self) -> tuple[float, float]:
        """The rate's exact 95 % interval; (0, 1) without executions."""
        if not self.executions:
            return 0.0, 1.0
        _, low, high = rate_interval(self.differing, self.executions)
        return low, high

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "executions": self.executions,
            "differing": self.differing,
            "interval_95": [round(low, 5), round(high, 5)],
            "variants": {name: list(pair) for name, pair in self.variants.items()},
        }


@dataclass(frozen=True)
class Row:
    """One planted fault and its clean twin, measured.

    claim: what must find it. claims, twin: tallies of both by claim. plain: of `trials` plain
    checks, how many saw the fault. caught: whether the engine named it. unclean: claims of the twin
    that are not VERIFIED, with their findings.
    """

    name: str
    claim: str
    fault: str
    claims: Mapping[str, Tally]
    twin: Mapping[str, Tally]
    plain: int
    trials: int
    caught: bool
    unclean: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether the fault was caught, and its twin gave the same bits in every execution."""
        return self.caught and not self.unclean and not any(t.differing for t in self.twin.values())

    def to_json(self) -> dict[str, Any]:
        executions = sum(tally.executions for tally in self.twin.values())
        return {
            "name": self.name,
            "claim": self.claim,
            "fault": self.fault,
            "caught": self.caught,
            "plain_check": {"noticed": self.plain, "trials": self.trials},
            "claims": {name: tally.to_json() for name, tally in self.claims.items()},
            "twin": {
                "executions": executions,
                "differing": sum(tally.differing for tally in self.twin.values()),
                "undetected_rate_95": round(undetected_rate(executions), 5) if executions else 1.0,
                "not_verified": list(self.unclean),
                "claims": {name: tally.to_json() for name, tally in self.twin.items()},
            },
        }


def tallies(records: Iterable[Record]) -> dict[str, Tally]:
    """By claim: executions of the restored arm that did not fail, against the first execution.

    As in the decision, one that was not in effect counts only if it differs.
    """
    executions = [one for one in records if isinstance(one, Execution)]
    base = next((e for e in executions if e.claim == BASE and e.variant == FIRST), None)
    found: dict[str, dict[str, list[int]]] = {}
    for e in executions:
        if e.claim == BASE or base is None or e.failure is not None:
            continue
        if e.arm != "restored" or e.compare != "own":
            continue
        differs = dict(e.outputs) != dict(base.outputs)
        if not (e.in_effect or differs):
            continue  # equality counts only under the condition, a difference always
        counts = found.setdefault(e.claim, {}).setdefault(e.variant, [0, 0])
        counts[0] += differs
        counts[1] += 1
    return {
        claim: Tally(
            sum(total for _, total in variants.values()),
            sum(differing for differing, _ in variants.values()),
            {name: (differing, total) for name, (differing, total) in variants.items()},
        )
        for claim, variants in found.items()
    }


def executed(case: Case, target: str, runs: Mapping[str, int]) -> tuple[Plan, list[Record]]:
    """Everything that one process does for a case, in this process: the claims of `runs`, each so
    often at least. Raises CaseError when the case cannot be set up."""
    claims = tuple(claim for claim in CLAIMS if claim in runs)
    found = Found(replace(case, claims=claims), target)
    plan = plan_of(found, RunOptions(processes=1, claims=claims), 1)
    plan = replace(plan, runs={**plan.runs, **runs})
    stage = set_up(found, 0, 1, None, lambda failure: failure)
    if isinstance(stage, Failure):
        raise CaseError(f"case {case.name!r} cannot be set up: {stage.type}: {stage.message}")
    records: list[Record] = []
    conduct(Session(stage, plan, records.append))
    return plan, records


def measure(control: Control, runs: int, plain: int, trials: int) -> Row:
    """Executes the fault under its claim and `repeat`, the twin under everything that it promises,
    `runs` times at least for each claim, more where the control asks for more. plain: what the
    plain checks saw, of so many trials; they come first, in a process that has done nothing yet."""
    wanted = {claim: max(runs, control.runs.get(claim, 0)) for claim in ("repeat", control.claim)}
    target = f"{module_of(control)}:{control.name}"
    plan, records = executed(control.fault, f"{target}/fault", wanted)
    verdicts = {one.claim: one for one in decide(plan, records).claims}
    found = verdicts[control.claim]
    caught = found.verdict is control.verdict and control.reason in {
        finding.reason for finding in found.findings
    }
    twin_runs = {claim: max(runs, control.runs.get(claim, 0)) for claim in control.twin.claims}
    twin_plan, twin_records = executed(control.twin, f"{target}/twin", twin_runs)
    unclean = [
        f"{one.claim}: {one.verdict}({', '.join(sorted({f.reason for f in one.findings}))})"
        for one in decide(twin_plan, twin_records).claims
        if one.verdict is not Verdict.VERIFIED
    ]
    return Row(
        control.name,
        control.claim,
        control.fault.description,
        tallies(records),
        tallies(twin_records),
        plain,
        trials,
        caught,
        unclean,
    )


def given(case: Case) -> dict[str, Tensor]:
    """The generated inputs of a case, on its device."""
    return {
        name: materialise(spec, name, case.seed, case.device or "cpu")
        for name, spec in case.inputs.items()
    }


def plain_check(case: Case, inputs: Mapping[str, Tensor]) -> bool:
    """Whether a plain check notices a difference: three calls in a row, each with gradients of ones
    where the output has any, results and gradients compared bit by bit."""
    first: dict[str, Tensor] = {}
    noticed = False
    for replay in range(REPLAYS):
        copies = {
            name: fresh_copy(tensor).requires_grad_(tensor.requires_grad)
            for name, tensor in inputs.items()
        }
        outputs, _ = flatten(case.execute(**copies))
        heads = [tensor for tensor in outputs.values() if tensor.requires_grad]
        if heads:
            torch.autograd.backward(heads, [torch.ones_like(tensor) for tensor in heads])
        results = {name: tensor.detach() for name, tensor in outputs.items()}
        results |= {f"grad.{n}": t.grad for n, t in copies.items() if t.grad is not None}
        if replay == 0:
            first = results
        elif any(not same_bits(results[name], first[name]) for name in first):
            noticed = True
    return noticed


def document(
    rows: Sequence[Row],
    environment: Mapping[str, Any],
    seconds: float,
    margins: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The measured table as JSON-ready data. margins: `Margins.to_json()` of the missing barrier,
    which has to hide when quiet and to show under some load."""
    sound = margins is None or bool(margins["hides_when_quiet"] and margins["shows_under"])
    return {
        "schema_version": 1,
        "seconds": round(seconds, 1),
        "passed": bool(rows) and all(row.passed for row in rows) and sound,
        "faults": [row.to_json() for row in rows],
        **({} if margins is None else {"missing_barrier": margins}),
        "environment": environment,
    }


def drawn(found: Mapping[str, Any]) -> str:
    """A document of `document` as text: a line per fault, then variants of contention, then what
    the missing barrier rests on."""
    lines = [
        (
            one["name"],
            one["fault"],
            "caught" if one["caught"] else "MISSED",
            one["claim"],
            _share(one["claims"].get(one["claim"])),
            _share(one["claims"].get("repeat")),
            f"{one['plain_check']['noticed']} of {one['plain_check']['trials']}",
            f"{one['twin']['differing']} of {one['twin']['executions']}"
            + "".join(f"; {text}" for text in one["twin"]["not_verified"]),
        )
        for one in found["faults"]
    ]
    heads = ("fault", "what it does", "", "found by", "differs", "in repeat", "plain check", "twin")
    table = tabulate(lines, heads, tablefmt="github", disable_numparse=True)
    loads = [
        f"{one['name']} under {name}: {differing} of {total}"
        for one in found["faults"]
        if one["claim"] == "contention" and "contention" in one["claims"]
        for name, (differing, total) in one["claims"]["contention"]["variants"].items()
    ]
    margins = [gpu_margins.drawn(found["missing_barrier"])] if "missing_barrier" in found else []
    return "\n".join([table, *([""] if loads or margins else []), *loads, *margins])


def _share(tally: Mapping[str, Any] | None) -> str:
    if tally is None or not tally["executions"]:
        return "never in effect"
    low, high = tally["interval_95"]
    return f"{tally['differing']} of {tally['executions']} ({100 * low:.1f} to {100 * high:.1f} %)"
