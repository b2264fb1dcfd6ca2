"""Lines, documents, and what stands in them that is no JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verify.errors import InputFileError
from verify.onpolicy.formats import json_records
from verify.onpolicy.formats.json_records import BadRecord, Refused, first_record, records


def _read(path: Path, content: bytes) -> list[tuple[str, object]]:
    path.write_bytes(content)
    found = []
    for place, record in records(path):
        assert place.file == str(path)
        found.append((place.record, record.why if isinstance(record, BadRecord) else record))
    return found


def test_lines_with_blank_ones_a_byte_order_mark_and_windows_ends(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf\n{"a": 1}\r\n \t\n{"a": 2}'
    assert _read(tmp_path / "f", content) == [("line 2", {"a": 1}), ("line 4", {"a": 2})]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [[{"a": 1}, {"a": [2]}], {"a": {"b": [1, 2]}}])
def test_a_document_is_the_same_on_one_line_and_on_many(
    tmp_path: Path, value: object, indent: int | None
) -> None:
    found = _read(tmp_path / "f", json.dumps(value, indent=indent).encode())
    assert [record for _, record in found] == (value if isinstance(value, list) else [value])


def test_a_document_whose_first_line_looks_whole(tmp_path: Path) -> None:
    found = _read(tmp_path / "f", b'[{"a": 1}\n,{"a": 2}\n]')
    assert found == [("[0]", {"a": 1}), ("[1]", {"a": 2})]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' occurs twice"),
        (b'{"a": [{"x": 1, "x": 2}]}', "the name 'x' occurs twice"),
        (b'{"a": ', "not JSON: Expecting value at character 6"),
        (b'{"a": "\xff"}', "not UTF-8 text at byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "5000 digits"),
        (b"nonsense", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, why: str) -> None:
    found = _read(tmp_path / "f", b'{"n": 0}\n' + line + b'\n{"n": 2}\n')
    assert found[0] == ("line 1", {"n": 0})
    assert found[2] == ("line 3", {"n": 2})
    place, given = found[1]
    assert place == "line 2"
    assert why in str(given)


def test_numbers_that_are_not_finite_are_kept_and_those_beyond_float64_are_not(
    tmp_path: Path,
) -> None:
    ((_, found),) = _read(tmp_path / "f", b'{"a": [NaN, Infinity, -Infinity, 1e999, -0.0]}')
    assert isinstance(found, dict)
    nan, more, less, beyond, zero = found["a"]
    assert nan != nan
    assert (more, less) == (float("inf"), float("-inf"))
    assert isinstance(beyond, Refused)
    assert str(zero) == "-0.0"


def test_a_line_beyond_the_bound_is_skipped_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "LONGEST_LINE", 100)
    found = _read(tmp_path / "f", b'{"n": 0}\n{"a": "' + b"x" * 500 + b'"}\n{"n": 2}')
    assert [place for place, _ in found] == ["line 1", "line 2", "line 3"]
    assert "510 bytes, at most 100" in str(found[1][1])
    exact = b'{"a": "' + b"x" * 90 + b'"}\n'  # as long as the bound, with its end
    assert len(exact) == 100
    assert [place for place, _ in _read(tmp_path / "f", exact + b"{}")] == ["line 1", "line 2"]


def test_a_file_beyond_the_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "LARGEST_FILE", 10)
    with pytest.raises(InputFileError, match="13 bytes, at most 10 are read; give fewer steps"):
        _read(tmp_path / "f", b'{"a": 1}\n{}\n\n')


def test_the_first_record_is_found_behind_bad_lines_but_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b'nonsense\n5\n{"a": 1}\n')
    assert first_record(path) == {"a": 1}
    path.write_bytes(b"nonsense\n" * 20 + b'{"a": 1}\n')
    with pytest.raises(InputFileError, match="line 1: not JSON"):
        first_record(path)
    path.write_bytes(b"\n\n")
    with pytest.raises(InputFileError, match="no JSON object"):
        first_record(path)
