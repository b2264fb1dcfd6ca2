"""`verify diff A B`: two results, two safetensors files or two folders of them, compared by bits.

Results are compared by the digests of their outputs; tensors by their bits, names, dtypes and
shapes. Differences of seed, inputs and environment are listed beside equal and unequal bits alike,
since they decide what either means. It refuses to apply a tolerance, to compare digests of
different schemes, and to call a comparison of nothing, or of two runs that were not verified,
VERIFIED.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError, UnsupportedError
from verify.reasons import EXIT_CODES, Verdict
from verify.rendering.escaping import lines, printable
from verify.result_diffs import double, result_entries
from verify.results import FILE_NAME, read
from verify.tensor_files import TensorFile, opened

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Entry:
    """One compared thing: a tensor, a digest, a verdict, or a name that only one side has."""

    name: str
    equal: bool
    detail: str = ""
    lines: tuple[str, ...] = ()
    compared: bool = True  # False for what says nothing about bits, such as a note
    unsettled: bool = False  # nothing different, but nothing that lets the whole be VERIFIED


@dataclass(frozen=True)
class Diff:
    """All entries and what else should be known to read them."""

    a: str
    b: str
    kind: str  # "results" | "tensors"
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        if any(not entry.equal for entry in self.entries):
            return Verdict.MISMATCH
        if any(entry.unsettled for entry in self.entries):
            return Verdict.UNVERIFIED
        compared = any(entry.compared for entry in self.entries)
        return Verdict.VERIFIED if compared else Verdict.UNVERIFIED


def diff(a: Path, b: Path) -> Diff:
    """Compares two paths of the same kind. Raises InputFileError naming the one that is not."""
    kinds = [_kind(path) for path in (a, b)]
    if kinds[0] != kinds[1]:
        raise InputFileError(f"{a} is {kinds[0]}, but {b} is {kinds[1]}; give two of the same kind")
    if kinds[0] == "a result":
        documents = [read(path) for path in (a, b)]
        for path, document in zip((a, b), documents, strict=True):
            twice = double(document)
            if twice:
                raise InputFileError(f"{path}: holds the case {twice} twice: which is meant?")
        compared, notes = result_entries(*documents)
        entries = [Entry(**entry) for entry in compared]
        return Diff(str(a), str(b), "results", tuple(entries), tuple(notes))
    if kinds[0] == "a folder":
        return Diff(str(a), str(b), "tensors", tuple(_folders(a, b)))
    return Diff(str(a), str(b), "tensors", tuple(_files(a, b, "")))


def exit_code(found: Diff) -> int:
    """0 equal, 1 different, 3 nothing compared, or something that is not verified."""
    return EXIT_CODES[found.verdict]


def to_json(found: Diff) -> dict[str, Any]:
    """The comparison as a JSON-ready record."""
    return {
        "verdict": found.verdict.value,
        "exit_code": exit_code(found),
        **asdict(found),
    }


def text(found: Diff) -> str:
    """One line per entry, details below it, notes, and the verdict as the last line."""
    shown: list[str] = []
    for entry in found.entries:
        state = "same" if entry.equal else "differs"
        state = "open" if entry.unsettled else state
        detail = f": {printable(entry.detail)}" if entry.detail else ""
        shown.append(f"{state:<8}{printable(entry.name)}{detail}")
        shown += [f"        | {line}" for text in entry.lines for line in lines(text)]
    shown += [f"note: {printable(note)}" for note in found.notes]
    different = sum(not entry.equal for entry in found.entries)
    compared = sum(entry.compared for entry in found.entries)
    what = "digests" if found.kind == "results" else "tensors"
    total = f"verdict={found.verdict} {compared} {what} compared, {different} differences"
    if found.verdict is Verdict.UNVERIFIED:
        unsettled = sum(entry.unsettled for entry in found.entries)
        total += f"; {unsettled} open" if compared else "; nothing was compared"
    return "\n".join([*shown, total])


def _kind(path: Path) -> str:
    if not input_files.exists(path):
        raise InputFileError(f"{path}: no such file or folder")
    if path.is_dir():
        return "a result" if input_files.exists(path / FILE_NAME) else "a folder"
    return "a result" if path.suffix == ".json" else "a safetensors file"


def _folders(a: Path, b: Path) -> Iterator[Entry]:
    """The files of two folders, matched by their path below it."""
    found = [{str(path.relative_to(top)): path for path in _below(top)} for top in (a, b)]
    for name in sorted(found[0].keys() | found[1].keys()):
        if name in found[0] and name in found[1]:
            yield from _files(found[0][name], found[1][name], f"{name}: ")
        else:
            side = a if name in found[0] else b
            yield Entry(name, equal=False, detail=f"only in {side}", compared=False)


def _below(top: Path) -> Iterator[Path]:
    """All safetensors files below a folder, through links as well.

    Raises InputFileError for a folder that cannot be read and for links that lead in a circle:
    what is left out silently would count as equal.
    """

    def refuse(error: OSError) -> None:
        where = Path(error.filename or top)
        raise InputFileError(f"{where}: {input_files.absence_of(where, error)}")

    for folder, folders, names in os.walk(top, onerror=refuse, followlinks=True):
        here = Path(folder)
        for path in (here / name for name in folders):
            above = [here, *here.parents][: 1 + len(here.relative_to(top).parts)]
            if path.is_symlink() and any(
                one.resolve().is_relative_to(path.resolve()) for one in above
            ):
                raise InputFileError(f"{path}: is a symbolic link to a folder that holds it")
        yield from (here / name for name in (*folders, *names) if name.endswith(SUFFIX))


def _files(a: Path, b: Path, prefix: str) -> Iterator[Entry]:
    """The tensors of two files."""
    with opened(a) as left, opened(b) as right:
        for name in sorted({*left.names, *right.names}):
            if name in left.names and name in right.names:
                yield _tensors(left, right, name, prefix)
            else:
                side = a if name in left.names else b
                yield Entry(
                    f"{prefix}{name}", equal=False, detail=f"only in {side}", compared=False
                )


def _tensors(left: TensorFile, right: TensorFile, name: str, prefix: str) -> Entry:
    from verify.comparison import compare
    from verify.explanation import suggest

    a, b = left.tensor(name), right.tensor(name)
    try:
        comparison = compare(a, b, name)
    except UnsupportedError as error:
        raise InputFileError(f"{left.path}, {right.path}: {error}") from error
    described = [line.removeprefix(f"{name}: ") for line in comparison.describe()]
    if comparison.equal:
        compared = comparison.numel > 0
        return Entry(f"{prefix}{name}", equal=True, detail=described[0], compared=compared)
    hints = [f"suggests: {hint}" for hint in suggest(comparison, a, b, None)]
    return Entry(
        f"{prefix}{name}", equal=False, detail=described[0], lines=(*described[1:], *hints)
    )
