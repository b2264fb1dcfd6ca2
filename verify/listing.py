"""Lists for the terminal: cases and their promises, and nested records.

What `verify list` and `verify env` print. It refuses to execute a case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from verify.rendering.escaping import printable


def entries(targets: Sequence[str]) -> list[dict[str, Any]]:
    """What can be run, as JSON-ready records; the built-in cases when no target is given."""
    from verify import targets as lookup

    if targets:
        found = [one for target in targets for one in lookup.find(target)]
    else:
        found = lookup.builtin()
    return [
        {
            "case": one.case.name,
            "target": one.target,
            "claims": list(one.case.claims),
            "ranks": one.case.ranks,
            "description": one.case.description,
        }
        for one in found
    ]


def text(cases: Sequence[Mapping[str, Any]]) -> str:
    """A table of cases; says so when there are none."""
    if not cases:
        return "no cases found; `verify init` writes a file to start from"
    rows = [
        (
            printable(one["target"]),
            ", ".join(one["claims"]),
            printable(one["description"]),
        )
        for one in cases
    ]
    return _table(rows, ("target", "claims", "description"))


def record(values: Mapping[str, Any]) -> str:
    """A nested record as `name: value` lines with dotted names."""
    flat = flatten(values)
    width = max((len(name) for name in flat), default=0)
    return "\n".join(f"{printable(name):{width}}  {printable(flat[name])}" for name in flat)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists and empty mappings stay as they are."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    return "\n".join(line.rstrip() for line in table.splitlines())
