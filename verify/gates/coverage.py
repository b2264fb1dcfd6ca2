"""Which cases a change affects, and which changed source files no case covers.

A case covers the files that `verify.sources` gives for it, compared as resolved paths: a file of
the same name in another copy of the package covers nothing. It refuses to conclude that a case is
not affected from what nobody said: a module that was loaded, or a Python file beside the cases,
affects every case unless `sources` say whose it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.gates.config import Config
from verify.gates.patterns import all_below, below, files, matches
from verify.gates.touched import Changes
from verify.sources import source_files
from verify.targets import Found


@dataclass(frozen=True)
class Coverage:
    """affected: positions of the cases that a change affects. uncovered: names of changed sources
    that no case covers; that of a submodule says that it is one. elsewhere: for some of those, a
    covered file of the same name and folder that lies in another place.
    """

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
    Of a submodule git names the folder alone: it affects every case, and every source below it must
    be covered, since any of them may have changed. So does an old index of goldens that cannot be
    read.
    """
    from verify.goldens.changes import UNREADABLE

    covered = [set(source_files(one.case)) for one in found]
    everything = {path for files in covered for path in files}
    gone = set(changes.gone)
    sources = [name for name in changes.changed if is_source(config, name)]
    there = {name: Path(os.path.realpath(name)) for name in changes.changed if name not in gone}
    touched = set(there.values())
    stored = {row.get("case") for row in golden_changes}
    inside = [name for name in changes.folders if _holds_sources(config, name)]
    every = (
        any(name in gone for name in sources)
        or bool(inside)
        or UNREADABLE in stored
        or _used_by_anybody(config, changes, found, everything)
    )
    affected = frozenset(
        position
        for position, one in enumerate(found)
        if every or touched & covered[position] or _home(one) in touched or one.case.name in stored
    )
    single = [name for name in sources if name in there and name not in changes.folders]
    uncovered = [name for name in single if there[name] not in everything]
    submodules = [name for name in inside if name in there and not _all(config, name, everything)]
    return Coverage(
        affected,
        (*uncovered, *(f"{name} (a submodule)" for name in submodules)),
        _elsewhere(uncovered, everything),
    )


def is_source(config: Config, name: str) -> bool:
    """Whether the gate asks for a case that covers the file."""
    return matches(name, config.kernels) and not matches(name, config.exempt)


def _holds_sources(config: Config, folder: str) -> bool:
    """Whether the gate may ask for files below a folder."""
    asked = matches(folder, config.kernels) or below(folder, config.kernels)
    return asked and not matches(folder, config.exempt) and not all_below(folder, config.exempt)


def _all(config: Config, folder: str, covered: set[Path]) -> bool:
    """Whether there are sources below a folder, and a case covers each."""
    names = {
        name
        for pattern in config.kernels
        for name in files(pattern, Path.cwd())
        if name.startswith(f"{folder}/") and is_source(config, name)
    }
    return bool(names) and {Path(os.path.realpath(name)) for name in names} <= covered


def _used_by_anybody(
    config: Config, changes: Changes, found: Sequence[Found], covered: set[Path]
) -> bool:
    """Whether a file changed that a case may use and that no `sources` give to particular cases.

    That is a module which this process has loaded, and a Python file below the folder of a case's
    file, which a worker may load later; of those not one that is exempt.
    """
    loaded = {
        os.path.realpath(origin)
        for module in list(sys.modules.values())
        if isinstance(origin := getattr(module, "__file__", None), str)
    }
    homes = [home for one in found if (home := _home(one))]
    told = covered | set(homes)
    beside = {f"{home.parent}{os.sep}" for home in homes}
    for name in changes.changed:
        real = os.path.realpath(name)
        if Path(real) in told:
            continue
        if real in loaded:
            return True
        if name in changes.folders and any(
            path.startswith(f"{real}{os.sep}") and Path(path) not in told for path in loaded
        ):
            return True
        python = name.endswith(".py") and not matches(name, config.exempt)
        if python and real.startswith(tuple(beside)):
            return True
    return False


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
