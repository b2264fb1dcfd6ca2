"""Goldens that no case of a gate declares: switched off, or of cases that the gate does not run.

A change that takes `golden=` out of a case, or renames the case, also takes the comparison away
that would show what else it changed. It refuses to import files that the gate does not run: whether
their cases still declare a golden is not asked, only how many such goldens there are.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verify import input_files
from verify.targets import Found


@dataclass(frozen=True)
class Stored:
    """unclaimed: goldens that nothing declares any more, as `case (kind)`. not_checked: how many
    others no case of the gate checks."""

    unclaimed: tuple[str, ...] = ()
    not_checked: int = 0


def stored_goldens(folder: Path, found: Sequence[Found]) -> Stored:
    """What the folder of goldens holds besides that of the cases found.

    An entry is unclaimed when its file or module is gone, or is one that the gate runs (or that
    ships with the package) and has no case that declares it. Raises InputFileError for an index
    that cannot be read.
    """
    from verify.goldens import status, store

    index = store.read(folder)
    declared = {(one.case.name, one.case.golden) for one in found if one.case.golden}
    run = {_place(one.target, Path.cwd()) for one in found}
    above = Path(os.path.abspath(folder)).parent
    unclaimed, not_checked = [], 0
    for entry in index.entries:
        if (entry.case, entry.kind) in declared:
            continue
        place = _place(entry.target, above)
        known = place in run or place == ""
        if status.case_of(entry, folder) is None if known else not _exists(place):
            unclaimed.append(f"{entry.case} ({entry.kind})")
        else:
            not_checked += 1
    return Stored(tuple(dict.fromkeys(unclaimed)), not_checked)


def _place(target: str, above: Path) -> str:
    """The file of a target as a real path, the module of one, or nothing for a built-in case."""
    path, separator, _ = target.partition("::")
    if separator:
        return os.path.realpath(above / path)
    module, colon, _ = target.partition(":")
    return module if colon else ""


def _exists(place: str) -> bool:
    """Whether a file or module is there, without importing anything."""
    if os.path.isabs(place):
        return input_files.exists(Path(place))
    path: list[str] | None = [*sys.path, os.getcwd()]
    parts = place.split(".")
    for count in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return True
