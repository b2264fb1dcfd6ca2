"""Reports of the field about on-policy data: each is found with the right cause, its twin is not.

Every case is written as files, read back, paired, measured, diagnosed and judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onpolicy_file_reports
import onpolicy_replay_reports
import onpolicy_reports
import onpolicy_weight_reports
import pytest
from onpolicy_cases import examine
from onpolicy_tables import Report, Twin

Counts = Callable[[str, str], None]
MODULES = (
    onpolicy_reports,
    onpolicy_weight_reports,
    onpolicy_replay_reports,
    onpolicy_file_reports,
)
FAULTS = tuple(one for module in MODULES for one in module.FAULTS)
TWINS = tuple(one for module in MODULES for one in module.TWINS)
UNNAMED = {"numeric-drift", "cannot-tell"}
HARMLESS = {"filler-layers"}  # of an engine that records dense layers, too


def named(reports: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(one, id=f"{one.id}-{one.variant.replace(' ', '-')}") for one in reports]


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Counts:
    """As for the other reports: called at the end of a test that passed."""
    return lambda identity, side: record_property("field", f"{identity} {side}")


@pytest.mark.parametrize("report", named(FAULTS))
def test_the_right_cause_comes_first(report: Report, tmp_path: Path, counts: Counts) -> None:
    seen = examine(tmp_path, report.make())
    if report.first:
        assert seen.claimed, seen.text
        assert seen.claimed[0] in report.first, seen.text
    allowed = {*seen.claimed[:1], *report.also} if report.first else set(report.also)
    assert set(seen.claimed) <= allowed | UNNAMED, seen.text
    assert set(report.misaligned) <= set(seen.misaligned), seen.text
    replay = [] if seen.routing is None else [fault.kind for fault in seen.routing.faults]
    assert set(report.replay) <= set(replay), seen.text
    for pattern in report.says:
        assert re.search(pattern, seen.text), f"not said: {pattern!r}\n{seen.text}"
    assert str(seen.verdict.verdict) == report.verdict, seen.text
    counts(report.id, "fault")


@pytest.mark.parametrize("twin", named(TWINS))
def test_nothing_is_claimed_of_the_twin(twin: Twin, tmp_path: Path, counts: Counts) -> None:
    seen = examine(tmp_path, twin.make())
    assert set(seen.claimed) <= set(twin.claims), seen.text
    assert not seen.misaligned, seen.text
    replay = set() if seen.routing is None else {fault.kind for fault in seen.routing.faults}
    assert replay <= HARMLESS, seen.text
    assert str(seen.verdict.verdict) != "MISMATCH", seen.text
    for pattern in twin.says:
        assert re.search(pattern, seen.text), f"not said: {pattern!r}\n{seen.text}"
    counts(twin.id, "twin")


def test_every_report_has_a_twin_and_every_control_stays_silent() -> None:
    assert {one.id for one in FAULTS} == {f"BUG-{n}" for n in (27, *range(33, 53))}
    silent = {"control-3", "control-5", "control-8", "control-9"}
    assert {one.id for one in TWINS} == {one.id for one in FAULTS} | silent
