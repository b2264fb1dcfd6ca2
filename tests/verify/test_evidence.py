"""Evidence as lines: nothing is lost, a cut line is refused, what is not JSON cannot be written."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.evidence import Execution, Facts, Failure, Plan, Trouble, from_line, to_line
from verify.workers import DONE, read_evidence

# every character, lone surrogates and line separators included
text = st.text(st.characters(), max_size=8)
texts = st.dictionaries(text, text, max_size=3)
numbers = st.integers(0, 2**40)
leaf = st.one_of(
    st.none(), st.booleans(), numbers, st.floats(allow_nan=False, allow_infinity=False), text
)
free = st.dictionaries(text, st.one_of(leaf, st.lists(leaf, max_size=3)), max_size=3)
names = st.lists(text, max_size=3)
failures = st.builds(Failure, text, text, text, st.booleans())
executions = st.builds(
    Execution,
    case=text,
    claim=text,
    variant=text,
    rank=numbers,
    run=numbers,
    process=numbers,
    requested=free,
    effective=free,
    in_effect=st.booleans(),
    group=st.lists(numbers, max_size=4),
    inputs=texts,
    same_inputs=st.booleans(),
    mutated=names,
    overwritten=names,
    unchanged=names,
    outputs=texts,
    expected=st.none() | texts,
    not_compared=texts,
    facts=st.dictionaries(text, st.builds(Facts, numbers, st.booleans(), numbers), max_size=3),
    generator=texts,
    consumed=names,
    differences=st.dictionaries(text, free, max_size=2),
    measurements=st.dictionaries(text, free, max_size=2),
    failure=st.none() | failures,
    seconds=st.floats(0, 1e6),
)
troubles = st.builds(Trouble, text, text, text, st.none() | text, st.none() | numbers, numbers)
plans = st.builds(
    Plan,
    text,
    text,
    names,
    numbers,
    st.dictionaries(text, numbers, max_size=2),
    placement=texts,
    constants=names,
    sources=names,
    random=st.booleans(),
)


@given(executions | troubles | plans)
def test_round_trip(record: Any) -> None:
    line = to_line(record)
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert from_line(line) == record


@given(executions | troubles, st.data())
def test_a_cut_line_is_refused_and_what_came_before_counts(
    tmp_path_factory: pytest.TempPathFactory, record: Any, data: st.DataObject
) -> None:
    line = to_line(record)
    cut = line[: data.draw(st.integers(1, len(line) - 1))]
    with pytest.raises(ValueError, match=r"."):
        from_line(cut)
    path = tmp_path_factory.getbasetemp() / "evidence.jsonl"
    path.write_text(f"{line}\n{line}\n{cut}")
    assert read_evidence(path) == ([record, record], False)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        '"execution"',
        '{"kind": "done"}',
        '{"kind": ["plan"]}',
        '{"kind": "execution"}',
        '{"kind": "trouble", "case": "c"}',
        '{"kind": "trouble", "case": "c", "reason": "r", "detail": "d", "surprise": 1}',
        '{"kind": "execution", "case": "c", "facts": [], "failure": null}',
    ],
)
def test_what_is_no_record_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_only_finite_numbers_are_written(number: float) -> None:
    record = Execution("c", "repeat", "v", 0, 0, measurements={"out": {"ratio": number}})
    with pytest.raises(ValueError, match="JSON compliant"):
        to_line(record)


def test_a_file_tells_whether_its_worker_was_done(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    assert read_evidence(path) == ([], False)
    trouble = Trouble("c", "crashed", "d")
    path.write_text(f"{to_line(trouble)}\n{DONE}\n")
    assert read_evidence(path) == ([trouble], True)


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Trouble("c", "crashed", "d").reason = "none"  # type: ignore[misc]
