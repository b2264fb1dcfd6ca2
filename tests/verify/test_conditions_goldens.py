"""The claim golden: equal bits pass, everything else is named; on one rank and on parts of two."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from verify import running
from verify.cases import Case
from verify.conditions import golden_changes, golden_entries, goldens
from verify.conduct import conduct
from verify.controls import stored
from verify.controls.planting import flip_lowest_bit
from verify.decision import decide
from verify.environment import environment
from verify.errors import CaseError, InputFileError
from verify.evidence import Failure, Plan, Record, Trouble
from verify.explanation import reference_errors, telling
from verify.goldens import keys, likely, packing, recording, store
from verify.plans import RunOptions, with_options
from verify.sessions import Session, first
from verify.staging import prepare
from verify.targets import Found, import_file
from verify.verdicts import ClaimVerdict

X = {"x": verify.normal(8, 4)}


def case(function: Callable[..., Any], golden: str = "exact", **options: Any) -> Case:
    given = {"name": "c", "inputs": X, "claims": ("golden",), "golden": golden, **options}
    return Case(execute=function, **given)


def _plan(one: Case, ranks: int) -> Plan:
    placement = {name: str(value) for name, value in one.placement.items()}
    return Plan("c", "c", ["golden"], ranks, {"golden": 1}, placement=placement)


def make(one: Case, folder: Path) -> store.Entry:
    """Stores the golden of a case, made in this process."""
    path = folder.with_suffix(".pt")
    session = Session(prepare(one), _plan(one, 1), lambda record: None, golden=folder)
    conduct(replace(session, keep_golden=path))
    kept = torch.load(path, weights_only=True)
    with store.locked(folder):
        index = store.read(folder)
        change = recording._change([Found(one, f"f.py::{one.name}")], [kept], index, "why", False)
        made = change.entries[0]
        others = [other for other in index.entries if other.identity != made.identity]
        store.write(folder, [*others, made], change.files)
    return made


def amend(folder: Path, **fields: Any) -> None:
    """The same golden with something else in its only entry."""
    with store.locked(folder):
        (one,) = store.read(folder).entries
        store.write(folder, [replace(one, **fields)], {})


def look(one: Case, folder: Path | None, ranks: int = 1) -> ClaimVerdict:
    plan, records = _plan(one, ranks), list[Record]()
    for rank in range(ranks):
        conduct(Session(prepare(one, rank, ranks), plan, records.append, golden=folder))
    return decide(plan, records).claims[0]


def found(claim: ClaimVerdict) -> set[str]:
    return {finding.reason for finding in claim.findings}


def lines(claim: ClaimVerdict) -> str:
    return "\n".join((claim.findings[0].difference or {})["lines"])


def double(x: Tensor) -> dict[str, Tensor]:
    return {"out": x * 2, "sum": x.sum(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "golden"


# --- bits


@pytest.mark.parametrize("kind", ["exact", "bits"])
def test_the_same_bits_are_verified_and_one_other_bit_is_not(folder: Path, kind: str) -> None:
    entry = make(case(double, kind), folder)
    assert (entry.key is None) == (kind == "exact")
    assert entry.outputs == {"out": "float32", "sum": "float32"}
    claim = look(case(double, kind), folder)
    assert str(claim.verdict) == "VERIFIED"
    assert claim.compared == ["out", "sum"]
    assert claim.bound == pytest.approx(0.95)

    def off(x: Tensor) -> dict[str, Tensor]:
        return {**double(x), "out": flip_lowest_bit((x * 2).flatten(), 5).reshape(8, 4)}

    claim = look(case(off, kind), folder)
    assert str(claim.verdict) == "MISMATCH"
    assert [(f.reason, f.tensor) for f in claim.findings] == [("golden-differs", "out")]
    assert "first: out[1,1]" in lines(claim)
    assert "1 ulp" in lines(claim)
    assert "the files that the case names are those that the golden was made with" in lines(claim)
    assert "executed again" not in lines(claim)


def test_what_has_changed_since_is_said(folder: Path) -> None:
    entry = make(case(double), folder)
    amend(folder, source_digest="other", made={**entry.made, "torch": "1.0", "commit": "a"})
    claim = look(case(lambda x: {**double(x), "out": x * 3}), folder)
    assert "the code has changed since the golden was made" in lines(claim)
    assert f"changed since: torch 1.0 -> {torch.__version__}" in lines(claim)
    assert "commit" not in lines(claim)


def test_both_errors_are_told_when_there_is_a_reference(folder: Path) -> None:
    options = {"reference": reference, "inputs": {"x": verify.normal(8, 4)}}
    make(case(lambda x: x.sum(1), **options), folder)
    claim = look(case(lambda x: (x.double().sum(1) * (1 + 1e-3)).float(), **options), folder)
    assert "worst error against float64: golden " in lines(claim)


def test_today_s_reference_is_called_once_for_all_outputs(folder: Path) -> None:
    calls: list[int] = []

    def sums(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
        calls.append(1)
        one = reference(inputs, upstream, view)["out"]
        return dict.fromkeys("abc", one)

    make(case(lambda x: dict.fromkeys("abc", x.sum(1)), reference=sums), folder)
    calls.clear()
    claim = look(case(lambda x: dict.fromkeys("abc", x.sum(1) + 1), reference=sums), folder)
    assert len(claim.findings) == 3
    assert all("worst error against" in str(f.difference) for f in claim.findings)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["exact", "float64"])
@pytest.mark.parametrize("broken", ["explain_errors", "told", "_explain", "environment"])
def test_what_cannot_be_explained_is_no_less_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, broken: str
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for words")

    options = {"reference": reference, "inputs": {"x": verify.normal(8, 4)}}
    make(case(total, kind, **options), folder)
    places = {"explain_errors": reference_errors, "told": likely, "_explain": telling}
    monkeypatch.setattr(places.get(broken, golden_changes), broken, breaks)
    claim = look(case(lambda x: x[:, :3].sum(1), kind, **options), folder)
    assert str(claim.verdict) == "MISMATCH"
    concerned = {"exact": ("told", "_explain"), "float64": ("explain_errors",)}[kind]
    untold = "not explained: MemoryError: no room for words" in lines(claim)
    assert untold == (broken in (*concerned, "environment"))


class TestThreads:
    @pytest.fixture(autouse=True)
    def two(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(before)

    def test_a_thread_count_that_explains_the_difference_is_found(self, folder: Path) -> None:
        calls: list[int] = []

        def f(x: Tensor) -> dict[str, Tensor]:
            calls.append(1)
            out = x * torch.get_num_threads()
            return {"out": out, "same": x + 1, "other": out * 2}

        torch.set_num_threads(1)
        make(case(f), folder)
        torch.set_num_threads(2)
        calls.clear()
        claim = look(case(f), folder)
        assert found(claim) == {"golden-differs"}
        assert "changed since: num_threads 1 -> 2" in lines(claim)
        assert "executed again with 1 threads, as then: gives the golden's bits" in lines(claim)
        assert torch.get_num_threads() == 2
        assert len(claim.findings) == 2
        again = len(calls)
        calls.clear()
        torch.set_num_threads(1)
        assert str(look(case(f), folder).verdict) == "VERIFIED"
        assert again == len(calls) + 1, "once for both tensors"

    def test_and_one_that_does_not_is_ruled_out(self, folder: Path) -> None:
        torch.set_num_threads(1)
        make(case(double), folder)
        torch.set_num_threads(2)
        claim = look(case(lambda x: {**double(x), "out": x * 3}), folder)
        assert "executed again with 1 threads, as then: differs too" in lines(claim)

    def test_bits_are_compared_with_the_count_that_they_were_made_with(self, folder: Path) -> None:
        """Made on all cores, compared on some of them: nobody chose either."""

        def f(x: Tensor) -> Tensor:
            return x * torch.get_num_threads()

        torch.set_num_threads(3)
        make(case(f, "bits"), folder)
        torch.set_num_threads(2)
        claim = look(case(f, "bits"), folder)
        assert str(claim.verdict) == "VERIFIED"
        assert (claim.requested, claim.effective) == ([{"num_threads": 3}], [{"num_threads": 3}])
        assert torch.get_num_threads() == 2
        other = look(case(lambda x: f(x) + 1, "bits"), folder)
        assert found(other) == {"golden-differs"}
        assert "this run is stable" in lines(other), "two executions with three threads"
        assert "num_threads" not in lines(other)
        assert "executed again" not in lines(other)
        assert torch.get_num_threads() == 2

    def test_bits_made_with_a_count_that_cannot_be_set_are_unknown(self, folder: Path) -> None:
        entry = make(case(double, "bits"), folder)
        for count in (golden_changes.most_threads() + 1, None, 0):
            amend(folder, made={**entry.made, "num_threads": count})
            claim = look(case(double, "bits"), folder)
            assert str(claim.verdict) == "UNVERIFIED"
            assert found(claim) == {"env-unknown"}
            assert f"made with {count} threads, which cannot be set here" in str(claim.findings)
        amend(folder, made={**entry.made, "num_threads": golden_changes.most_threads()})
        assert str(look(case(double, "bits"), folder).verdict) == "VERIFIED"

    def test_a_count_that_has_no_effect_is_unknown(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = make(case(double, "bits"), folder)
        amend(folder, made={**entry.made, "num_threads": 3})
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        assert found(look(case(double, "bits"), folder)) == {"env-unknown"}

    def test_the_largest_count_is_one_of_this_machine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for cores, most in ((None, 8), (2, 8), (64, 128)):
            monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
            assert golden_changes.most_threads() == most

    @pytest.mark.parametrize("threads", [0, -1, 10**9, True, "3", None])
    def test_a_count_that_nobody_can_have_is_not_tried(self, folder: Path, threads: Any) -> None:
        entry = make(case(double), folder)
        amend(folder, made={**entry.made, "num_threads": threads})
        claim = look(case(lambda x: {**double(x), "out": x * 3}), folder)
        assert found(claim) == {"golden-differs"}
        assert "executed again" not in lines(claim)


# --- what proves nothing


def test_nothing_stored_and_no_folder(folder: Path) -> None:
    make(case(double, name="other"), folder)
    claim = look(case(double), folder)
    assert found(claim) == {"no-golden"}
    assert "holds no golden of kind exact for 'c'" in claim.findings[0].detail
    assert found(look(case(double), folder / "none")) == {"no-golden"}
    assert found(look(case(double), None)) == {"no-golden"}
    make(case(double, "bits"), folder)
    assert found(look(case(double), folder)) == {"no-golden"}, "of another kind only"


def test_bits_of_another_environment_are_unknown_and_the_difference_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(case(double, "bits"), folder)
    make(case(double, "exact"), folder)
    here = environment()

    def elsewhere(*_: Any) -> dict[str, Any]:
        return {
            **here,
            "cpu_capability": "AVX9",
            "flags": {**here["flags"], "flush_denormal": True},
        }

    for module in (goldens, golden_entries):
        monkeypatch.setattr(module, "environment", elsewhere)
    claim = look(case(double, "bits"), folder)
    assert str(claim.verdict) == "UNVERIFIED"
    assert found(claim) == {"env-unknown"}
    assert claim.findings[0].detail == (
        "no golden for this environment; nearest: flush_denormal False -> True,"
        f" isa {here['cpu_capability']} -> AVX9"
    )
    assert str(look(case(double, "exact"), folder).verdict) == "VERIFIED", "it has no key"
    make(case(double, "bits"), folder)
    assert len(store.read(folder).of("c", "bits")) == 2, "one beside the other"
    assert str(look(case(double, "bits"), folder).verdict) == "VERIFIED"
    monkeypatch.undo()
    assert str(look(case(double, "bits"), folder).verdict) == "VERIFIED"


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"inputs": {"x": verify.normal(8, 5)}},
        {"inputs": {"x": verify.normal(8, 4, dtype=torch.float64)}},
        {"inputs": {"x": verify.uniform(8, 4)}},
    ],
    ids=["seed", "shape", "dtype", "values"],
)
def test_other_inputs_prove_nothing(folder: Path, other: dict[str, Any]) -> None:
    make(case(double), folder)
    claim = look(case(double, **other), folder)
    assert str(claim.verdict) == "UNVERIFIED"
    assert found(claim) == {"input-mismatch"}


def test_other_weights_are_other_inputs(folder: Path) -> None:
    def built(scale: float) -> Case:
        def setup() -> dict[str, Any]:
            layer = torch.nn.Linear(4, 2)
            with torch.no_grad():
                layer.weight.fill_(scale)
            return {"layer": layer}

        return case(lambda x, layer: layer(x), setup=setup)

    make(built(1.0), folder)
    assert str(look(built(1.0), folder).verdict) == "VERIFIED"
    assert found(look(built(2.0), folder)) == {"input-mismatch"}


def test_a_damaged_golden_is_an_error_and_no_verdict(folder: Path) -> None:
    entry = make(case(double), folder)
    other = {name: torch.zeros(2) for name in entry.tensors}
    (folder / entry.file).write_bytes(packing.to_bytes(other, "c", "exact"))
    with pytest.raises(InputFileError, match=entry.file):
        look(case(double), folder)


def test_a_function_that_raises_is_a_broken_case(folder: Path) -> None:
    make(case(double), folder)
    assert found(look(case(lambda x: 1 / 0), folder)) == {"case-error"}


@pytest.mark.parametrize("lacks", ["none", "own", "peer"])
def test_no_rank_executes_what_another_does_not_take_part_in(folder: Path, lacks: str) -> None:
    """As one rank of two sees it; `make` is where the golden of both comes from."""
    calls: list[int] = []
    one = case(
        lambda x: (calls.append(1), x * 2)[1],  # type: ignore[func-returns-value]
        inputs={"x": verify.normal(8, 4)},
        placement={"*": verify.replicated},
    )
    make(one, folder)
    answers: list[Failure | None] = []

    def agree(failure: Failure | None) -> Failure | None:
        answers.append(failure)
        peer = Failure("PeerFailed", "rank 1 failed", "", True) if lacks == "peer" else None
        return failure or (peer if len(answers) == 2 else None)

    records: list[Record] = []
    where = folder if lacks != "own" else folder / "none"
    session = Session(prepare(one), _plan(one, 1), records.append, golden=where)
    first(session)
    calls.clear()
    session.agree = agree
    goldens.run(session, 1)
    assert len(calls) == (lacks == "none")
    assert [failure is not None for failure in answers[:2]] == [False, lacks == "own"]
    assert len(answers) == (4 if lacks == "none" else 2)
    assert len([r for r in records[1:] if isinstance(r, Trouble)]) == (lacks == "own")


def test_a_golden_that_one_of_several_ranks_cannot_read_stops_none_of_them(folder: Path) -> None:
    entry = make(case(double, placement={"*": verify.replicated}), folder)
    (folder / entry.file).write_bytes(b"cut")
    claim = look(case(double, placement={"*": verify.replicated}), folder, ranks=2)
    assert found(claim) == {"case-error"}
    assert {f.rank for f in claim.findings} == {0, 1}
    assert entry.file in claim.findings[0].detail


def test_writers_wait_until_index_and_tensors_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(case(double), folder)
    load, seen = packing.load, []

    def watched(*given: Any) -> Any:
        handle = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)
        seen.append(1)
        return load(*given)

    monkeypatch.setattr(packing, "load", watched)
    assert str(look(case(double), folder).verdict) == "VERIFIED"
    assert seen == [1]


# --- other outputs


def test_an_output_more_or_less(folder: Path) -> None:
    make(case(double), folder)
    more = look(case(lambda x: {**double(x), "new": x + 1}), folder)
    assert str(more.verdict) == "UNVERIFIED"
    assert found(more) == {"no-golden"}
    assert "not in the golden: new" in more.findings[0].detail
    less = look(case(lambda x: {"out": x * 2}), folder)
    assert str(less.verdict) == "MISMATCH"
    assert found(less) == {"outputs-differ"}
    assert "sum is missing" in less.findings[0].detail


@pytest.mark.parametrize("with_reference", [False, True])
def test_another_dtype_or_shape(folder: Path, with_reference: bool) -> None:
    options: dict[str, Any] = {}
    if with_reference:  # which fits the new shape, not the golden's
        options["reference"] = wide_reference
    make(case(lambda x: x.sum(1), **options), folder)
    claim = look(case(lambda x: x.sum(1).double(), **options), folder)
    assert found(claim) == {"outputs-differ"}
    assert "out is float64[8], expected float32[8]" in claim.findings[0].detail
    claim = look(case(lambda x: x * 2, **options), folder)
    assert found(claim) == {"outputs-differ"}
    assert "out is float32[8, 4], expected float32[8]" in claim.findings[0].detail


# --- float64


def reference(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
    x = inputs["x"].double()
    return {"out": verify.reduction(x.sum(1), x.abs().sum(1), 4, torch.float32)}


def wide_reference(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
    x = inputs["x"].double() * 2
    return {"out": verify.reduction(x, x.abs(), 1, torch.float32)}


def half_reference(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
    x = inputs["x"].double()
    return {"out": verify.reduction(x.sum(1), x.abs().sum(1), 64, torch.bfloat16)}


def measured(function: Callable[..., Any], **options: Any) -> Case:
    return case(function, "float64", **{"reference": reference, **options})


def total(x: Tensor) -> Tensor:
    return x.sum(1)


def test_other_bits_inside_the_budget_pass_and_outside_do_not(folder: Path) -> None:
    make(measured(total), folder)
    assert str(look(measured(total), folder).verdict) == "VERIFIED"
    other = look(measured(lambda x: x.flip(1).sum(1).nextafter(torch.tensor(9.0))), folder)
    assert str(other.verdict) == "VERIFIED"
    assert 0 < other.measurements["out"]["worst_ratio"] <= 1
    lost = look(measured(lambda x: x[:, :3].sum(1)), folder)
    assert "over-budget" in found(lost)
    assert "the files that the case names are those that the golden was made with" in lines(lost)


def test_the_stored_reference_judges_and_not_the_one_of_today(folder: Path) -> None:
    """Code and reference may go wrong together: only what was stored before tells it."""

    def wrong(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
        return reference({"x": inputs["x"][:, :3]}, upstream, view)

    make(measured(total), folder)
    claim = look(measured(lambda x: x[:, :3].sum(1), reference=wrong), folder)
    assert "over-budget" in found(claim)


def test_an_early_rounding_is_caught(folder: Path) -> None:
    options: dict[str, Any] = {"reference": half_reference, "inputs": {"x": verify.normal(64, 64)}}
    make(measured(lambda x: x.sum(1).bfloat16(), **options), folder)
    good = look(measured(lambda x: x.flip(1).sum(1).bfloat16(), **options), folder)
    assert str(good.verdict) == "VERIFIED"
    early = look(measured(lambda x: x.bfloat16().float().sum(1).bfloat16(), **options), folder)
    assert "wrong-rounding" in found(early)


def test_no_budget_excuses_another_dtype_or_shape_or_a_lost_output(folder: Path) -> None:
    make(measured(lambda x: {"out": x.sum(1), "more": x}), folder)
    wider = look(measured(lambda x: {"out": x.double().sum(1), "more": x}), folder)
    assert found(wider) == {"outputs-differ"}
    assert "out is float64[8], expected float32[8]" in wider.findings[0].detail
    flat = look(measured(lambda x: {"out": x.sum(1, keepdim=True), "more": x}), folder)
    assert found(flat) == {"outputs-differ"}
    lost = look(measured(lambda x: {"more": x}), folder)
    assert str(lost.verdict) == "MISMATCH"
    assert found(lost) == {"outputs-differ"}


def test_one_lost_output_leaves_the_others_judged(folder: Path) -> None:
    def two(inputs: Any, upstream: Any, view: Any) -> dict[str, verify.Reference]:
        return dict.fromkeys(("a", "b"), reference(inputs, upstream, view)["out"])

    make(measured(lambda x: {"a": x.sum(1), "b": x.sum(1)}, reference=two), folder)
    lost = look(measured(lambda x: {"a": x.sum(1)}, reference=two), folder)
    assert {(f.reason, f.tensor) for f in lost.findings} == {("outputs-differ", "b")}
    assert lost.measurements["a"]["over_budget"] == 0
    both = look(measured(lambda x: {"a": 3 * x.sum(1)}, reference=two), folder)
    pairs = {(f.reason, f.tensor) for f in both.findings}
    assert pairs >= {("outputs-differ", "b"), ("over-budget", "a")}


def test_what_the_reference_left_out_is_named_and_a_new_output_is_missed(folder: Path) -> None:
    make(measured(lambda x: {"out": x.sum(1), "more": x}), folder)
    same = look(measured(lambda x: {"out": x.sum(1), "more": x}), folder)
    assert str(same.verdict) == "VERIFIED"
    assert same.not_compared == {"more": "the golden does not hold it"}
    new = look(measured(lambda x: {"out": x.sum(1), "more": x, "new": x}), folder)
    assert found(new) == {"no-golden"}
    assert "not in the golden: new" in new.findings[0].detail
    less = look(measured(lambda x: {"out": x.sum(1)}), folder)
    assert {(f.reason, f.tensor) for f in less.findings} == {("outputs-differ", "more")}


# --- two ranks

RANKS = """
import os
import torch, verify

