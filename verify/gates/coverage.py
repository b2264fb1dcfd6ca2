"""Which cases a change affects, and which changed source files no case covers.

A case covers the files that `verify.sources` gives for it, compared as resolved paths: a file of
the same name in another copy of the package covers nothing. It refuses to conclude that a case is
not affected: it orders cases and fails those that a budget cut off, it never skips one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.gates.changes import Changes
from verify.gates.config import Config
from verify.gates.patterns import matches
from verify.sources import source_files
from verify.targets import Found


@dataclass(frozen=True)
class Coverage:
    """affected: positions of the cases that a change affects. uncovered: names of changed sources
    that no case covers. elsewhere: for some of those, a covered file of the same name and folder
    that lies in another place."""

    affected: frozenset[int]
    uncovered: tuple[str, ...]
    elsewhere: Mapping[str, Path]


def coverage(
    config: Config,
    changes: Changes,
    found: Sequence[Found],
    golden_changes: Sequence[Mapping[str, Any]],
) -> Coverage:
    """What a change means for the cases.

    A source that is gone can be covered by nothing and is not asked for; but nobody can say who
    used it, so it affects every case. So does a rename, which is a file gone and another one new.
    """
    covered = [set(source_files(one.case)) for one in found]
    everything = {path for files in covered for path in files}
    gone = set(changes.gone)
    sources = [name for name in changes.changed if is_source(config, name)]
    there = {name: Path(os.path.realpath(name)) for name in changes.changed if name not in gone}
    touched = set(there.values())
    stored = {row.get("case") for row in golden_changes}
    lost = any(name in gone for name in sources)
    affected = frozenset(
        position
        for position, one in enumerate(found)
        if lost or touched & covered[position] or _home(one) in touched or one.case.name in stored
    )
    uncovered = [name for name in sources if name in there and there[name] not in everything]
    return Coverage(affected, tuple(uncovered), _elsewhere(uncovered, everything))


def is_source(config: Config, name: str) -> bool:
    """Whether the gate asks for a case that covers the file."""
    return matches(name, config.kernels) and not matches(name, config.exempt)


def _home(one: Found) -> Path | None:
    """The file that a target names, where its inputs and promises are written."""
    file, colons, _ = one.target.partition("::")
    if colons:
        return Path(os.path.realpath(file))
    module = sys.modules.get(one.target.partition(":")[0]) if ":" in one.target else None
    origin = getattr(module, "__file__", None)
    return Path(os.path.realpath(origin)) if origin else None


def _elsewhere(uncovered: Sequence[str], covered: set[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name in uncovered:
        parts = Path(name).parts[-2:]
        for path in sorted(covered):
            if path.parts[-len(parts) :] == parts:
                found.setdefault(name, path)
    return found
