"""run_megatron's rank_{r}.json of miles: what one rank scored of every sequence, put together.

`logprob_entries[batch][...]` of each rank holds global_position, token_id (the label, which is the
next token of the sequence), logprob and is_valid. Under context parallelism each rank has a part of
the positions, and ranks of one tensor-parallel group all have the same ones: positions are merged,
and one that two ranks value differently is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verify.errors import InputFileError
from verify.onpolicy.formats import json_records, values
from verify.onpolicy.formats.json_records import BadRecord
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import Dump, Place, Sample, Series

_LISTED = "logprob_entries"
_LAST = 2**40  # position
_SHOWN = 20  # entries that two ranks value differently


def read(paths: Sequence[Path], side: str) -> Dump:
    """The sequences that some ranks' files hold, with the values under `side`.

    Raises InputFileError where a file is none of these.
    """
    problems = Problems()
    merged: dict[int, dict[int, tuple[int, float | None]]] = {}
    places: dict[int, Place] = {}
    left_out = 0
    for path in paths:
        for batch, entries in _batches(path, problems):
            spot = Spot(Place(str(path), f"{_LISTED}[{batch}]"), problems)
            places.setdefault(batch, spot.place)
            left_out += _merge(merged.setdefault(batch, {}), entries, spot)
    samples = [
        _sample(batch, entries, places[batch], side) for batch, entries in sorted(merged.items())
    ]
    notes = [
        "sequences are paired by their place in the batch: rank_{r}.json has no ids of samples"
    ]
    if left_out:
        notes.append(f"{left_out} positions are not valid (their label is -100), and are left out")
    files = tuple(map(str, paths))
    return Dump("miles", files, tuple(samples), problems.listed(), tuple(notes))


def _batches(path: Path, problems: Problems) -> Iterable[tuple[int, Sequence[Any]]]:
    found = False
    for place, record in json_records.records(path):
        listed = record.get(_LISTED) if isinstance(record, Mapping) else None
        if isinstance(record, BadRecord):
            problems.add(place, "", record.why, "unreadable")
        elif not isinstance(listed, list):
            problems.add(place, _LISTED, f"is {values.described(listed)}; it is a list of lists")
        else:
            found = True
            for batch, entries in enumerate(listed[: values.MOST_SAMPLES]):
                if isinstance(entries, list):
                    yield batch, entries
                else:
                    what = f"is {values.described(entries)}; it is a list of positions"
                    problems.add(place, f"{_LISTED}[{batch}]", what)
    if not found:
        first = next(iter(problems.listed()), None)
        raise InputFileError(
            f"{path}: holds no {_LISTED} that can be read"
            + (f": {first.field or first.place.record} {first.what}" if first else "")
        )


def _merge(
    positions: dict[int, tuple[int, float | None]], entries: Sequence[Any], spot: Spot
) -> int:
    """Adds a rank's entries of one sequence; returns how many are not valid."""
    left_out = shown = 0
    for at, entry in enumerate(entries):
        field = f"[{at}]"
        if not isinstance(entry, Mapping):
            spot.bad(field, f"is {values.described(entry)}; it is an object")
            continue
        if entry.get("is_valid") is False:
            left_out += 1
            continue
        position, token = entry.get("global_position"), entry.get("token_id")
        given = entry.get("logprob")
        if not (type(position) is type(token) is int and type(given) is float):
            strict = _strict(entry, spot, field)
            if strict is None:
                continue
            position, token, given = strict
        elif not (0 <= position <= _LAST and 0 <= token <= values.LARGEST_ID):
            _strict(entry, spot, field)
            continue
        known = positions.setdefault(position, (token, given))
        if not _same(known, (token, given)):
            shown += 1
            if shown <= _SHOWN:
                spot.bad(
                    field,
                    f"says token {token} with {given} at position {position}, another rank token "
                    f"{known[0]} with {known[1]}; ranks that score one position give one value",
                )
    return left_out


def _strict(
    entry: Mapping[str, Any], spot: Spot, field: str
) -> tuple[int, int, float | None] | None:
    """Position, token and value of an entry that is not as written by miles, or None with a
    problem."""
    position = values.integer(
        entry.get("global_position"), spot, f"{field}.global_position", 0, _LAST
    )
    token = values.integer(entry.get("token_id"), spot, f"{field}.token_id", 0, values.LARGEST_ID)
    if position is None or token is None:
        if entry.get("global_position") is None or entry.get("token_id") is None:
            spot.bad(field, "has no global_position or no token_id")
        return None
    series = values.series([entry.get("logprob")], spot, f"{field}.logprob")
    given = None if series is None or series.absent[0] else float(series.values[0])
    return position, token, given


def _same(one: tuple[int, float | None], other: tuple[int, float | None]) -> bool:
    return one == other or (one[0] == other[0] and one[1] != one[1] and other[1] != other[1])


def _sample(
    batch: int, positions: Mapping[int, tuple[int, float | None]], place: Place, side: str
) -> Sample:
    ordered = [positions[position] for position in sorted(positions)]
    numbers = np.array([np.nan if value is None else value for _, value in ordered])
    absent = np.array([value is None for _, value in ordered], dtype=np.bool_)
    return Sample(
        key=f"batch {batch}",
        place=place,
        tokens=np.array([token for token, _ in ordered], dtype=np.int64),
        series={side: Series(numbers.astype(np.float64), absent, "float32")},
        meta={"batch_position": batch},
    )
