"""Broken files of each JSON format: a dump with problems or InputFileError, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_files import PRIME_TRACE, RECORDS

from verify.errors import InputFileError
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.samples import META, SIDES, TRAINER, Dump

_CASES = [*RECORDS.items(), ("prime-rl", PRIME_TRACE)]
_KINDS = {"unreadable", "bad-value", "note"}

_DEEP = "put a deep list here"  # one of Python would trip what makes and shows the examples

_NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**300, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"), 5e-324),
    *("", "NaN", "-inf", "1", "\ud800", "\x00", "x" * 3000, "AAAA", "nrlre1:int8:1x1x1:AA=="),
    *([], {}, [[]], [[[]]], [None], [[None]], [[[None]]], {"": None}, [{}], _DEEP),
    *([1], [1.5], ["1"], [True], [[1]], [[[1]]], [[[1, 2]], [[3]]], [2**70], {"data": "AAAA"}),
    *({"logprob": None}, {"1": -0.5}, {"type": []}, {"start": -5}, {"content": [None]}),
    *([{"version": 1, "start": 0, "end": 10**9}], [0] * 500),
)
_junk = st.sampled_from(_NASTY) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
_changes = st.lists(st.tuples(st.integers(0, 10_000), _junk), min_size=1, max_size=3)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, name) in a record."""
    for name in node if isinstance(node, dict) else range(len(node)):
        yield node, name
        if isinstance(node[name], dict | list):
            yield from _places(node[name])


def _changed(record: dict[str, Any], changes: list[tuple[int, Any]]) -> dict[str, Any]:
    """The record with some of its values replaced by others."""
    record = copy.deepcopy(record)
    for number, value in changes:
        places = list(_places(record))
        if places:
            container, name = places[number % len(places)]
            container[name] = copy.deepcopy(value)
    return record


def _line(record: dict[str, Any], changes: list[tuple[int, Any]]) -> str:
    line = json.dumps(_changed(record, changes))
    return line.replace(json.dumps(_DEEP), "[" * 300 + "0" + "]" * 300)


def _read(path: Path, content: bytes, form: str | None, side: str = TRAINER) -> Dump | None:
    path.write_bytes(content)
    try:
        dump = read_dump(path, side, form)
    except InputFileError as error:
        told = str(error)
    else:
        _is_sound(dump, path)
        return dump
    assert str(path) in told
    assert len(told) < 2000
    return None


def _is_sound(dump: Dump, path: Path) -> None:
    """What everybody who takes a dump relies on."""
    assert dump.files == (str(path),)
    assert dump.samples
    for problem in dump.problems:
        assert problem.kind in _KINDS
        assert 0 < len(problem.what) < 1000
        assert problem.place.file == str(path)
    for sample in dump.samples:
        assert sample.key
        for ids in (sample.prompt, sample.tokens):
            assert ids is None or (ids.dtype == np.int64 and ids.ndim == 1 and (ids >= 0).all())
        assert sample.mask is None or (sample.mask.dtype == np.bool_ and sample.mask.ndim == 1)
        assert set(sample.series) | set(sample.routing) | set(sample.top) <= set(SIDES)
        for series in sample.series.values():
            assert series.values.dtype == np.float64
            assert series.values.shape == series.absent.shape
            assert np.isnan(series.values[series.absent]).all()
        for routing in sample.routing.values():
            assert routing.experts.ndim == 3
            assert routing.experts.dtype in (np.int16, np.int32)
            assert routing.start >= -1
        assert set(sample.meta) <= set(META)


@pytest.mark.parametrize(("form", "record"), _CASES)
@settings(max_examples=20, deadline=None)
@given(changes=_changes)
def test_records_with_other_values_in_them(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    record: dict[str, Any],
    changes: list[tuple[int, Any]],
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.jsonl"
    lines = [_line(record, changes), json.dumps(record)]
    dump = _read(path, "\n".join(lines).encode("utf-8", "surrogatepass"), form)
    assert dump is not None, "the second line is good"
    _read(path, lines[0].encode(), None)


@pytest.mark.parametrize(("form", "record"), _CASES)
@settings(max_examples=20, deadline=None)
@given(
    cut=st.integers(0, 5000),
    inserted=st.binary(max_size=4)
    | st.sampled_from([b"\n", b"[" * 5000, b"\x00", b"\xef\xbb\xbf"]),
    keep=st.booleans(),
)
def test_files_that_are_cut_or_have_bytes_put_in(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    record: dict[str, Any],
    cut: int,
    inserted: bytes,
    keep: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    line = json.dumps(record).encode()
    at = cut % len(line)
    content = line[:at] + inserted + (line[at:] if keep else b"")
    _read(path, content, form)
    _read(path, content, None)
    dump = _read(path, content + b"\n" + line, form)
    assert dump is not None or inserted.startswith((b"\xff\xfe", b"\xfe\xff", b"<", b"BZh"))


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=300))
def test_bytes_of_any_kind(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    for form in (None, "plain", "prime-rl"):
        _read(path, content, form)
        _read(path, b"{" + content + b"}", form)


@pytest.mark.parametrize(("form", "record"), _CASES)
def test_every_value_replaced_by_every_nasty_one(
    tmp_path: Path, form: str, record: dict[str, Any]
) -> None:
    """Not drawn: each place of a record in turn, all the values in one file."""
    count = len(list(_places(record)))
    for number in range(0, count, 1 + count // 12):
        lines = [_line(record, [(number, value)]) for value in _NASTY]
        dump = _read(tmp_path / "f", "\n".join([*lines, json.dumps(record)]).encode(), form)
        assert dump is not None


def test_a_name_twice_is_refused_in_every_format(tmp_path: Path) -> None:
    for form, record in _CASES:
        line = json.dumps(record)
        twice = line[:-1] + ', "again": 1, "again": 2}'
        dump = _read(tmp_path / "f", f"{twice}\n{line}\n".encode(), form)
        assert dump is not None
        assert "'again' occurs twice" in dump.problems[0].what
