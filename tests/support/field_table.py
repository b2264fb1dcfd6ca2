"""Faults of the field as a table: what must be found in each, and how the findings are read.

A file of cases (`tests/field/cases_*.py`) is written as a user would write it: a fault and its twin
for every report. All cases of a file are executed together by `verify run`, once; the tests then
read the result document only. `Field.says` are regular expressions that the findings of the
expected claim must match: the place and the likely cause are as much promised as the verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from verify import running
from verify.rendering import text

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """One report: the case that has the fault, its clean twin, and what must be said.

    claim, reason: where and as what it must be found; an UNVERIFIED reason asks for UNVERIFIED.
    tensor: the output that must be named first. says: patterns, all of which must be found in the
    claim's findings (or its case's notes). silent: patterns that must not be found there.
    equal: outputs that no finding may name. clean: other claims that must be VERIFIED in the fault.
    """

    id: str
    title: str
    fault: str
    twin: str
    claim: str
    reason: str
    tensor: str | None = None
    says: Sequence[str] = ()
    silent: Sequence[str] = ()
    equal: Sequence[str] = ()
    clean: Sequence[str] = ()
    twin_says: Sequence[str] = ()


def parameters(fields: Sequence[Field]) -> list[Any]:
    """For pytest.mark.parametrize: each field with its id, marked for the count."""
    return [pytest.param(one, id=f"{one.id}-{one.fault}") for one in fields]


def run_file(path: Path, **options: Any) -> dict[str, Json]:
    """All cases of a file, executed together; entries of the result document by name."""
    given = {"processes": 2, "timeout": 120.0, **options}
    result = running.run([str(path)], running.RunOptions(**given))
    json.dumps(result, allow_nan=False)
    return {case["case"]: case for case in result["cases"]}


def check_fault(field: Field, cases: Mapping[str, Json]) -> None:
    """The fault is found as what it is, where it is, with its likely cause."""
    case = cases[field.fault]
    claims = {claim["claim"]: claim for claim in case["claims"]}
    claim = claims[field.claim]
    shown = said(case, claim)
    reasons = [finding["reason"] for finding in claim["findings"]]
    assert field.reason in reasons, shown
    first = next(f for f in claim["findings"] if f["reason"] == field.reason)
    assert claim["verdict"] == first["verdict"], shown
    if field.tensor is not None:
        assert first["tensor"] == field.tensor, shown
    for pattern in field.says:
        assert re.search(pattern, shown), f"not said: {pattern!r}\n{shown}"
    for pattern in field.silent:
        assert not re.search(pattern, shown), f"said: {pattern!r}\n{shown}"
    named = {finding["tensor"] for finding in claim["findings"]}
    assert not named & set(field.equal), shown
    for name in field.clean:
        assert claims[name]["verdict"] == "VERIFIED", said(case, claims[name])


def check_twin(field: Field, cases: Mapping[str, Json]) -> None:
    """The twin is VERIFIED in every claim."""
    case = cases[field.twin]
    assert case["claims"], field.twin
    for claim in case["claims"]:
        assert claim["verdict"] == "VERIFIED", said(case, claim)
    for pattern in field.twin_says:
        shown = "\n".join(said(case, claim) for claim in case["claims"])
        assert re.search(pattern, shown), f"not said: {pattern!r}\n{shown}"


def test_the_fault_is_found(
    field: Field, cases: Mapping[str, Json], counts: Callable[[str, str], None]
) -> None:
    """For test modules to import: conftest gives it every entry of the module's FIELDS."""
    check_fault(field, cases)
    counts(field.id, "fault")


def test_the_twin_is_clean(
    field: Field, cases: Mapping[str, Json], counts: Callable[[str, str], None]
) -> None:
    """The same for the twins."""
    check_twin(field, cases)
    counts(field.id, "twin")


def said(case: Json, claim: Json) -> str:
    """What a person reads about one claim: findings, notes, variants and evidence."""
    lines = [f"{case['case']} / {claim['claim']}: verdict={claim['verdict']}"]
    lines += text.findings(case, [claim], shown=20)
    lines += [f"note: {note}" for note in case["notes"]]
    lines += [f"requested: {claim['requested']}", f"effective: {claim['effective']}"]
    lines += [f"measured: {name}: {m}" for name, m in claim["measurements"].items()]
    return "\n".join(lines)
