"""Reads `ci/gate.toml`: which cases a gate runs, which files they must cover, and how long it may.

It refuses whatever it does not know. A misspelt key would switch a check off without a word, so an
unknown key, a value of another type and an empty list are errors that name the file, the key and
what is allowed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify import input_files
from verify.cases import CLAIMS
from verify.errors import InputFileError
from verify.gates.patterns import problem_of
from verify.goldens import DEFAULT_FOLDER
from verify.plans import RunOptions

LARGEST = 2**20  # bytes
_HELP = "`verify gate --help` describes the file"


@dataclass(frozen=True)
class Config:
    """A gate. Paths and patterns are relative to the current directory, the root of the repository.

    path: the file it was read from. cases: targets. options: of the runs; whatever its `claims`
    say, a case that declares a golden is compared with it. controls: pattern of the
    planted faults that run first. kernels, exempt: patterns of source files that need a case, and
    of those among them that need none. seconds, executions: the budget; None is no limit.
    require_clean: uncommitted changes keep the gate from passing.
    """

    path: Path
    cases: tuple[str, ...]
    options: RunOptions
    controls: str = "*"
    kernels: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    seconds: float | None = None
    executions: int | None = None
    require_clean: bool = False


def load(path: Path) -> Config:
    """The gate of a file. Raises InputFileError with file, key and what is allowed."""
    text = input_files.read_text(path, "the file of a gate", largest=LARGEST)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputFileError(f"{path}: not TOML: {error}") from None
    return _config(path, data)


def _config(path: Path, data: Mapping[str, Any]) -> Config:
    top = _table(path, "", data, _TOP)
    controls = _table(path, "controls", top.get("controls", {}), {"only": _name})
    sources = _table(
        path, "sources", top.get("sources", {}), {"kernels": _patterns, "exempt": _patterns}
    )
    budget = _table(
        path, "budget", top.get("budget", {}), {"seconds": _seconds, "executions": _count}
    )
    if not top.get("cases"):
        raise InputFileError(
            f'{path}: cases is missing; allowed is a list of targets: cases = ["file.py"]'
        )
    if sources.get("exempt") and not sources.get("kernels"):
        raise InputFileError(f"{path}: sources.exempt without sources.kernels exempts nothing")
    given = {name: top[name] for name in _OF_RUNS if name in top}
    return Config(
        path=path,
        cases=top["cases"],
        options=RunOptions(**given, golden=Path(top.get("golden", DEFAULT_FOLDER))),
        controls=controls.get("only", "*"),
        kernels=sources.get("kernels", ()),
        exempt=sources.get("exempt", ()),
        seconds=budget.get("seconds"),
        executions=budget.get("executions"),
        require_clean=top.get("require_clean", False),
    )


def _table(
    path: Path, where: str, data: Any, known: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """The checked values of one table of the file."""
    if not isinstance(data, dict):
        raise InputFileError(f"{path}: {where} is {_kind(data)}, it must be a table: [{where}]")
    checked = {}
    for name, value in data.items():
        key = f"{where}.{name}" if where else name
        if name not in known:
            raise InputFileError(
                f"{path}: unknown key {key!r}; allowed {f'in [{where}] ' if where else ''}are "
                f"{', '.join(known)}; {_HELP}"
            )
        try:
            checked[name] = known[name](value)
        except _Wrong as wrong:
            raise InputFileError(f"{path}: {key} {wrong}") from None
    return checked


class _Wrong(Exception):
    """What a value is and what it must be."""


def _kind(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "an integer", float: "a number", list: "a list"}
    return names.get(type(value), "a table" if isinstance(value, dict) else "a date or time")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"is {_kind(value)}, it must be text in quotes")
    if not value.strip() or "\0" in value:
        raise _Wrong(f"is {value!r}, it must not be empty or hold a NUL character")
    return value


_name = _text


def _names(value: Any) -> tuple[str, ...]:
    """A list of texts that is not empty."""
    if not isinstance(value, list):
        raise _Wrong(f"is {_kind(value)}, it must be a list of texts")
    if not value:
        raise _Wrong("is empty, it must hold at least one entry")
    return tuple(_text(item) for item in value)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _names(value)
    for pattern in patterns:
        problem = problem_of(pattern)
        if problem:
            raise _Wrong(f"holds {pattern!r}: {problem}")
    return patterns


def _claims(value: Any) -> tuple[str, ...]:
    names = _names(value)
    for name in names:
        if name not in CLAIMS:
            raise _Wrong(f"holds {name!r}; allowed are {', '.join(CLAIMS)}")
    return names


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong(f"is {_kind(value)}, it must be an integer")
    return value


def _count(value: Any) -> int:
    if _whole(value) < 1:
        raise _Wrong(f"is {value}, it must be at least 1")
    return value


def _seed(value: Any) -> int:
    if not 0 <= _whole(value) < 2**63:
        raise _Wrong(f"is {value}, it must be from 0 to 2**63 - 1")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong(f"is {_kind(value)}, it must be a number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise _Wrong(f"is {value}, it must be a positive, finite number of seconds")
    return seconds


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"is {_kind(value)}, it must be true or false")
    return value


def _as_is(value: Any) -> Any:
    """A table, which is looked into afterwards."""
    return value


_OF_RUNS: Mapping[str, Callable[[Any], Any]] = {
    "ranks": _count,
    "runs": _count,
    "processes": _count,
    "claims": _claims,
    "seed": _seed,
    "timeout": _seconds,
}
_TOP: Mapping[str, Callable[[Any], Any]] = {
    "cases": _names,
    "golden": _name,
    **_OF_RUNS,
    "require_clean": _switch,
    "controls": _as_is,
    "sources": _as_is,
    "budget": _as_is,
}
