"""How often planted faults show: counting, the plain check, the table, and the margins.

All of it runs without a device, on faults of the CPU where something has to be executed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify import controls, normal
from verify.cases import Case, case_of
from verify.controls import gpu_margins, gpu_rates
from verify.controls.gpu_margins import Filling, Margins
from verify.controls.gpu_rates import Row, Tally
from verify.decision.statistics import rate_interval
from verify.errors import CaseError
from verify.evidence import BASE, FIRST, Execution


def _execution(claim: str, variant: str, digest: str, **fields: Any) -> Execution:
    return Execution(
        case="c", claim=claim, variant=variant, rank=0, run=0, outputs={"out": digest}, **fields
    )


def test_equality_counts_only_in_effect_and_a_difference_always() -> None:
    records = [
        _execution(BASE, FIRST, "a"),
        _execution("repeat", "restored", "a"),
        _execution("repeat", "restored", "b"),
        _execution("repeat", "free", "b", arm="free"),
        _execution("contention", "hold", "b"),
        _execution("contention", "busy", "a"),
        _execution("contention", "busy", "a", in_effect=False),
        _execution("graph", "replay", "b", in_effect=False),
        _execution("history", "probe", "b", compare="none"),
    ]
    found = gpu_rates.tallies(records)
    assert found == {
        "repeat": Tally(2, 1, {"restored": (1, 2)}),
        "contention": Tally(2, 1, {"hold": (1, 1), "busy": (0, 1)}),
        "graph": Tally(1, 1, {"replay": (1, 1)}),
    }
    assert gpu_rates.tallies(records[1:]) == {}


@settings(max_examples=15)
@given(st.integers(1, 100), st.data())
def test_intervals_are_those_of_the_decision(executions: int, data: st.DataObject) -> None:
    differing = data.draw(st.integers(0, executions))
    low, high = Tally(executions, differing).interval
    assert (low, high) == rate_interval(differing, executions)[1:]
    assert low <= differing / executions <= high
    assert Tally().interval == (0.0, 1.0)


def _row(**fields: Any) -> Row:
    values: dict[str, Any] = {
        "name": "gpu/x",
        "claim": "contention",
        "fault": "Reads early.",
        "claims": {
            "contention": Tally(40, 2, {"busy": (2, 20), "hold": (0, 20)}),
            "repeat": Tally(30, 0, {"restored": (0, 30)}),
        },
        "twin": {"repeat": Tally(30, 0), "contention": Tally(40, 0)},
        "plain": 0,
        "trials": 100,
        "caught": True,
    }
    return Row(**{**values, **fields})


def test_a_row_passes_only_when_caught_with_a_clean_twin() -> None:
    assert _row().passed
    assert not _row(caught=False).passed
    assert not _row(unclean=("repeat: UNVERIFIED(no-effect)",)).passed
    assert not _row(twin={"repeat": Tally(30, 1)}).passed


def test_document_and_text_say_the_same() -> None:
    found = gpu_rates.document([_row(), _row(name="gpu/y", caught=False)], {"torch": "t"}, 1.23)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["passed"], found["seconds"]) == (False, 1.2)
    first = found["faults"][0]
    assert first["plain_check"] == {"noticed": 0, "trials": 100}
    assert first["claims"]["contention"]["interval_95"] == [
        round(bound, 5) for bound in rate_interval(2, 40)[1:]
    ]
    assert (first["twin"]["executions"], first["twin"]["differing"]) == (70, 0)
    assert first["twin"]["undetected_rate_95"] == pytest.approx(1 - 0.05 ** (1 / 70), abs=1e-5)
    text = gpu_rates.drawn(found)
    assert "2 of 40 (0.6 to 16.9 %)" in text
    assert "0 of 30" in text
    assert "0 of 100" in text
    assert "gpu/x under busy: 2 of 20" in text
    assert text.count("MISSED") == 1
    assert gpu_rates.document([], {}, 0.0)["passed"] is False


def test_what_was_never_in_effect_is_said() -> None:
    row = _row(claims={"repeat": Tally(30, 0)}, unclean=("graph: UNVERIFIED(unsupported)",))
    text = gpu_rates.drawn(gpu_rates.document([row], {}, 0.0))
    assert "never in effect" in text
    assert "graph: UNVERIFIED(unsupported)" in text


def _changing(x: torch.Tensor) -> torch.Tensor:
    _changing.calls += 1  # type: ignore[attr-defined]
    return x + _changing.calls  # type: ignore[attr-defined]


_changing.calls = 0  # type: ignore[attr-defined]


class _ShuffledSum(torch.autograd.Function):
    """x + bias; the gradient of bias is added up in another order every time."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[None, torch.Tensor]:
        _ShuffledSum.calls += 1
        rows = upstream[0].roll(_ShuffledSum.calls, dims=0)
        total = rows[0].clone()
        for row in rows[1:]:
            total = total + row
        return None, total


