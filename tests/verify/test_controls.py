"""Controls: every planted fault is caught by name, every twin is clean, every detector is needed.

All controls that need no GPU are executed once, through the real engine; what follows judges the
same records. Those that need one are tested in `test_controls_gpu.py`.
"""

from __future__ import annotations

import json

import pytest

from verify import controls
from verify.cases import CLAIMS
from verify.controls.catalogue import detectors, module_of, named
from verify.errors import CaseError
from verify.reasons import REASONS, Verdict
from verify.targets import find

pytestmark = pytest.mark.slow

BY_NAME = {control.name: control for control in controls.CONTROLS}
ANYWHERE = tuple(control for control in controls.CONTROLS if not control.needs)


@pytest.fixture(scope="module")
def collected() -> controls.Collected:
    return controls.collect(ANYWHERE)


@pytest.fixture(scope="module")
def outcomes(collected: controls.Collected) -> dict[str, controls.ControlOutcome]:
    return {outcome.name: outcome for outcome in controls.evaluate(collected).outcomes}


@pytest.mark.parametrize("name", sorted(control.name for control in ANYWHERE))
def test_fault_is_caught_by_name_and_twin_is_clean(
    name: str, outcomes: dict[str, controls.ControlOutcome]
) -> None:
    outcome = outcomes[name]
    assert outcome.passed, outcome.detail


@pytest.mark.parametrize("off", controls.DETECTORS)
def test_without_a_detector_exactly_its_controls_fail(
    off: str, collected: controls.Collected
) -> None:
    report = controls.evaluate(collected, frozenset({off}))
    blinded = {c.name for c in ANYWHERE if off in c.detectors}
    assert set(report.failed) == blinded
    assert report.exit_code == (1 if blinded else 0)
    for outcome in report.outcomes:
        assert outcome.caught is (off not in BY_NAME[outcome.name].detectors), outcome.found


def test_without_its_condition_an_isolated_fault_passes_unseen(
    collected: controls.Collected,
) -> None:
    isolated = [control for control in ANYWHERE if control.isolated]
    assert len(isolated) >= 10
    for control in isolated:
        report = controls.evaluate(collected, frozenset({control.claim}))
        found = next(o.found for o in report.outcomes if o.name == control.name)
        assert found == f"{control.claim}: not executed"


def test_all_of_them_in_time(collected: controls.Collected) -> None:
    assert len(ANYWHERE) >= 36
    report = controls.evaluate(collected)
    assert (report.status, report.exit_code) == ("passed", 0)
    last = controls.text(report.to_json()).splitlines()[-1]
    count = len(ANYWHERE)
    assert last == f"controls: {count} faults, {count} caught, {count} twins clean"


def test_every_condition_and_every_reason_has_a_control() -> None:
    covered = frozenset().union(*(control.detectors for control in controls.CONTROLS))
    assert covered == set(CLAIMS) | set(REASONS)
    assert {f"condition/{claim}" for claim in CLAIMS} <= set(BY_NAME)
    without_own = {"reason/" + reason for reason in REASONS} - set(BY_NAME)
    assert not without_own


def test_controls_are_what_they_say() -> None:
    assert len(BY_NAME) == len(controls.CONTROLS)
    for control in controls.CONTROLS:
        assert control.claim in control.fault.claims
        assert control.claim in control.twin.claims
        assert control.verdict is not Verdict.VERIFIED
        assert control.fault.execute.__doc__
        for case in (control.fault, control.twin):
            assert [one.case for one in find(f"{module_of(control)}:{case.name}")] == [case]


def test_names_and_patterns() -> None:
    assert controls.names() == sorted(BY_NAME)
    assert controls.names("memory") == ["condition/memory"]
    assert controls.names("condition/*") == sorted(f"condition/{claim}" for claim in CLAIMS)
    assert controls.names("nothing-like-this") == []
    with pytest.raises(CaseError, match="did you mean condition/memory"):
        named(["condition/memry"])
    with pytest.raises(CaseError, match="did you mean input-mutated"):
        detectors("input-mutate")


def test_nothing_chosen_is_no_pass() -> None:
    outcome = controls.run("nothing-like-this")
    assert (outcome["status"], outcome["exit_code"], outcome["passed"]) == ("not-run", 3, 0)
    assert controls.text(outcome) == "controls: nothing ran"


@pytest.mark.parametrize("off", ["memory", "bits-differ"])
def test_a_run_without_a_detector_fails_and_says_why(off: str) -> None:
    told: list[str] = []
    outcome = controls.run(["condition/memory"], off, progress=told.append)
    json.dumps(outcome, allow_nan=False)
    assert (outcome["status"], outcome["failed"]) == ("failed", ["condition/memory"])
    assert told
    text = controls.text(outcome)
    assert "condition/memory  control=MISSED twin=clean  expected memory: MISMATCH(bits-" in text
    assert f"switched off: {off}" in text
    assert text.endswith("controls: 1 faults, 0 caught, 1 twins clean")


def test_an_alarming_twin_fails_its_control(collected: controls.Collected) -> None:
    control = BY_NAME["reason/bits-differ"]
    fault, twin = control.fault.name, control.twin.name
    records = {**collected.records}
    records[twin] = tuple(
        type(record)(**{**vars(record), "case": twin}) for record in records[fault]
    )
    swapped = controls.Collected((control,), collected.plans, records)
    report = controls.evaluate(swapped)
    assert (report.status, report.failed) == ("failed", (control.name,))
    assert "twin=ALARM" in controls.text(report.to_json())
