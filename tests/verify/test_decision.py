"""The verdict from evidence: VERIFIED needs everything, and any single fault has its own reason."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.decision import decide
from verify.decision.deciding import MAX_FINDINGS
from verify.decision.statistics import undetected_rate
from verify.evidence import (
    BASE,
    COLD_CACHE,
    FIRST,
    PROBE,
    RETRY,
    Execution,
    Facts,
    Failure,
    Plan,
    Trouble,
)
from verify.reasons import REASONS, Verdict
from verify.verdicts import CaseVerdict, ClaimVerdict

OWN = (
    "repeat",
    "process",
    "memory",
    "threads",
    "history",
    "contention",
    "stream",
    "sms",
    "graph",
    "schedule",
    "vary",
)
FAILURE = Failure("RuntimeError", "boom", "Traceback ...")
AFTER_PEER = Failure("PeerFailed", "rank 1 failed", "", True)


def digest(value: int, *, shape: str = "4", count: int | None = None) -> str:
    part = "" if count is None else f"{{{count}}}"
    return f"float32[{shape}]{part}:{value:064x}"


def execution(**fields: Any) -> Execution:
    given_: dict[str, Any] = {
        "case": "c",
        "claim": "repeat",
        "variant": "restored",
        "rank": 0,
        "run": 0,
        "inputs": {"x": digest(7)},
        "outputs": {"out": digest(1), "w": digest(2)},
        "facts": {"out": Facts(4, False, 0), "w": Facts(4, False, 0)},
        "seconds": 0.5,
    }
    return Execution(**{**given_, **fields})


def base(rank: int = 0, **fields: Any) -> Execution:
    return execution(**{"claim": BASE, "variant": FIRST, "rank": rank, **fields})


def probe(rank: int = 0, **fields: Any) -> Execution:
    given_ = {"claim": BASE, "variant": PROBE, "compare": "none", "same_inputs": False}
    return execution(**{**given_, "rank": rank, "run": 1, "inputs": {}, **fields})


def plan_of(
    claims: Sequence[str] = ("repeat",), ranks: int = 1, runs: int = 3, **more: Any
) -> Plan:
    placement = {"out": "replicated", "w": "local", "x": "replicated"}
    return Plan(
        "c", "c", list(claims), ranks, dict.fromkeys(claims, runs), placement=placement, **more
    )


def clean(plan: Plan) -> list[Any]:
    """Evidence for which every claim of the plan is VERIFIED."""
    records: list[Any] = [base(rank) for rank in range(plan.ranks)]
    for claim in plan.claims:
        for run in range(plan.runs[claim]):
            for rank in range(plan.ranks):
                records.append(
                    execution(
                        claim=claim,
                        variant=f"{claim}-setting",
                        rank=rank,
                        run=0 if claim == "process" else run,
                        process=run + 1 if claim == "process" else 0,
                    )
                )
    records += [probe(rank) for rank in range(plan.ranks)]
    return records


def reasons(verdict: ClaimVerdict) -> set[str]:
    return {finding.reason for finding in verdict.findings}


def only(verdict: CaseVerdict) -> ClaimVerdict:
    assert len(verdict.claims) == 1
    return verdict.claims[0]


plans = st.builds(
    plan_of,
    claims=st.lists(st.sampled_from(OWN), min_size=1, max_size=4, unique=True),
    ranks=st.integers(1, 4),
    runs=st.integers(1, 4),
)


@given(plans)
def test_complete_and_equal_evidence_is_verified_with_its_bound(plan: Plan) -> None:
    verdict = decide(plan, clean(plan))
    assert verdict.verdict is Verdict.VERIFIED
    assert [claim.claim for claim in verdict.claims] == list(plan.claims)
    for claim in verdict.claims:
        assert (claim.findings, claim.differing, claim.rate) == ([], 0, None)
        assert claim.executions == plan.runs[claim.claim]
        assert claim.bound == pytest.approx(undetected_rate(claim.executions))
        assert claim.compared == ["out", "w"]
        assert [(r.rank, r.executions) for r in claim.ranks] == [
            (rank, plan.runs[claim.claim]) for rank in range(plan.ranks)
        ]


def fault(name: str, e: Execution) -> tuple[list[Any], str]:
    """What an injected fault makes of one execution of a claim, and the reason that must follow."""
    other = {**e.outputs, "out": digest(99)}
    return {
        "bits": ([replace(e, outputs=other)], "bits-differ"),
        "bits while not in effect": (
            [replace(e, outputs=other, in_effect=False)],
            "bits-differ",
        ),
        "shape": (
            [replace(e, outputs={**e.outputs, "out": digest(1, shape="5")})],
            "outputs-differ",
        ),
        "tensor lost": ([replace(e, outputs={"out": digest(1)})], "outputs-differ"),
        "tensor more": ([replace(e, outputs={**e.outputs, "z": digest(1)})], "outputs-differ"),
        "raises": ([replace(e, failure=FAILURE, outputs={})], "raises-sometimes"),
        "peer raised": ([replace(e, failure=AFTER_PEER, outputs={})], "missing-rank"),
        "mutated": ([replace(e, mutated=["x"])], "input-mutated"),
        "overwritten": ([replace(e, overwritten=["out"])], "aliased-output"),
        "other inputs": ([replace(e, inputs={"x": digest(8)})], "input-mismatch"),
        "no inputs": ([replace(e, inputs={})], "input-mismatch"),
        "lost": ([], "too-few-runs"),
        "not in effect": (
            [replace(e, in_effect=False)],
            "no-overlap" if e.claim == "contention" else "no-effect",
        ),
        "crashed": ([e, Trouble("c", "crashed", "killed", e.claim)], "crashed"),
        "timed out": ([e, Trouble("c", "timed-out", "300 s", e.claim)], "timed-out"),
    }[name]


FAULTS = (
    "bits",
    "bits while not in effect",
    "shape",
    "tensor lost",
    "tensor more",
    "raises",
    "peer raised",
    "mutated",
    "overwritten",
    "other inputs",
    "no inputs",
    "lost",
    "not in effect",
    "crashed",
    "timed out",
)


@given(plans, st.sampled_from(FAULTS), st.data())
def test_any_single_fault_in_one_execution_flips_exactly_its_claim(
    plan: Plan, name: str, data: st.DataObject
) -> None:
    records = clean(plan)
    at = data.draw(
        st.sampled_from([i for i, r in enumerate(records) if r.claim in plan.claims]), "at"
    )
    hit = records[at]
    changed, reason = fault(name, hit)
    if name == "lost" and plan.runs[hit.claim] == 1 and plan.ranks == 1:
        reason = "not-run"
    verdict = decide(plan, records[:at] + changed + records[at + 1 :])
    for claim in verdict.claims:
        if claim.claim == hit.claim:
            assert reasons(claim) == {reason}
            assert claim.verdict is REASONS[reason].verdict
            assert claim.findings[0].rank in (hit.rank, None)
        else:
            assert claim.verdict is Verdict.VERIFIED
    assert verdict.verdict is REASONS[reason].verdict


def variants_of(claim: str, *settings: tuple[str, bool]) -> list[Any]:
    return [
        execution(claim=claim, variant=variant, run=run, in_effect=held)
        for run, (variant, held) in enumerate(settings)
    ]


@pytest.mark.parametrize("claim", ["memory", "contention", "stream", "sms", "graph"])
def test_every_setting_must_have_been_in_effect_once(claim: str) -> None:
    plan = plan_of((claim,), runs=2)
    enough = [("a", True), ("a", True), ("b", True)]
    never = variants_of(claim, *enough, ("c", False), ("c", False), ("d", False))
    verdict = only(decide(plan, [base(), *never, probe()]))
    assert reasons(verdict) == {"no-overlap" if claim == "contention" else "no-effect"}
    assert [f.variant for f in verdict.findings] == ["c", "d"]
    once = variants_of(claim, *enough, ("c", False), ("c", True))
    assert only(decide(plan, [base(), *once, probe()])).verdict is Verdict.VERIFIED


def test_other_claims_need_only_their_number() -> None:
    plan = plan_of(("history",), runs=2)
    settings = variants_of("history", ("a", True), ("a", True), ("b", False))
    assert only(decide(plan, [base(), *settings, probe()])).verdict is Verdict.VERIFIED


def test_a_cache_that_was_not_cold_is_no_missing_load() -> None:
    settings = [(COLD_CACHE, False), ("hold=66", True), ("hold=66", True), ("hold=33", False)]
    records = [base(), *variants_of("contention", *settings), probe()]
    verdict = only(decide(plan_of(("contention",), runs=2), records))
    assert [(f.reason, f.variant) for f in verdict.findings] == [
        ("no-effect", COLD_CACHE),
        ("no-overlap", "hold=33"),
    ]


def test_a_difference_needs_no_setting_in_effect() -> None:
    other = {"out": digest(99), "w": digest(2)}
    own = variants_of("contention", ("a", True), ("b", False))
    own[1] = replace(own[1], outputs=other)
    verdict = only(decide(plan_of(("contention",), runs=1), [base(), *own, probe()]))
    assert reasons(verdict) == {"bits-differ"}


@given(plans, st.data())
def test_a_missing_base_execution_spoils_every_claim(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    records = [r for r in clean(plan) if not (r.variant == FIRST and r.rank == rank)]
    verdict = decide(plan, records)
    wanted = "missing-rank" if plan.ranks > 1 else "not-run"
    for claim in verdict.claims:
        assert claim.verdict is Verdict.UNVERIFIED
        assert wanted in reasons(claim)


@given(plans, st.data())
def test_a_rank_of_which_nothing_is_known_is_never_a_pass(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    verdict = decide(plan, [r for r in clean(plan) if r.rank != rank])
    assert {claim.verdict for claim in verdict.claims} == {Verdict.UNVERIFIED}


@given(plans, st.sampled_from(FAULTS), st.sampled_from(FAULTS), st.randoms(use_true_random=False))
def test_mismatch_never_hides_and_order_does_not_matter(
    plan: Plan, first: str, second: str, rnd: random.Random
) -> None:
    records = clean(plan)
    own = [i for i, r in enumerate(records) if r.claim in plan.claims]
    a, b = rnd.choice(own), rnd.choice(own)
    replaced = {a: fault(first, records[a])[0]}
    replaced.setdefault(b, fault(second, records[b])[0])
    found = [r for i, one in enumerate(records) for r in replaced.get(i, [one])]
    foreign = [replace(r, case="other", rank=9) for r in found]
    straight = decide(plan, found)
    shuffled = [*found, *foreign]
    rnd.shuffle(shuffled)
    again = decide(plan, shuffled)

    def essence(verdict: CaseVerdict) -> list[Any]:
        return [
            (
                c.claim,
                c.verdict,
                c.executions,
                c.differing,
                c.bound,
                c.rate,
                c.compared,
                {(f.reason, f.rank, f.run, f.tensor) for f in c.findings if f.run is not None},
            )
            for c in verdict.claims
        ]

    assert essence(straight) == essence(again)
    differs = {"bits", "bits while not in effect", "shape", "tensor lost", "tensor more"}
    mutates = {"raises", "mutated", "overwritten"}
    if {first, second if a != b else first} & (differs | mutates):
        assert straight.verdict is Verdict.MISMATCH


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_verified_only_with_enough_effective_runs(effective: list[bool], needed: int) -> None:
    plan = plan_of(runs=needed)
    records = [base(), probe()]
    records += [execution(run=i, in_effect=held) for i, held in enumerate(effective)]
    claim = only(decide(plan, records))
    assert (claim.verdict is Verdict.VERIFIED) == (sum(effective) >= needed)
    assert claim.executions == sum(effective)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_died_early_does_not_break_the_rate(dead: int) -> None:
    """More executions differ than the rank with the fewest has made."""
    records: list[Any] = [base(0), base(1)]
    records += [execution(rank=1 - dead, run=i, outputs={"out": digest(9)}) for i in range(5)]
    records += [execution(rank=dead, run=0), Trouble("c", "missing-rank", "killed", None, dead)]
    claim = only(decide(plan_of(ranks=2, runs=5), records))
    assert claim.verdict is Verdict.MISMATCH
    assert (claim.differing, claim.executions) == (5, 5)
    assert claim.rate is not None
    assert claim.rate[0] == 1.0
    assert claim.bound is None


def test_rate_of_a_rare_fault_counts_executions_not_tensors_nor_ranks() -> None:
    records: list[Any] = [base(0), base(1)]
    for run in range(100):
        wrong = {"out": digest(9), "w": digest(9)} if run in (30, 60) else {}
        records += [
            execution(rank=rank, run=run, **({"outputs": wrong} if wrong else {}))
            for rank in (0, 1)
        ]
    claim = only(decide(plan_of(ranks=2, runs=100), records))
    assert (claim.differing, claim.executions) == (2, 100)
    assert claim.rate is not None
    assert claim.rate == pytest.approx((0.02, 0.00243, 0.07038), abs=2e-5)
    assert len(claim.findings) == 8


def test_findings_are_limited_and_explained_ones_come_first() -> None:
    difference = {"out": {"lines": ["out[3]"], "suggests": []}}
    records: list[Any] = [base()]
    records += [
        execution(
            run=run,
            outputs={"out": digest(9), "w": digest(2)},
            differences=difference if run == 45 else {},
        )
        for run in range(50)
    ]
    claim = only(decide(plan_of(runs=50), records))
    assert len(claim.findings) == MAX_FINDINGS
    assert claim.findings[0].run == 45
    assert claim.differing == 50


def test_free_arm_alone_differs_is_consumption_of_randomness() -> None:
    free = {"arm": "free", "variant": "free", "outputs": {"out": digest(9), "w": digest(2)}}
    records: list[Any] = [base(consumed=["torch"]), *(execution(run=i) for i in range(3))]
    records += [execution(run=3 + i, consumed=["torch"], **free) for i in range(2)]
    claim = only(decide(plan_of(), records))
    assert reasons(claim) == {"consumes-global-rng"}
    assert claim.findings[0].tensor == "out"
    declared = only(decide(plan_of(random=True), records))
    assert declared.verdict is Verdict.VERIFIED
    assert declared.executions == 3, "executions that were not compared say nothing"
    assert declared.bound == pytest.approx(undetected_rate(3))


def test_rare_fault_that_happens_in_the_free_arm_is_not_blamed_on_generators() -> None:
    wrong = {"out": digest(9), "w": digest(2)}
    records: list[Any] = [base(), *(execution(run=i) for i in range(3))]
    records += [
        execution(run=3, arm="free", variant="free", outputs=wrong),
        execution(run=4, arm="free", variant="free"),
    ]
    assert reasons(only(decide(plan_of(), records))) == {"bits-differ"}


def test_both_arms_differ_is_no_question_of_generators() -> None:
    wrong = {"out": digest(9), "w": digest(2)}
    records: list[Any] = [
        base(),
        execution(run=0),
        execution(run=1, outputs=wrong),
        execution(run=2),
    ]
    records += [execution(run=3, arm="free", variant="free", outputs={**wrong, "out": digest(8)})]
    assert reasons(only(decide(plan_of(), records))) == {"bits-differ"}


def test_random_is_declared_but_too_few_restored_runs_are_not_made_up_by_free_ones() -> None:
    records: list[Any] = [
        base(),
        execution(run=0),
        *(execution(run=i, arm="free", variant="free") for i in (1, 2)),
    ]
    assert reasons(only(decide(plan_of(random=True), records))) == {"too-few-runs"}


def test_raising_in_all_executions_is_a_case_error_in_some_a_mismatch() -> None:
    failed = {"failure": FAILURE, "outputs": {}, "facts": {}}
    retry = {"claim": BASE, "variant": RETRY, "compare": "none"}
    always = [
        base(**failed),
        execution(run=1, **retry, **failed),
        execution(run=2, **retry, **failed),
    ]
    claim = only(decide(plan_of(), always))
    assert (claim.verdict, reasons(claim)) == (Verdict.UNVERIFIED, {"case-error"})
    assert "boom" in claim.findings[0].detail
    sometimes = [base(**failed), execution(run=1, **retry), execution(run=2, **retry, **failed)]
    claim = only(decide(plan_of(), sometimes))
    assert (claim.verdict, reasons(claim)) == (Verdict.MISMATCH, {"raises-sometimes"})


def test_inputs_that_differ_on_ranks_prove_nothing_about_outputs() -> None:
    plan = plan_of(["rank"], ranks=2, runs=1)
    records = [
        replace(r, inputs={"x": digest(7 + r.rank)}, outputs={**r.outputs, "out": digest(r.rank)})
        for r in clean(plan)
        if r.variant != PROBE
    ]
    claim = only(decide(plan, records))
    assert (claim.verdict, reasons(claim)) == (Verdict.UNVERIFIED, {"input-mismatch"})
    placed = replace(plan, placement={**plan.placement, "x": "local"})
    assert reasons(only(decide(placed, records))) == {"ranks-differ"}


def test_inputs_that_differ_in_another_process_prove_nothing_about_outputs() -> None:
    plan = plan_of(["process"], runs=2)
    records: list[Any] = [base(), execution(claim="process", process=1)]
    records += [
        execution(claim="process", process=2, inputs={"x": digest(5)}, outputs={"out": digest(5)})
    ]
    claim = only(decide(plan, records))
    assert (claim.verdict, reasons(claim)) == (Verdict.UNVERIFIED, {"input-mismatch"})
    assert claim.findings[0].process == 2


def test_replicas_that_differ_on_one_rank() -> None:
    plan = plan_of(["rank"], ranks=4, runs=2)
    records = [
        replace(r, outputs={**r.outputs, "out": digest(66)}) if r.rank == 2 else r
        for r in clean(plan)
    ]
    claim = only(decide(plan, records))
    assert reasons(claim) == {"ranks-differ"}
    assert "[2] of 4" in claim.findings[0].detail
    assert claim.differing == 2
    assert claim.rate is not None


def test_a_rank_s_own_tensors_may_differ_from_those_of_other_ranks() -> None:
    plan = plan_of(["rank"], ranks=4, runs=2)
    records = [replace(r, outputs={**r.outputs, "w": digest(r.rank)}) for r in clean(plan)]
    assert only(decide(plan, records)).verdict is Verdict.VERIFIED


@pytest.mark.parametrize("claim", ["rank", "ep"])
def test_tensors_without_placement(claim: str) -> None:
    plan = replace(plan_of([claim], ranks=2, runs=1), placement={"out": "replicated"})
    verdict = only(decide(plan, clean(plan)))
    assert (verdict.verdict, reasons(verdict)) == (Verdict.UNVERIFIED, {"no-placement"})
    assert "w" in verdict.findings[0].detail


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"out": Facts(4, True, 0), "w": Facts(0, True, 0)}, {"vacuous"}),
        ({"out": Facts(4, True, 0), "w": Facts(4, False, 0)}, set()),
    ],
)
def test_vacuous(facts: dict[str, Facts], expected: set[str]) -> None:
    records = [replace(r, facts=facts) if r.variant == FIRST else r for r in clean(plan_of())]
    assert reasons(only(decide(plan_of(), records))) == expected


def test_no_tensors_names_what_was_returned_instead() -> None:
    nothing = {"outputs": {}, "facts": {}, "not_compared": {"out (str)": "no tensor"}}
    records: list[Any] = [base(**nothing), *(execution(run=i, **nothing) for i in range(3))]
    claim = only(decide(plan_of(), records))
    assert (claim.verdict, reasons(claim)) == (Verdict.UNVERIFIED, {"nothing-compared"})
    assert "out (str)" in claim.findings[0].detail
    assert claim.bound is None


def test_cached_output_unless_declared_or_constant_or_contradicted_by_a_rank() -> None:
    plan = plan_of(ranks=2)
    kept = [r for r in clean(plan) if r.variant != PROBE]
    both = [*kept, probe(0, unchanged=["out"]), probe(1, unchanged=["out"])]
    assert reasons(only(decide(plan, both))) == {"cached-output"}
    assert only(decide(replace(plan, constants=["o*"]), both)).verdict is Verdict.VERIFIED
    one = [*kept, probe(0, unchanged=["out"]), probe(1)]
    assert only(decide(plan, one)).verdict is Verdict.VERIFIED
    flat = [
        replace(r, facts={**r.facts, "out": Facts(4, True, 0)}) if r.variant == FIRST else r
        for r in both
    ]
    assert only(decide(plan, flat)).verdict is Verdict.VERIFIED


def test_one_element_may_stay_the_same_unless_nothing_responds_to_the_inputs() -> None:
    single = {"facts": {"out": Facts(1, False, 0), "w": Facts(1, False, 0)}}
    kept = [replace(r, **single) if r.variant == FIRST else r for r in clean(plan_of())]
    kept = [r for r in kept if r.variant != PROBE]
    some = [*kept, probe(unchanged=["out"])]
    assert only(decide(plan_of(), some)).verdict is Verdict.VERIFIED
    both = [*kept, probe(unchanged=["out", "w"])]
    assert reasons(only(decide(plan_of(), both))) == {"cached-output"}


def test_trouble_of_another_claim_does_not_count() -> None:
    plan = plan_of(["repeat", "memory"])
    records = [*clean(plan), Trouble("c", "unsupported", "no glibc", "memory", 0)]
    verdict = decide(plan, records)
    assert [c.verdict for c in verdict.claims] == [Verdict.VERIFIED, Verdict.UNVERIFIED]
    assert verdict.verdict is Verdict.UNVERIFIED


def test_a_claim_without_executions_was_not_run_and_no_claims_are_no_pass() -> None:
    plan = plan_of(["repeat", "memory"])
    records = [r for r in clean(plan) if r.claim != "memory"]
    assert reasons(decide(plan, records).claims[1]) == {"not-run"}
    assert decide(plan_of([]), clean(plan)).verdict is Verdict.UNVERIFIED


def test_notes_name_randomness_constants_nonfinite_and_what_was_ignored() -> None:
    first = base(
        consumed=["torch"],
        facts={"out": Facts(4, True, 0), "w": Facts(4, False, 2)},
        not_compared={"name (str)": "no tensor"},
    )
    records = [first, *(execution(run=i) for i in range(3)), probe(failure=FAILURE)]
    text = "\n".join(decide(plan_of(), records).notes)
    for part in ("randomness: torch", "constant", "NaN or infinity: w", "name (str)", "cached"):
        assert part in text


TORCHLESS = (
    "decision",
    "decision.agreement",
    "evidence",
    "verdicts",
    "reasons",
    "decision.statistics",
    "digests",
    "decision.ensembles",
    "decision.causes",
    "decision.patterns",
    "placements",
    "ranks",
    "workers",
    "messages",
)


def test_no_torch_is_imported_to_decide() -> None:
    lines = ["import sys"]
    for name in TORCHLESS:
        lines += [f"import verify.{name}", f"assert 'torch' not in sys.modules, {name!r}"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
