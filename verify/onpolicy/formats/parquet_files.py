"""Rows of Parquet files, a few at a time, with lists of numbers as arrays.

A few bytes of Parquet can stand for any number of values, so the numbers of rows and values that
the file states are bounded before anything is read. pyarrow is imported only here: it comes with
the extra `onpolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy.formats.values import MOST_SAMPLES, Problems, Spot
from verify.onpolicy.samples import Place
from verify.rendering.escaping import clipped

LARGEST = 16 * 2**30  # bytes of a file
MOST_VALUES = 2**28  # of one column
_MOST_BYTES = 16 * 2**30  # of the columns that are read, once unpacked
_AT_ONCE = 64  # rows
_LONGEST_FOOTER = 64 * 2**20


def columns(path: Path) -> Mapping[str, str]:
    """The names of the columns and their types, as pyarrow prints them. InputFileError says why
    there are none to be had."""
    with_footer = _opened(path)
    try:
        schema = with_footer.schema_arrow
        return {str(field.name): str(field.type) for field in schema}
    except Exception as error:  # ArrowInvalid, ArrowNotImplementedError, and what else it raises
        raise InputFileError(_unreadable(path, error)) from None
    finally:
        with_footer.close()


def rows(
    path: Path, names: Sequence[str], problems: Problems
) -> Iterator[tuple[Spot, dict[str, Any]]]:
    """Each row, its place being "row 12", as values by column, of those of `names` that are there.

    A list of numbers without gaps is an array of the dtype in the file; a list with null in it is a
    list with None; all else is as Python has it. Raises InputFileError where no row can be read;
    where the rows after some cannot, that is a problem.
    """
    file = _opened(path)
    number = 0
    try:
        present = [name for name in names if name in file.schema_arrow.names]
        _check(path, file.metadata, set(present))
        for batch in file.iter_batches(batch_size=_AT_ONCE, columns=present, use_threads=False):
            found = {name: _cells(batch.column(name)) for name in present}
            for at in range(batch.num_rows):
                spot = Spot(Place(str(path), f"row {number}"), problems)
                yield spot, {name: cells[at] for name, cells in found.items()}
                number += 1
    except InputFileError:
        raise
    except Exception as error:  # ArrowInvalid, OSError, MemoryError and what else pyarrow raises
        if not number:
            raise InputFileError(_unreadable(path, error)) from None
        what = _unreadable(path, error).removeprefix(f"{path}: ")
        problems.add(Place(str(path), f"row {number} and what follows"), "", what, "unreadable")
    finally:
        file.close()


def _cells(column: Any) -> list[Any]:
    """One value for each row of a column."""
    import pyarrow as pa

    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not listed or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
    ):
        return list(column.to_pylist())
    cells: list[Any] = []
    for scalar in column:
        items = scalar.values
        if items is None:
            cells.append(None)
        elif items.null_count:
            cells.append(items.to_pylist())
        else:
            cells.append(items.to_numpy(zero_copy_only=False))
    return cells


def _opened(path: Path) -> Any:
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    _check_ends(path)
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputFileError(
            f"{path}: is Parquet, which needs pyarrow; install it: "
            "pip install 'mok-verify[onpolicy]'"
        ) from None
    try:
        return parquet.ParquetFile(
            path,
            thrift_string_size_limit=2**24,
            thrift_container_size_limit=2**22,
            page_checksum_verification=True,
        )
    except Exception as error:  # ArrowInvalid, OSError and what else pyarrow raises
        raise InputFileError(_unreadable(path, error)) from None


def _check_ends(path: Path) -> None:
    """A whole Parquet file begins and ends with its name; a copy that was cut does not."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
            size = file.seek(0, 2)
            file.seek(max(0, size - 8))
            tail = file.read(8)
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    if size > LARGEST:
        raise InputFileError(f"{path}: {size} bytes, at most {LARGEST} are read; give fewer steps")
    if start != b"PAR1":
        raise InputFileError(f"{path}: not a Parquet file: begins with {start!r}")
    footer = int.from_bytes(tail[:4], "little")
    if size < 12 or tail[4:] != b"PAR1" or footer > min(size - 12, _LONGEST_FOOTER):
        raise InputFileError(
            f"{path}: is a Parquet file that is cut, or was not closed by its writer; copy or "
            "write it again"
        )


def _check(path: Path, metadata: Any, present: set[str]) -> None:
    if metadata.num_rows > MOST_SAMPLES:
        raise InputFileError(
            f"{path}: {metadata.num_rows} rows, at most {MOST_SAMPLES} are read; give fewer steps"
        )
    counts: dict[str, int] = {}
    unpacked = 0
    for group in range(metadata.num_row_groups):
        for at in range(metadata.num_columns):
            column = metadata.row_group(group).column(at)
            name = str(column.path_in_schema)
            if name.split(".")[0] not in present:
                continue
            counts[name] = counts.get(name, 0) + max(0, column.num_values)
            unpacked += max(0, column.total_uncompressed_size)
    for name, count in counts.items():
        if count > MOST_VALUES:
            raise InputFileError(
                f"{path}: column {clipped(name, 80)!r} has {count} values, at most {MOST_VALUES} "
                "are read; give fewer steps"
            )
    if unpacked > _MOST_BYTES:
        raise InputFileError(
            f"{path}: {unpacked} bytes when unpacked, at most {_MOST_BYTES} are read"
        )


def _unreadable(path: Path, error: Exception) -> str:
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{path}: pyarrow does not read it: {clipped(said, 200)}; copy or write it again"
