"""`reference` and `exact` in a session: explained on the spot, self-checked, inputs as given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from verify.api import check
from verify.conditions import CONDITIONS, diagnosis
from verify.evidence import Execution, Failure, Plan, Record, Trouble
from verify.execution import execute
from verify.explanation import reference_errors, telling
from verify.sessions import Session, first
from verify.staging import give, prepare
from verify.verdicts import ClaimVerdict

Inputs = Mapping[str, Tensor]
INPUTS = {
    "x": verify.normal(12, 6),
    "gate": verify.normal(6, 5),
    "up": verify.normal(6, 5),
}


def product_of(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
    return (x @ gate) * (x @ up).sigmoid()


def float64(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    wide = {name: value.double() for name, value in inputs.items()}
    exact = product_of(**wide)
    size = (wide["x"].abs() @ wide["gate"].abs()) * (1 + wide["x"].abs() @ wide["up"].abs())
    return {"out": verify.reduction(exact, size, 30, torch.float32)}


def float32(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    right = float64(inputs, upstream, view)["out"]
    exact = product_of(**inputs).double()
    return {"out": verify.Reference(exact, right.budget, exact, right.margin)}


def claim(name: str, function: Any, **options: Any) -> ClaimVerdict:
    case = verify.case(name="c", claims=(name,), **{"inputs": INPUTS, **options})(function)
    return check(case).claims[0]


def exchanged(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return product_of(up, gate, x)


def in_place(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return product_of(gate, up, x)


def test_a_result_that_fits_changed_inputs() -> None:
    found = claim("reference", exchanged, reference=float64)
    first = found.findings[0]
    assert (first.reason, first.tensor) == ("over-budget", "out")
    assert first.difference is not None
    assert first.difference["suggests"][0].startswith(
        "fits the reference with gate and up exchanged (worst error / budget 0."
    )
    assert "wrong in every row and column" in first.difference["lines"]
    later = [f for f in found.findings[1:] if f.difference is not None]
    assert [f.reason for f in later] == ["wrong-rounding"]
    assert later[0].difference is not None
    assert later[0].difference["suggests"] == [], "said once for a tensor"
    assert "explanation" not in found.measurements["out"]
    assert not claim("reference", in_place, reference=float64).findings


def test_an_exact_result_that_is_expected_of_changed_inputs() -> None:
    def expected(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
        return {"out": product_of(**inputs)}

    found = claim("exact", exchanged, exact=expected)
    assert [f.reason for f in found.findings] == ["bits-differ"]
    assert found.findings[0].difference is not None
    text = found.findings[0].difference["suggests"][0]
    assert text == "is what is expected with gate and up exchanged (every bit)"
    assert not claim("exact", in_place, exact=expected).findings


def test_a_weak_reference_judges_nothing() -> None:
    for function in (in_place, exchanged):
        found = claim("reference", function, reference=float32)
        assert [f.reason for f in found.findings] == ["weak-reference"]
        assert str(found.verdict) == "UNVERIFIED"
        assert "reference of out: it moves by" in found.findings[0].detail
        assert found.not_compared == {"out": "its reference is weak"}
        assert not found.measurements


def test_a_weak_reference_of_one_output_leaves_the_others_judged() -> None:
    def both(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
        weak, right = (f(inputs, upstream, view)["out"] for f in (float32, float64))
        return {"weak": weak, "right": right}

    def two(x: Tensor, gate: Tensor, up: Tensor) -> dict[str, Tensor]:
        return {"weak": in_place(x, gate, up), "right": exchanged(x, gate, up)}

    found = claim("reference", two, reference=both)
    assert {(f.reason, f.tensor) for f in found.findings} == {
        ("weak-reference", None),
        ("over-budget", "right"),
        ("wrong-rounding", "right"),
    }
    assert str(found.verdict) == "MISMATCH"


def test_a_reference_that_takes_no_float64_inputs_is_judged_by_its_values() -> None:
    def particular(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
        if inputs["x"].dtype != torch.float32:
            raise TypeError("float32 only")
        return float64(inputs, upstream, view)

    assert not claim("reference", in_place, reference=particular).findings


def test_a_reference_in_less_than_float64_is_refused() -> None:
    def narrow(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
        right = float64(inputs, upstream, view)["out"]
        return {"out": verify.Reference(right.exact.float(), *[right.budget] * 3)}

    found = claim("reference", in_place, reference=narrow)
    assert [f.reason for f in found.findings] == ["case-error"]
    assert "exact is float32, it must be float64" in found.findings[0].detail


def test_what_cannot_be_explained_is_no_less_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> None:
        raise RuntimeError("a rule broke")

    monkeypatch.setattr(reference_errors, "explain_errors", breaks)
    found = claim("reference", exchanged, reference=float64)
    assert str(found.verdict) == "MISMATCH"
    assert found.findings[0].difference is not None
    assert "not explained: RuntimeError: a rule broke" in found.findings[0].difference["lines"]


def expected_exactly(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    return {"out": product_of(**inputs)}


@pytest.mark.parametrize(
    "broken", [(telling, "_explain"), (diagnosis, "add_places"), (diagnosis, "_causes")]
)
def test_an_exact_mismatch_stays_one_whatever_its_explanation_does(
    monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for words")

    monkeypatch.setattr(*broken, breaks)
    found = claim("exact", exchanged, exact=expected_exactly)
    assert [f.reason for f in found.findings] == ["bits-differ"]
    assert "no room for words" in "\n".join((found.findings[0].difference or {})["lines"])


def test_a_hint_that_fails_leaves_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise OverflowError("a rule broke")

    monkeypatch.setattr(telling, "suggest", breaks)
    said = telling.explain(torch.zeros(3), torch.ones(3), "out", "repeat")
    assert said["num_differing"] == 3
    assert "first: out[0]" in said["lines"][1]
    assert said["lines"][-1] == "not explained: OverflowError: a rule broke"
    assert said["suggests"] == []


def test_an_explanation_that_no_record_can_hold_is_none() -> None:
    for odd in (float("nan"), torch.zeros(1)):
        said = telling.explained(lambda odd=odd: {"lines": [], "odd": odd})  # type: ignore[misc]
        assert said["lines"][0].startswith("not explained: ")
    assert telling.explained(lambda: {"lines": ["a"]}) == {"lines": ["a"]}


@pytest.mark.parametrize("name", ["reference", "exact"])
@pytest.mark.parametrize("fault", ["none", "execution", "peer", "reference"])
def test_ranks_agree_before_the_reference_and_begin_the_next_execution_together(
    name: str, fault: str
) -> None:
    """A rank that failed waits for the others but briefly; a reference may take its time."""
    events: list[str] = []

    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        events.append("execution")
        if fault == "execution" and len(events) > 2:
            raise ValueError("only now")
        return product_of(gate, up, x)

    def expected(inputs: Inputs, upstream: Inputs, view: Any) -> Any:
        events.append("reference")
        if fault == "reference":
            raise ValueError("no such thing")
        return (float64 if name == "reference" else expected_exactly)(inputs, upstream, view)

    def agree(failure: Failure | None) -> Failure | None:
        events.append("agreed")
        peer = Failure("PeerFailed", "rank 1 failed", "", True)
        return failure or (peer if fault == "peer" and len(events) == 4 else None)

    case = verify.case(name="c", claims=(name,), inputs=INPUTS, **{name: expected})(function)
    records: list[Record] = []
    session = Session(prepare(case), Plan("c", "c", [name], 1, {}), records.append, agree=agree)
    first(session)
    CONDITIONS[name](session, 1)
    judged = ["reference"] if fault in ("none", "reference") else []
    then = list(dict.fromkeys(events[3:-1]))  # the self-check calls it again
    assert events[:3] == ["execution", "agreed", "execution"]
    assert [*then, events[-1]] == ["agreed", *judged, "agreed"]
    if fault == "reference":
        assert isinstance(records[1], Trouble)
        assert f"{name} raised ValueError: no such thing" in records[1].detail
    else:
        assert isinstance(records[1], Execution)
        assert (records[1].failure is None) == (fault == "none")


VIEWS = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t[3:, 2:],
    "expanded": lambda t: t[:1].expand(9, t.shape[1]),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_from_setup_keeps_its_strides(kind: str) -> None:
    """What ignores strides must be given some: nothing on the way makes inputs contiguous."""
    seen: list[tuple[int, ...]] = []
    expected = VIEWS[kind](verify.inputs.generate("t", (9, 14)))

    def function(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x * 2

    def reference(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
        seen.append(inputs["x"].stride())
        assert torch.equal(inputs["x"], expected)
        return {"out": inputs["x"] * 2}

    def setup() -> dict[str, Tensor]:
        return {"x": VIEWS[kind](verify.inputs.generate("t", (9, 14)))}

    case = verify.case(name="c", setup=setup, claims=("exact",), exact=reference)(function)
    stage = prepare(case)
    capture = execute(stage, give(stage, 1, 0))
    assert seen == [expected.stride()]
    assert torch.equal(capture.outputs["out"], expected * 2)
    assert not check(case).claims[0].findings