def _biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _ShuffledSum.apply(x, bias)
    return out


def _case(function: Any, **inputs: Any) -> Case:
    return case_of(function, inputs=inputs or {"x": normal(32, 8)}, claims=("repeat",))


def test_plain_check_notices_and_stays_silent() -> None:
    flaky, steady = _case(_changing), _case(lambda x: x * 2)
    assert gpu_rates.plain_check(flaky, gpu_rates.given(flaky))
    assert not gpu_rates.plain_check(steady, gpu_rates.given(steady))


def test_plain_check_is_blind_to_orders_of_gradients_of_ones() -> None:
    case = _case(_biased, x=normal(64, 8), bias=normal(8, requires_grad=True))
    inputs = gpu_rates.given(case)
    assert not gpu_rates.plain_check(case, inputs)  # what the issue asks to be shown
    plan, records = gpu_rates.executed(case, "t:c", {"repeat": 5})
    assert gpu_rates.tallies(records)["repeat"].differing == 5
    assert plan.runs["repeat"] == 5


def test_measure_gives_a_whole_row() -> None:
    control = next(c for c in controls.CONTROLS if c.name == "condition/vary")
    row = gpu_rates.measure(control, runs=4, plain=0, trials=100)
    assert row.caught
    assert row.passed
    assert row.claims["vary"].differing > 0
    assert row.claims["repeat"] == Tally(4, 0, {"restored": (0, 4)})
    assert sum(tally.executions for tally in row.twin.values()) >= 4


def test_a_case_that_cannot_be_set_up_is_an_error() -> None:
    def setup() -> dict[str, Any]:
        raise OSError("no table")

    case = case_of(lambda x, t: x, name="c", inputs={"x": normal(4)}, setup=setup)
    with pytest.raises(CaseError, match="'c' cannot be set up: OSError: no table"):
        gpu_rates.executed(case, "t:c", {"repeat": 2})


def _filling(*cycles: int, wrong: int = 0, setting: str = "s") -> Filling:
    return Filling(setting, tuple(sorted(cycles)), wrong, 10)


@pytest.mark.parametrize(
    ("quiet", "loaded", "hides", "shows"),
    [
        (_filling(90, 99), _filling(200, 210, wrong=10), True, ["s"]),
        (_filling(90, 100), _filling(200, 210, wrong=10), False, ["s"]),  # once too late
        (_filling(90, 99, wrong=1), _filling(200, wrong=10), False, ["s"]),
        (_filling(90), _filling(90, 99, 101, wrong=3), True, []),  # late now and then only
        (_filling(90), _filling(200, 210, wrong=0), True, []),  # late, and not seen
    ],
)
def test_margins(quiet: Filling, loaded: Filling, hides: bool, shows: list[str]) -> None:
    margins = Margins(100, [quiet], [loaded])
    assert (margins.hides, margins.shows) == (hides, shows)
    told = json.loads(json.dumps(margins.to_json(), allow_nan=False))
    assert (told["hides_when_quiet"], told["shows_under"]) == (hides, shows)
    assert told["settings"][1]["wrong"] == loaded.wrong
    document = gpu_rates.document([_row()], {}, 0.0, told)
    assert document["passed"] is (hides and bool(shows))
    assert gpu_rates.drawn(document).endswith(f"wrong in {loaded.wrong} of 10")


def test_differing_looks_at_bits() -> None:
    right = torch.tensor([0.0, float("nan")])
    outs = [right.clone(), torch.tensor([-0.0, float("nan")]), right + 1]
    assert gpu_margins.differing(outs, right) == 2


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_measured_cycles(cycles: list[int], share: float) -> None:
    filling = _filling(*cycles)
    assert filling.quantile(share) in cycles
    assert filling.quantile(0.0) == min(cycles)
    assert filling.quantile(1.0) == max(cycles)
    assert filling.to_json()["cycles"] == [filling.quantile(q) for q in (0.0, 0.5, 1.0)]
