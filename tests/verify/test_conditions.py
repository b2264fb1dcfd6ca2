"""Each condition in one process: what it executes, what it measured, and faults only it can see."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from struck_starts import strike_start
from torch import Tensor

import verify
from verify.cases import CLAIMS, Case
from verify.conditions import CONDITIONS, batch, contention
from verify.conditions.history import probe
from verify.decision import decide
from verify.errors import CaseError
from verify.evidence import Execution, Plan, Record
from verify.sessions import Session, first
from verify.staging import prepare
from verify.verdicts import ClaimVerdict

X = {"x": verify.normal(12, 4)}


def run(
    claim: str, function: Callable[..., Any], runs: int = 1, **options: Any
) -> tuple[ClaimVerdict, list[Execution]]:
    options = {"inputs": X, "claims": (claim,), **options}
    case = Case(name="c", execute=function, **options)
    plan = Plan(
        "c", "c", [claim], 1, {claim: runs}, batch=dict(case.batch), constants=case.constants
    )
    records: list[Record] = []
    session = Session(prepare(case), plan, records.append)
    first(session)
    CONDITIONS[claim](session, runs)
    probe(session)
    own = [r for r in records if isinstance(r, Execution) and r.claim == claim]
    return decide(plan, records).claims[0], own


def reasons(claim: ClaimVerdict) -> set[str]:
    return {f.reason for f in claim.findings}


def test_every_claim_has_a_condition_and_history_comes_last() -> None:
    assert set(CONDITIONS) == set(CLAIMS) - {"process"}
    assert list(CONDITIONS)[-1] == "history"


def test_repeat_makes_its_runs_and_two_in_the_free_arm() -> None:
    claim, own = run("repeat", lambda x: x * 2, 4)
    assert not claim.findings
    assert [(e.variant, e.arm, e.run) for e in own] == [
        *(("restored", "restored", i) for i in range(4)),
        ("free", "free", 4),
        ("free", "free", 5),
    ]


def test_global_randomness_is_found_declared_randomness_is_not() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.rand(4)

    assert reasons(run("repeat", f)[0]) == {"consumes-global-rng"}
    case = Case(name="c", execute=f, inputs=X, random=True, claims=("repeat",))
    records: list[Record] = []
    plan = Plan("c", "c", ["repeat"], 1, {"repeat": 2}, random=True)
    session = Session(prepare(case), plan, records.append)
    first(session)
    CONDITIONS["repeat"](session, 2)
    verdict = decide(plan, records)
    assert str(verdict.verdict) == "VERIFIED"
    assert any("(declared)" in note for note in verdict.notes)


def test_uninitialised_memory_is_found() -> None:
    def f(x: Tensor) -> Tensor:
        held = torch.empty(12, 64)
        held[:, :4] = x
        return held.clone()

    claim, own = run("memory", f, 3)
    assert reasons(claim) == {"bits-differ"}
    assert all(e.in_effect for e in own)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (64, 64)])
def test_memory_is_in_effect_whatever_the_size(shape: tuple[int, ...]) -> None:
    for _ in range(5):
        claim, own = run("memory", lambda x: x * 2, 3, inputs={"x": verify.normal(*shape)})
        assert not claim.findings
        assert {e.variant for e in own} == {"fill=0xfe", "fill=0x80", "recycled-nan"}


def test_threads_are_changed_and_restored() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x * 2

    claim, own = run("threads", f, 3)
    assert not claim.findings
    assert len({e.effective["num_threads"] for e in own} - {before}) >= 2
    assert [e.effective["num_threads"] for e in own] == seen[1 : 1 + len(own)]
    assert torch.get_num_threads() == before

    def g(x: Tensor) -> Tensor:
        return x * torch.get_num_threads()

    assert reasons(run("threads", g, 3)[0]) == {"bits-differ"}


def test_a_case_that_sets_its_own_thread_count_undoes_the_condition() -> None:
    before = torch.get_num_threads()

    def f(x: Tensor) -> Tensor:
        torch.set_num_threads(1)
        return x * 2

    try:
        claim, own = run("threads", f, 3)
    finally:
        torch.set_num_threads(before)
    assert reasons(claim) == {"no-effect"}
    assert not any(e.in_effect for e in own)


def test_history_sees_what_earlier_calls_left() -> None:
    cache: dict[tuple[int, ...], Tensor] = {}

    def f(x: Tensor) -> Tensor:
        return x * cache.setdefault(tuple(x.shape), x.abs().sum())

    cache.clear()
    claim, _ = run("history", f, 2)
    assert not {"bits-differ"} & reasons(claim), "the cached value is that of the first call"
    seen: list[Tensor] = []

    def g(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x + (0 if torch.equal(seen[-1], seen[0]) and len(seen) < 3 else seen[-2].sum())

    assert "bits-differ" in reasons(run("history", g, 2)[0])


def test_history_kinds_and_a_case_that_takes_its_own_gradients() -> None:
    _, own = run("history", lambda x: x * 2, 2, batch={"x": 0, "out": 0})
    assert [e.requested["before"] for e in own] == ["other inputs", "smaller batch", "inference"]

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        loss = (x @ w).square().sum()
        (grad,) = torch.autograd.grad(loss, w)
        return loss.detach(), grad

    inputs = {**X, "w": verify.normal(4, 4, requires_grad=True)}
    claim, own = run("history", step, 2, inputs=inputs)
    assert not claim.findings
    assert [e.requested["before"] for e in own] == ["other inputs", "other inputs"]


def test_a_workspace_and_a_cached_result() -> None:
    workspace = torch.empty(12, 4)
    assert "aliased-output" in reasons(run("repeat", lambda x: torch.mul(x, 2, out=workspace))[0])
    kept: list[Tensor] = []

    def cached(x: Tensor) -> dict[str, Tensor]:
        kept.append(x.clone())
        return {"fresh": x * 2, "stale": kept[0].clone()}

    claim, _ = run("repeat", cached)
    assert reasons(claim) == {"cached-output"}
    assert claim.findings[0].tensor == "stale"
    kept.clear()
    assert not run("repeat", cached, constants=("stale",))[0].findings


def test_a_leak_between_batch_entries_and_a_batch_size_that_matters() -> None:
    declared = {"batch": {"x": 0, "out": 0}}
    claim, own = run("batch", lambda x: x * 2, **declared)
    assert not claim.findings
    kinds = {e.requested["kind"] for e in own}
    assert kinds == {"size", "position", "neighbours"}
    assert {e.variant for e in own} >= {"size=1", "size=7", "size=6", "size=11"}

    leak, _ = run("batch", lambda x: x + 1e-6 * x.roll(1, 0), **declared)
    variants = {f.variant for f in leak.findings}
    assert reasons(leak) == {"bits-differ"}
    assert "neighbours=replaced" in variants

    # only odd entries read another one: seen when it is the even ones that are replaced
    pairs, _ = run("batch", lambda x: x + 1e-6 * x[torch.arange(len(x)) // 2 * 2], **declared)
    variants = {f.variant for f in pairs.findings}
    assert "neighbours=others replaced" in variants
    assert "neighbours=replaced" not in variants

    size, _ = run("batch", lambda x: x * (2 if len(x) > 3 else 3), **declared)
    assert {f.variant for f in size.findings} == {"size=1", "size=2", "size=3"}

    place, _ = run("batch", lambda x: x + torch.arange(12.0)[: len(x), None], **declared)
    assert "position=reversed" in {f.variant for f in place.findings}
    assert "neighbours=replaced" not in {f.variant for f in place.findings}


def test_batch_gradients_are_compared_and_sums_over_the_batch_are_named() -> None:
    inputs = {
        "x": verify.normal(12, 4, requires_grad=True),
        "w": verify.normal(4, requires_grad=True),
    }
    claim, _ = run("batch", lambda x, w: x * w, inputs=inputs, batch={"x": 0, "out": 0})
    assert not claim.findings
    assert claim.compared == ["grad.x", "out"]
    assert claim.not_compared == {"grad.w": "no batch dimension"}


def test_batch_needs_a_dimension_with_entries() -> None:
    one = run("batch", lambda x: x * 2, inputs={"x": verify.normal(1, 4)}, batch={"x": 0, "out": 0})
    assert reasons(one[0]) == {"no-batch-dim"}
    no_output = run("batch", lambda x: x.sum(0), batch={"x": 0})
    assert reasons(no_output[0]) == {"no-batch-dim"}


@pytest.mark.parametrize("entries", [2, 3, 4, 8, 100])
def test_batch_variants_are_distinct_and_inside(entries: int) -> None:
    found = batch.variants(entries)
    assert len({v.name for v in found}) == len(found)
    for variant in found:
        rows = variant.rows.tolist()
        assert len(set(rows)) == len(rows)
        assert 0 <= min(rows) <= max(rows) < entries
    assert any(v.replaced is not None and 0 < int(v.replaced.sum()) < entries for v in found)


def test_schedule_and_vary() -> None:
    def f(x: Tensor, tile: int = 4, flip: bool = False) -> Tensor:
        return x * 2 if tile != 3 else x * 2 + 1

    claim, own = run("schedule", f, schedule=({"tile": 2}, {"tile": 8, "flip": True}))
    assert not claim.findings
    assert [e.requested for e in own] == [{"tile": "2"}, {"tile": "8", "flip": "True"}]
    wrong, own = run("vary", f, vary={"tile": [2, 3], "flip": [True]})
    # a setting that differs is executed again, to tell another result from one that is never alike
    assert [e.variant for e in own] == ["tile=2", "tile=3", "flip=True", "tile=3", "tile=3"]
    assert [e.run for e in own] == [0, 1, 2, 3, 4]
    assert {(f_.reason, f_.variant) for f_ in wrong.findings} == {("bits-differ", "tile=3")}
    difference = wrong.findings[0].difference
    assert difference is not None
    assert "tile=3: 3 runs, the same result" in difference["lines"]
    with pytest.raises(CaseError, match="takes no argument 'tiles'"):
        run("vary", f, vary={"tiles": [2]})


def test_rank_and_ep_need_ranks() -> None:
    for claim in ("rank", "ep"):
        verdict, _ = run(claim, lambda x: x * 2, ep=(1, 2))
        assert reasons(verdict) == {"unsupported"}


def reference(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
    x = inputs["x"].double()
    return {"out": verify.reduction(x.sum(1), x.abs().sum(1), 4, torch.float32)}


def test_reference() -> None:
    right, _ = run("reference", lambda x: x.sum(1), reference=reference)
    assert not right.findings
    assert right.bound == pytest.approx(0.95), (
        "one execution excludes only what nearly always shows"
    )
    assert right.measurements["out"]["worst_ratio"] <= 1
    wrong, _ = run("reference", lambda x: x[:, :3].sum(1), reference=reference)
    assert reasons(wrong) >= {"over-budget"}
    nan, _ = run("reference", lambda x: x.sum(1) / 0 * 0, reference=reference)
    assert "non-finite" in reasons(nan)
    none, _ = run("reference", lambda x: x.sum(1))
    assert reasons(none) == {"no-reference"}
    other, _ = run("reference", lambda x: {"other": x.sum(1)}, reference=reference)
    assert str(other.verdict) != "VERIFIED"
    shape, _ = run("reference", lambda x: x.sum(0), reference=reference)
    assert reasons(shape) == {"case-error"}
    broken, _ = run("reference", lambda x: x.sum(1), reference=lambda *a: 1 / 0)
    assert reasons(broken) == {"case-error"}


def test_an_expected_output_that_the_case_does_not_return() -> None:
    both: Any = lambda i, u, v: {**reference(i, u, v), "lost": reference(i, u, v)["out"]}  # noqa: E731
    claim, _ = run("reference", lambda x: x.sum(1), reference=both)
    assert reasons(claim) == {"case-error"}
    assert "lost" in claim.findings[0].detail
    claim, _ = run("exact", lambda x: x, exact=lambda i, u, v: {"out": i["x"], "lost": i["x"]})
    assert reasons(claim) == {"outputs-differ"}


def test_a_reference_of_nan_permits_nothing() -> None:
    def nan(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
        found = reference(inputs, upstream, view)["out"]
        bad = torch.full_like(found.exact, float("nan"))
        return {"out": verify.Reference(bad, found.budget, bad, found.margin)}

    claim, _ = run("reference", lambda x: x.sum(1), reference=nan)
    assert str(claim.verdict) == "MISMATCH"


def test_exact() -> None:
    def f(x: Tensor, delta: float = 0.0) -> dict[str, Tensor]:
        return {"out": x * 2 + delta, "more": x}

    expected: Any = lambda inputs, upstream, view: {"out": inputs["x"] * 2}  # noqa: E731
    right, _ = run("exact", f, exact=expected)
    assert not right.findings
    assert right.compared == ["out"]
    assert right.not_compared == {"more": "the exact case does not give it"}
    wrong, _ = run("exact", f, exact=lambda i, u, v: {"out": -(i["x"] * -2) + 0.5})
    assert reasons(wrong) == {"bits-differ"}
    assert "0x" in "\n".join((wrong.findings[0].difference or {})["lines"])


def test_an_interrupt_in_the_middle_of_a_start_leaves_no_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = strike_start(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt), contention._load(2):
        pass
    assert [one.returncode for one in started] == [-signal.SIGKILL] * 2


def test_contention_overlaps_and_its_load_ends() -> None:
    def f(x: Tensor) -> Tensor:
        time.sleep(0.1)
        return x * 2

    claim, own = run("contention", f, 2)
    assert not claim.findings
    assert sum(e.in_effect for e in own) >= 2
    assert all(e.effective["load_steps"] > 0 for e in own if e.in_effect)
    with contention._load(2) as load:
        assert load is not None
        pids = [process.pid for process in load.processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_load_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = contention.Load.counters
    monkeypatch.setattr(
        contention.Load, "counters", lambda self: [min(1, c) for c in counters(self)]
    )
    monkeypatch.setattr(contention, "TRIES_PER_RUN", 5)
    claim, own = run("contention", lambda x: x * 2, 2)
    assert reasons(claim) == {"no-overlap"}
    assert len(own) == 2 * 5
    # a long case is given up after a time, but not before it was tried as often as asked
    monkeypatch.setattr(contention, "PATIENCE", 0.0)
    claim, own = run("contention", lambda x: x * 2, 2)
    assert reasons(claim) == {"no-overlap"}
    assert len(own) == 2 + 1


@pytest.mark.parametrize("every", [2, 3, 4, 5, 7])
def test_only_a_load_that_moved_during_the_execution_counts(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    drawn, steps = random.Random(every), [1]

    def counters(self: contention.Load) -> list[int]:
        steps[0] += drawn.randrange(every) == 0
        return [steps[0]]

    monkeypatch.setattr(contention.Load, "counters", counters)
    claim, own = run("contention", lambda x: x * 2, 4)
    # it went on until as many records as asked for say so: no look after the execution replaces one
    assert sum(e.in_effect for e in own) == 4
    assert own[-1].in_effect
    assert not claim.findings


def test_a_difference_without_overlap_is_still_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = contention.Load.counters
    monkeypatch.setattr(
        contention.Load, "counters", lambda self: [min(1, c) for c in counters(self)]
    )
    monkeypatch.setattr(contention, "TRIES_PER_RUN", 5)  # none of more would overlap either
    calls: list[int] = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    claim, _ = run("contention", f, 1)
    assert reasons(claim) == {"bits-differ"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64], ids=str)
def test_batch_of_dtypes_that_torch_cannot_index(dtype: torch.dtype) -> None:
    given = {"inputs": {"x": verify.normal(6, 4, dtype=dtype)}, "batch": {"x": 0, "out": 0}}
    assert not run("batch", lambda x: x.clone(), **given)[0].findings
    wrong, _ = run("batch", lambda x: x.clone() if len(x) != 2 else torch.zeros_like(x), **given)
    assert reasons(wrong) == {"bits-differ"}


def test_batch_sees_outputs_that_vanish_appear_or_grow() -> None:
    given = {"inputs": {"x": verify.normal(16, 4)}, "batch": {"x": 0, "out": 0, "lse": 0}}

    def vanishing(x: Tensor) -> dict[str, Tensor]:
        return {"out": x * 2} | ({"lse": x.sum(1)} if len(x) == 16 else {})

    def growing(x: Tensor) -> Tensor:
        return x * 2 if len(x) == 16 else torch.cat([x * 2, x[:1]])

    def appearing(x: Tensor) -> dict[str, Tensor]:
        return {"out": x * 2} | ({"new": x.sum(1)} if len(x) < 16 else {})

    for function in (vanishing, growing, appearing):
        claim, _ = run("batch", function, **given)
        assert reasons(claim) == {"outputs-differ"}, function.__name__
    assert not run("batch", lambda x: {"out": x * 2, "lse": x.sum(1)}, **given)[0].findings


def test_a_schedule_that_equals_the_default_has_no_effect() -> None:
    def function(x: Tensor, tile: int = 64) -> Tensor:
        return x * 2

    claim, _ = run("schedule", function, schedule=({"tile": 64},))
    assert reasons(claim) == {"no-effect"}
    claim, _ = run("schedule", function, schedule=({"tile": 32},))
    assert not claim.findings
    claim, _ = run("vary", function, vary={"tile": [64]})
    assert reasons(claim) == {"no-effect"}
    claim, _ = run("vary", function, vary={"tile": [32, 64]})
    assert not claim.findings
    assert claim.executions == 1  # the default is no variation


def test_an_output_that_cannot_be_compared_is_no_pass() -> None:
    def hidden(x: Tensor) -> dict[str, Tensor]:
        return {"y": x * 2, "z": torch.empty(2, device="meta")}

    claim, _ = run("repeat", hidden, 2)
    assert reasons(claim) == {"unsupported"}
    assert not run("repeat", lambda x: {"y": x * 2, "z": x + 1}, 2)[0].findings


def test_a_reference_with_a_budget_for_everything_is_vacuous_and_may_write_to_its_inputs() -> None:
    def wide(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
        exact = inputs["x"].double() * 2
        inputs["x"].zero_()
        size = exact.abs() * 1e6
        return {"out": verify.Reference(exact, size, exact, size)}

    claim, _ = run("reference", lambda x: x * 2, reference=wide)
    assert reasons(claim) == {"vacuous"}


def test_a_sparse_argument_is_refused_by_name() -> None:
    case = Case(
        name="c", execute=lambda a: a.to_dense(), setup=lambda: {"a": torch.eye(3).to_sparse()}
    )
    with pytest.raises(CaseError, match=r"argument 'a' is a torch\.sparse_coo tensor"):
        prepare(case)
