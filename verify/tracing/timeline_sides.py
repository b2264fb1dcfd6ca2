"""What each of two runs has of each rank, read one rank after the other: long runs of many ranks
are larger than memory should be asked for twice.

Which ranks, and what is added up over them, is as `divergence` compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from verify.tracing.common import common, common_runs
from verify.tracing.definitions import Definition, Key, Recording
from verify.tracing.files import file_name, read_folder, read_recording
from verify.tracing.findings import TraceDiff
from verify.tracing.rank_diffs import paired, within
from verify.tracing.shards import merged, placed, shapes
from verify.tracing.timeline_marks import Side

Pair = tuple[int | None, Side, Side]


def read_pairs(a: Path, b: Path, found: TraceDiff) -> Iterator[Pair]:
    """The sides of each rank of a comparison of `a` and `b`; rank None is the sum over all. A rank
    that a folder lacks has a side without recording. Raises InputFileError."""
    if found.worlds[0] != found.worlds[1]:
        yield _sums(a, b, found, None)
        return
    elsewhere: set[Key] = set()
    sums = any(one.rank is None for one in found.ranks)
    for rank, one, other in _ranks(a, b, found):
        if sums and one.recording is not None and other.recording is not None:
            elsewhere |= _elsewhere(one.recording, other.recording, found)
        yield rank, one, other
    if sums:
        yield _sums(a, b, found, elsewhere)


def _ranks(a: Path, b: Path, found: TraceDiff) -> Iterator[tuple[int, Side, Side]]:
    if a.is_file() and b.is_file():
        one, other = read_recording(a), read_recording(b)
        yield one.header.rank, *_sides(one, other)
        return
    if a.is_file() or b.is_file():
        ranks = [read_recording(a if a.is_file() else b).header.rank]
    else:
        ranks = list(range(found.worlds[0]))
    for rank in ranks:
        yield rank, *_sides(_of_rank(a, rank), _of_rank(b, rank))


def _sides(a: Recording | None, b: Recording | None) -> tuple[Side, Side]:
    """What both recordings of a rank have in common, or the only one."""
    if a is None or b is None:
        return Side(a), Side(b)
    one, other = common(a, b)
    return Side(one, whole=a), Side(other, whole=b)


def _of_rank(path: Path, rank: int) -> Recording | None:
    file = path if path.is_file() else path / file_name(rank)
    return read_recording(file) if file.is_file() else None


def _elsewhere(a: Recording, b: Recording, found: TraceDiff) -> set[Key]:
    """What the ranks of the runs hold other parts of."""
    others = {step.number: step.program for step in b.steps}
    seen = {
        (id(step.program), id(others[step.number])): (step.program, others[step.number])
        for step in a.steps
        if step.number in others and within(step.number, found.steps)
    }
    keys: set[Key] = set()
    for one, other in seen.values():
        pair = paired(one, other)
        for (i, _), form in zip(pair.alignment.pairs, pair.forms, strict=True):
            if form is None:
                keys.add(one.keys[i])
    return keys


def _sums(a: Path, b: Path, found: TraceDiff, wanted: set[Key] | None) -> Pair:
    """The sums over the ranks. wanted: None for all that has a place in a whole, or is held by
    all."""

    def takes(one: Definition, key: Key) -> bool:
        return placed(one, key) if wanted is None else key in wanted

    def side(run: Mapping[int, Recording], other: Mapping[int, Recording]) -> Side:
        total = merged(run, takes, shapes(other.values()), found.steps)
        left = frozenset(key for counts in total.left.values() for key in counts)
        return Side(total.recording, total.conflicts, left)

    one, two = common_runs(read_folder(a), read_folder(b))
    return None, side(one, two), side(two, one)
