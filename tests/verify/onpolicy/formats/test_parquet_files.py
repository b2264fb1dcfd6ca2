"""Parquet: rows as they are, files that are cut or say too much, and a machine without pyarrow."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from mutations import mutated_bytes, read_or_refused, refused

from verify.onpolicy.formats import parquet_files
from verify.onpolicy.formats.parquet_files import columns, rows
from verify.onpolicy.formats.values import Problems

TABLE = pa.table(
    {
        "ids": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32())),
        "values": pa.array([[0.5, None], [float("nan")], [1.0], None], pa.list_(pa.float32())),
        "large": pa.array([[1], [2], [3], [4]], pa.large_list(pa.int8())),
        "text": ["a", None, "c", "d"],
        "number": [1, 2, None, 4],
        "nested": [[{"role": "x"}], [], None, []],
    }
)


def _bytes(table: Any = TABLE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def _all(path: Path, *names: str) -> list[dict[str, Any]]:
    return [row for _, row in rows(path, names or TABLE.column_names, Problems())]


def test_rows_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(_bytes())
    found = _all(path)
    assert [row["text"] for row in found] == ["a", None, "c", "d"]
    assert [row["number"] for row in found] == [1, 2, None, 4]
    assert found[0]["nested"] == [{"role": "x"}]
    assert found[0]["ids"].dtype == np.int32
    assert [None if row["ids"] is None else row["ids"].tolist() for row in found] == [
        [1, 2],
        [],
        None,
        [3],
    ]
    assert found[0]["values"] == [0.5, None]
    assert np.isnan(found[1]["values"]).all()
    assert found[2]["values"].dtype == np.float32
    assert [row["large"].tolist() for row in found] == [[1], [2], [3], [4]]
    assert [spot.place.record for spot, _ in rows(path, ["text"], Problems())] == [
        "row 0",
        "row 1",
        "row 2",
        "row 3",
    ]
    assert _all(path, "none", "text")[0] == {"text": "a"}
    assert columns(path)["number"] == "int64"


def test_files_that_are_cut_or_none(tmp_path: Path) -> None:
    path = tmp_path / "f"
    whole = _bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for content, said in (
        (whole[:-1], "that is cut"),
        (whole[:300], "that is cut"),
        (whole[:-8] + b"\xff\xff\xff\x7fPAR1", "that is cut"),
        (b"PAR1", "that is cut"),
        (b"{}", "not a Parquet file"),
        (b"", "not a Parquet file"),
        (whole[:footer] + bytes(32) + whole[footer + 32 :], "pyarrow does not read it"),
    ):
        path.write_bytes(content)
        assert said in refused(columns, path)
    assert "is a folder" in refused(columns, tmp_path)


def test_numbers_of_rows_and_values_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(_bytes(pa.table({"ids": [[0] * 5000], "text": ["a"]})))
    assert path.stat().st_size < 2000  # a few bytes for five thousand values
    assert _all(path, "ids")[0]["ids"].tolist() == [0] * 5000
    monkeypatch.setattr(parquet_files, "MOST_VALUES", 4999)
    said = refused(lambda path: _all(path, "ids"), path)
    assert "column 'ids.list.element' has 5000 values, at most 4999 are read" in said
    assert _all(path, "text") == [{"text": "a"}]
    monkeypatch.setattr(parquet_files, "MOST_SAMPLES", 0)
    assert "1 rows, at most 0 are read" in refused(lambda path: _all(path, "text"), path)


def test_what_comes_after_rows_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "f"
    table = pa.table({"text": [f"{n} {n * n}" for n in range(400)]})
    content = bytearray(_bytes(table, row_group_size=100, compression="zstd"))
    start = parquet.ParquetFile(io.BytesIO(content)).metadata.row_group(2).column(0)
    content[start.data_page_offset + 30 : start.data_page_offset + 60] = bytes(30)
    path.write_bytes(content)
    problems = Problems()
    found = [row["text"] for _, row in rows(path, ["text"], problems)]
    assert found == [f"{n} {n * n}" for n in range(len(found))]
    assert 0 < len(found) < 300
    (problem,) = problems.listed()
    assert problem.place.record == f"row {len(found)} and what follows"
    assert (problem.kind, "pyarrow does not read it" in problem.what) == ("unreadable", True)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(_bytes())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'mok-verify[onpolicy]'" in refused(columns, path)


_SMALL = _bytes(TABLE.select(["ids", "values", "text"]))


@settings(max_examples=90)
@given(content=mutated_bytes(_SMALL))
def test_damaged_files_are_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.parquet"
    path.write_bytes(content)
    read_or_refused(_all, path)