def layer(x, w):
    return {"out": x * w, "sum": x.sum(0), "scaled": w * 3}

def wrong(x, w):
    made = layer(x, w)
    if len(x) == 3:  # the second of two ranks
        made["out"] = made["out"].index_fill(0, torch.tensor([1]), 0.5)
    return made

def wide(x, w):
    made = layer(x, w)
    return {**made, "out": made["out"].repeat(1, 2)}

def double(x, w):
    made = layer(x, w)
    return {**made, "out": made["out"].double()}

def reference(inputs, upstream, view):
    x, w = (inputs[name].double() for name in ("x", "w"))
    return {"out": verify.reduction(x * w, (x * w).abs(), 1, torch.float32)}

RANK, WORLD = (int(os.environ.get(name, other)) for name, other in (("RANK", 0), ("WORLD_SIZE", 1)))

def summed(x, layer, group=None):
    out = (layer.w[:, None, None] * x).sum(0)
    if group is not None:
        torch.distributed.all_reduce(out, group=group)
    return out

def experts():
    layer = torch.nn.Module()  # two experts, each rank has its own of them
    layer.register_buffer("w", torch.tensor([1.0, 2.0]).chunk(WORLD)[RANK].clone())
    return {"layer": layer}

def by_rank():
    layer = torch.nn.Module()
    layer.register_buffer("w", torch.tensor([1.0 + RANK]))
    return {"layer": layer}

