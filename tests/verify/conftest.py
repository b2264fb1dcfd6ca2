"""Result documents to render, compare and read: small, hostile, and valid by the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from verify import results
from verify.evidence import BASE, Execution, Plan
from verify.reasons import Verdict
from verify.verdicts import CaseVerdict, ClaimVerdict, Finding, RankEvidence

NASTY = "a::b|`<script>&\n::error::x\x1b[2J\ud800##[group]"
DIGEST = "float32[2]:" + "0" * 64


def claim_verdict(
    name: str = "repeat",
    findings: Sequence[Finding] = (),
    *,
    ranks: int = 1,
    executions: int = 5,
    differing: int = 0,
    **more: Any,
) -> ClaimVerdict:
    given: dict[str, Any] = {
        "claim": name,
        "verdict": findings[0].verdict if findings else Verdict.VERIFIED,
        "findings": findings,
        "executions": executions,
        "differing": differing,
        "bound": None if differing else 0.4507,
        "rate": (0.4, 0.05, 0.85) if differing else None,
        "ranks": [
            RankEvidence(rank, executions, differing if rank == 0 else 0, ("own",), {"out": DIGEST})
            for rank in range(ranks)
        ],
        "compared": ["out"],
        "not_compared": {},
        "requested": [],
        "effective": [],
    }
    return ClaimVerdict(**{**given, **more})


def result_of(
    verdicts: Sequence[CaseVerdict] | None = None,
    *,
    ranks: int = 1,
    executions: Sequence[Execution] | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A document made by `results.build`; by default one VERIFIED case `moe`."""
    if verdicts is None:
        verdicts = [CaseVerdict("moe", "moe", [claim_verdict(ranks=ranks)])]
    if executions is None:
        executions = [
            Execution(
                one.case,
                BASE,
                "base",
                rank,
                0,
                inputs={"x": DIGEST},
                outputs={"out": DIGEST},
                generator={"torch": DIGEST},
                seconds=2.0,
                overhead=0.1,
            )
            for one in verdicts
            for rank in range(ranks)
        ]
    plans = [Plan(v.case, v.target, [c.claim for c in v.claims], ranks, {}) for v in verdicts]
    given: dict[str, Any] = {
        "plans": plans,
        "verdicts": verdicts,
        "executions": executions,
        "environment": {"torch": "2.13.0", "flags": {"a": True}},
        "options": {"runs": 5, "processes": 3, "timeout": 300.0, "seed": None, **(options or {})},
        "command": ["verify", "run", "moe"],
        "started": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "seconds": 1.5,
        "ranks": ranks,
    }
    return results.build(**{**given, **more})


MISMATCH = Finding(
    "bits-differ",
    "out has other bits",
    tensor="out",
    rank=0,
    run=3,
    process=0,
    variant="restored",
    difference={
        "lines": ["out: 1 of 4 elements differ", "first: out[2] 1.0 (0x3f800000) vs 2.0"],
        "suggests": ["one element: a race"],
        "num_differing": 1,
    },
)
UNVERIFIED = Finding("missing-rank", "rank 1 was killed by SIGKILL", rank=1)


@pytest.fixture
def make_result() -> Callable[..., dict[str, Any]]:
    return result_of


@pytest.fixture
def make_claim() -> Callable[..., ClaimVerdict]:
    return claim_verdict


@pytest.fixture
def mixed(make_result: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """One case of each verdict, four ranks, one of them missing from a claim."""
    three = claim_verdict("rank", [UNVERIFIED], ranks=3)
    verdicts = [
        CaseVerdict("good", "good", [claim_verdict(ranks=4)], notes=["a note"]),
        CaseVerdict(
            "bad", "f.py::bad", [claim_verdict("repeat", [MISMATCH], differing=2, ranks=4)]
        ),
        CaseVerdict("gone", "gone", [three, claim_verdict("process", executions=0, ranks=0)]),
    ]
    return make_result(verdicts, ranks=4)


@pytest.fixture
def nasty(make_result: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Every text that the code under test controls is an attack."""
    finding = Finding(
        "bits-differ", NASTY, tensor=NASTY, variant=NASTY, difference={"lines": [NASTY] * 2}
    )
    claim = claim_verdict(
        "repeat",
        [finding],
        differing=1,
        not_compared={NASTY: NASTY},
        measurements={NASTY: {NASTY: 0.5, "nan": float("nan")}},
    )
    return make_result([CaseVerdict(NASTY, NASTY, [claim], notes=[NASTY])])
