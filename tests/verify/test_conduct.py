"""The order of what one process does, and what it does when the case cannot be executed at all."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from verify.cases import Case
from verify.conduct import RETRIES, conduct, report_setup_failure, set_up
from verify.decision import decide
from verify.evidence import BASE, FIRST, PROBE, RETRY, Execution, Failure, Plan, Record, Trouble
from verify.sessions import Session
from verify.staging import Stage
from verify.targets import Found


def records_of(case: Case, claims: list[str]) -> tuple[list[Execution], Any]:
    plan = Plan("c", "c", claims, 1, dict.fromkeys(claims, 1))
    records: list[Record] = []
    stage = set_up(Found(case, "c"), 0, 1, None, lambda failure: failure)
    assert isinstance(stage, Stage)
    conduct(Session(stage, plan, records.append))
    return [r for r in records if isinstance(r, Execution)], decide(plan, records)


def test_the_first_call_is_first_and_calls_with_other_inputs_are_last() -> None:
    case = Case(
        name="c",
        execute=lambda x: x * 2,
        inputs={"x": verify.normal(6)},
        claims=("history", "threads", "repeat"),
    )
    records, verdict = records_of(case, ["history", "threads", "repeat"])
    assert (records[0].claim, records[0].variant) == (BASE, FIRST)
    assert (records[-1].claim, records[-1].variant) == (BASE, PROBE)
    order = list(dict.fromkeys(r.claim for r in records))
    assert order == [BASE, "repeat", "threads", "history"]
    assert str(verdict.verdict) == "VERIFIED"
    assert len({r.inputs["x"] for r in records if r.same_inputs}) == 1


@pytest.mark.parametrize(("raises_in", "reason"), [(3, "case-error"), (1, "raises-sometimes")])
def test_a_first_call_that_raises_is_tried_again_to_tell_always_from_sometimes(
    raises_in: int, reason: str
) -> None:
    calls: list[int] = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) <= raises_in:
            raise RuntimeError("no")
        return x

    case = Case(name="c", execute=f, inputs={"x": verify.normal(6)}, claims=("repeat",))
    records, verdict = records_of(case, ["repeat"])
    assert [r.variant for r in records] == [FIRST, *[RETRY] * RETRIES]
    assert {f.reason for f in verdict.claims[0].findings} == {reason}


def test_setup_failures_concern_every_claim_those_of_fresh_processes_only_theirs() -> None:
    def setup() -> dict[str, Any]:
        raise OSError("no such file")

    case = Case(name="c", execute=lambda: torch.ones(1), setup=setup)
    failure = set_up(Found(case, "c"), 0, 1, None, lambda failure: failure)
    assert isinstance(failure, Failure)
    assert "in setup" in failure.traceback
    plan = Plan("c", "c", ["repeat", "process"], 1, {})
    for process, claim in ((0, None), (2, "process")):
        records: list[Record] = []
        report_setup_failure(records.append, plan, 0, failure, process)
        assert records == [
            Trouble("c", "case-error", "setup raised OSError: no such file", claim, 0, process)
        ]
    records = []
    report_setup_failure(records.append, plan, 0, Failure("PeerFailed", "", "", True))
    assert records == []


def test_a_peer_s_failure_stops_this_rank_too() -> None:
    case = Case(name="c", execute=lambda: torch.ones(1))
    peer = Failure("PeerFailed", "rank 1 failed", "", True)
    assert set_up(Found(case, "c"), 0, 2, None, lambda failure: peer) is peer
    assert traceback.format_exc() == "NoneType: None\n"


@pytest.mark.parametrize("kind", ["float64", "exact"])
def test_a_golden_that_cannot_be_made_is_said_and_ends_nothing(tmp_path: Path, kind: str) -> None:
    def reference(*_: Any) -> dict[str, Any]:
        raise ValueError("a broken reference")

    case = Case(
        name="c",
        execute=lambda x: x * 2,
        inputs={"x": verify.normal(6)},
        reference=reference,
        golden=kind,
    )
    plan = Plan("c", "c", ["repeat", "reference"], 1, {"repeat": 1, "reference": 1})
    for path in (tmp_path / "kept.pt", tmp_path / "none" / "kept.pt"):
        records: list[Record] = []
        stage = set_up(Found(case, "c"), 0, 1, None, lambda failure: failure)
        assert isinstance(stage, Stage)
        conduct(Session(stage, plan, records.append, keep_golden=path))
        assert isinstance(records[-1], Execution)
        assert records[-1].variant == PROBE
        repeat, judged = decide(plan, records).claims
        assert "reference raised ValueError: a broken reference" in judged.findings[0].detail
        kept = kind == "exact" and path.parent == tmp_path
        assert path.is_file() == kept
        assert str(repeat.verdict) == ("VERIFIED" if kept or kind == "float64" else "UNVERIFIED")