def threaded(x):
    return x * torch.get_num_threads()

WHOLE = {"x": verify.replicated, "out": verify.replicated}
OWN = tuple(
    verify.case(
        name=name, inputs={"x": verify.normal(5, 4)}, claims=("golden",), **given
    )(function)
    for name, function, given in (
        ("alone", summed, dict(golden="exact", setup=by_rank, placement=WHOLE)),
        ("local", summed, dict(
            golden="exact", setup=experts, placement={**WHOLE, "layer.w": verify.local}
        )),
        ("undeclared", summed, dict(golden="exact", setup=experts, placement=WHOLE)),
        ("threads", threaded, dict(golden="bits", placement=WHOLE)),
    )
)
PLACEMENT = {
    "x": verify.sharded(0),
    "out": verify.sharded(0),
    "sum": verify.local,
    "w": verify.replicated,
    "scaled": verify.replicated,
}
UNPLACED = {name: value for name, value in PLACEMENT.items() if name != "out"}
INPUTS = {"x": verify.normal(7, 4), "w": verify.normal(4)}
CASES = tuple(
    verify.case(
        name=f"{kind}-{function.__name__}-{len(placement)}",
        inputs=INPUTS,
        placement=placement,
        claims=("golden",),
        golden=kind,
        reference=reference,
    )(function)
    for kind in ("exact", "float64")
    for function, placement in (
        (layer, PLACEMENT),
        (wrong, PLACEMENT),
        (wide, PLACEMENT),
        (double, PLACEMENT),
        (layer, UNPLACED),
    )
)
"""


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The claim of every case above, each against the golden of `layer`, in one run."""
    place = tmp_path_factory.mktemp("ranks")
    path = place / "ranks_case.py"
    path.write_text(RANKS)
    module: Any = import_file(path)
    for one in module.CASES:
        make(replace(one, execute=module.layer), place / "golden")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        for one in module.OWN:
            make(one, place / "golden")
    finally:
        torch.set_num_threads(before)
    options = RunOptions(ranks=2, claims=("golden",), golden=place / "golden")
    result = running.run([str(path)], options)
    return {one["case"]: one["claims"][0] for one in result["cases"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "float64"])
