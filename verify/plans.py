"""From a case and the options of a run to its plan: which claims, on how many ranks, how often."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verify import devices
from verify.cases import CLAIMS, Case
from verify.errors import CaseError
from verify.evidence import Plan
from verify.goldens import DEFAULT_FOLDER
from verify.sources import source_digest, sources_of
from verify.targets import Found

LEAST_RUNS = {
    "rank": 2,
    "memory": 3,
    "threads": 3,
    "contention": 3,
    "stream": 3,
    "sms": 2,
    "graph": 2,
    "history": 2,
}


@dataclass(frozen=True)
class RunOptions:
    """What the command line or the caller asked for; None leaves it to the case.

    ranks: processes that execute together. runs: executions of `repeat`, per rank. processes:
    fresh processes of `process`. claims: only these. seed: of inputs. timeout: seconds without any
    progress after which a run is given up. keep: a folder to keep logs and evidence files in.
    golden: the folder of goldens; given, every case that declares a golden promises it.
    keep_goldens: leave in `keep` what a golden of each case would hold. device: "cpu", "cuda" or
    "cuda:N", where inputs, and tensors and modules of `setup`, are put.
    """

    ranks: int | None = None
    runs: int = 5
    processes: int = 3
    claims: tuple[str, ...] | None = None
    seed: int | None = None
    timeout: float = 300.0
    keep: Path | None = None
    golden: Path | None = None
    keep_goldens: bool = False
    device: str | None = None

    @property
    def golden_folder(self) -> Path:
        """Where goldens are looked for: `golden` in the current folder unless given."""
        return (self.golden or DEFAULT_FOLDER).absolute()

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("runs", 1), ("processes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise CaseError(f"--{name} is {value}; it must be at least {least}")
        if self.device is not None:
            devices.parse(self.device)
        if self.timeout <= 0:
            raise CaseError(f"--timeout is {self.timeout}; it must be a positive number of seconds")
        unknown = [claim for claim in self.claims or () if claim not in CLAIMS]
        if unknown:
            raise CaseError(f"no claim {unknown[0]!r}; allowed are {', '.join(CLAIMS)}")


def with_options(found: Found, options: RunOptions) -> Found:
    """The case with the options' seed and device, and with only the options' claims."""
    case = found.case
    if options.seed is not None:
        case = replace(case, seed=options.seed)
    if options.device is not None:
        case = replace(case, device=options.device)
    if options.claims is not None:
        chosen = tuple(c for c in CLAIMS if c in options.claims)
        case = replace(case, claims=chosen)
    elif options.golden is not None and case.golden and "golden" not in case.claims:
        case = replace(case, claims=(*case.claims, "golden"))
    return Found(case, found.target)


def plans_of(found: Sequence[Found], options: RunOptions, ranks: int | None = None) -> list[Plan]:
    """The plans of several cases. Two of the same name are called by their targets instead."""
    names = [one.case.name for one in found]
    plans = [plan_of(one, options, ranks or options.ranks or one.case.ranks) for one in found]
    return [
        replace(plan, case=plan.target) if names.count(plan.case) > 1 else plan for plan in plans
    ]


def plan_of(found: Found, options: RunOptions, ranks: int) -> Plan:
    """The plan of one case. On several ranks the claim `rank` is always added.

    Raises CaseError when the options ask for a device or for ranks that cannot be had here.
    """
    case = found.case
    lacking = devices.missing_device(case.device) if options.device is not None else None
    if lacking is None and (options.ranks is not None or ranks != case.ranks):
        lacking = unsupported(case, ranks)
    if lacking is not None:
        raise CaseError(f"{found.target}: {lacking}")
    claims = list(case.claims)
    if ranks > 1 and "rank" not in claims and options.claims is None:
        claims.append("rank")
    runs = {claim: LEAST_RUNS.get(claim, 1) for claim in claims}
    if "repeat" in runs:
        runs["repeat"] = options.runs
    if "process" in runs:
        runs["process"] = options.processes
    return Plan(
        case=case.name,
        target=found.target,
        claims=claims,
        ranks=ranks,
        runs=runs,
        seed=case.seed,
        placement={name: str(value) for name, value in case.placement.items()},
        batch=dict(case.batch),
        constants=list(case.constants),
        random=case.random,
        description=case.description,
        sources=sources_of(case),
        source_digest=source_digest(case),
        device=case.device,
    )


def unsupported(case: Case, ranks: int) -> str | None:
    """Why a case cannot be executed here on its device and that many ranks, or None."""
    lacking = devices.missing_device(case.device)
    return lacking or devices.too_many_ranks(case.device, _local(ranks), shared=case.shares_gpu)


def _local(ranks: int) -> int:
    """How many of the ranks are on this machine: a launcher of several machines says so."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
