"""The text of a controls report: one line per control, and the counts as the last line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verify.controls.catalogue import named
from verify.rendering.escaping import printable


def text(outcome: Mapping[str, Any]) -> str:
    """Drawn from the JSON alone: `NAME control=caught twin=clean` and what was expected."""
    width = max((len(one["name"]) for one in outcome["controls"]), default=0)
    lines = []
    for one in outcome["controls"]:
        caught = "caught" if one["fault"] == "caught" else "MISSED"
        clean = "clean" if one["twin"] == "clean" else "ALARM"
        name, detail = printable(one["name"]), printable(one["detail"])
        lines.append(f"{name:{width}}  control={caught} twin={clean}  {detail}")
    if outcome["disabled"]:
        lines.append(f"switched off: {', '.join(map(printable, outcome['disabled']))}")
    if outcome["failed"]:
        lines.append(f"failed: {', '.join(map(printable, outcome['failed']))}")
    counts = (
        f"{outcome['faults']} faults, {outcome['caught']} caught,"
        f" {outcome['twins']} twins, {outcome['clean']} clean"
    )
    if outcome["faults"] and outcome["clean"] == outcome["twins"]:
        counts = (
            f"{outcome['faults']} faults, {outcome['caught']} caught,"
            f" {outcome['twins']} twins clean"
        )
    for why, names in _by_reason(outcome.get("not_run", {})).items():
        lines.append(f"not run here ({printable(why)}): {', '.join(map(printable, names))}")
        counts += f"; {len(names)} not run here"
    lines.append(f"controls: {counts}" if outcome["faults"] else "controls: nothing ran")
    return "\n".join(lines)


def listing(names: Iterable[str]) -> str:
    """The names of controls, one a line; behind a name what a machine must have to run it.

    Raises CaseError for a control that does not exist.
    """
    needed = {control.name: control.needs for control in named(names)}
    width = max(map(len, needed), default=0)
    return "\n".join(
        f"{name:{width}}  needs {needed[name].upper()}" if needed[name] else name
        for name in sorted(needed)
    )


def _by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in left_out.items():
        found.setdefault(why, []).append(name)
    return found