def test_ranks_compare_their_parts_and_name_what_is_their_own(
    on_two_ranks: dict[str, dict[str, Any]], kind: str
) -> None:
    claim = on_two_ranks[f"{kind}-layer-5"]
    assert claim["verdict"] == "VERIFIED"
    assert claim["compared"] == (["out", "scaled"] if kind == "exact" else ["out"])
    assert claim["not_compared"]["sum"] == "a rank's own part; the golden holds the whole"
    wrong = on_two_ranks[f"{kind}-wrong-5"]
    assert wrong["verdict"] == "MISMATCH"
    reason = "golden-differs" if kind == "exact" else "over-budget"
    assert (reason, "out", 1) in {(f["reason"], f["tensor"], f["rank"]) for f in wrong["findings"]}
    assert {f["rank"] for f in wrong["findings"]} == {1}
    if kind == "exact":
        assert "first: out[1,0]" in "\n".join(wrong["findings"][0]["difference"]["lines"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "float64"])
def test_ranks_see_another_dtype_or_shape(
    on_two_ranks: dict[str, dict[str, Any]], kind: str
) -> None:
    for name, form in (("wide", "float32[7, 8]"), ("double", "float64[7, 4]")):
        claim = on_two_ranks[f"{kind}-{name}-5"]
        assert {f["reason"] for f in claim["findings"]} == {"outputs-differ"}
        assert f"out is {form}, expected float32[7, 4]" in claim["findings"][0]["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "float64"])
def test_without_a_placement_nothing_is_compared_and_nothing_is_wrong(
    on_two_ranks: dict[str, dict[str, Any]], kind: str
) -> None:
    claim = on_two_ranks[f"{kind}-layer-4"]
    assert claim["verdict"] == "UNVERIFIED"
    assert "no-placement" in {f["reason"] for f in claim["findings"]}
    assert claim["not_compared"]["out"] == "no placement declared"
    assert "out" not in claim["compared"]


@pytest.mark.slow
def test_a_golden_that_one_rank_lacks_is_executed_on_none(
    on_two_ranks: dict[str, dict[str, Any]],
) -> None:
    """Its all-reduce would be answered by the next one of the other rank."""
    claim = on_two_ranks["alone"]
    assert claim["verdict"] == "UNVERIFIED"
    assert {f["reason"] for f in claim["findings"]} == {"input-mismatch"}
    assert {f["rank"] for f in claim["findings"]} == {1}
    assert [rank["executions"] for rank in claim["ranks"]] == [0, 0]


@pytest.mark.slow
def test_rank_local_inputs_are_left_out_where_they_are_declared(
    on_two_ranks: dict[str, dict[str, Any]],
) -> None:
    claim = on_two_ranks["local"]
    assert (claim["verdict"], claim["compared"]) == ("VERIFIED", ["out"])
    assert "a rank-local input" in claim["not_compared"]["input layer.w"]
    claim = on_two_ranks["undeclared"]
    assert {f["reason"] for f in claim["findings"]} == {"input-mismatch"}
    said = "if these are rank-local inputs, declare them verify.local: layer.w"
    assert said in claim["findings"][0]["detail"]


@pytest.mark.slow
def test_bits_hold_on_two_ranks_that_have_half_of_the_threads_each(
    on_two_ranks: dict[str, dict[str, Any]],
) -> None:
    claim = on_two_ranks["threads"]
    assert (claim["verdict"], claim["compared"]) == ("VERIFIED", ["out"])
    assert claim["effective"] == [{"num_threads": torch.get_num_threads() + 1}]


def test_on_one_rank_its_own_inputs_count(folder: Path) -> None:
    def built(value: float) -> Case:
        placement = {"x": verify.replicated, "out": verify.replicated, "w": verify.local}
        return case(
            lambda x, w: x * w, setup=lambda: {"w": torch.full((4,), value)}, placement=placement
        )

    entry = make(built(1.0), folder)
    assert entry.inputs.count("+") == 1
    assert str(look(built(1.0), folder).verdict) == "VERIFIED"
    assert found(look(built(2.0), folder)) == {"input-mismatch"}


# --- declarations, and what ships with the package


def test_a_declared_golden_promises_itself_and_wrong_ones_are_refused() -> None:
    assert "golden" in Case(name="c", execute=double, inputs=X, golden="exact").claims
    with pytest.raises(CaseError, match="allowed are exact, float64, bits"):
        case(double, "other")
    with pytest.raises(CaseError, match=r"stores what reference=\.\.\. gives"):
        case(double, "float64")
    with pytest.raises(CaseError, match="promises 'golden' but gives no golden"):
        Case(name="c", execute=double, inputs=X, claims=("golden",))


def test_a_folder_that_is_given_asks_for_declared_goldens() -> None:
    plain = Found(case(double, claims=("repeat",)), "f.py::c")
    assert tuple(with_options(plain, RunOptions()).case.claims) == ("repeat",)
    asked = RunOptions(golden=Path("elsewhere"))
    assert tuple(with_options(plain, asked).case.claims) == ("repeat", "golden")
    chosen = replace(asked, claims=("repeat",))
    assert tuple(with_options(plain, chosen).case.claims) == ("repeat",)
    undeclared = Found(replace(plain.case, golden=""), "f.py::c")
    assert tuple(with_options(undeclared, asked).case.claims) == ("repeat",)
    assert RunOptions().golden_folder == Path.cwd() / "golden"


def test_the_goldens_of_the_controls_are_what_would_be_written() -> None:
    entries, files = stored.goldens()
    assert (stored.FOLDER / store.INDEX).read_text() == store.text_of(entries)
    there = {path.name for path in stored.FOLDER.iterdir() if path.suffix == store.SUFFIX}
    assert there == set(files)
    for entry in entries:
        kept = packing.load(stored.FOLDER, entry)  # the header's order is not fixed
        assert packing.digests_of(kept) == entry.tensors
        assert (stored.FOLDER / entry.file).stat().st_size == len(files[entry.file])


def test_the_key_that_is_kept_is_the_one_that_is_looked_for(folder: Path) -> None:
    entry = make(case(double, "bits"), folder)
    assert entry.key == keys.key_of(environment())
    assert json.loads(store.text_of([entry]))["entries"][0]["key"] == dict(entry.key or {})
