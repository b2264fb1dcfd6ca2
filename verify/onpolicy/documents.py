"""What the doctor found as a JSON document, version 1. Additive from here on.

Lists that could be long are cut; a count beside each says how long it was. NaN and infinities are
the strings "nan", "inf" and "-inf", since JSON has none.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from verify.onpolicy.analysing import Analysis
from verify.onpolicy.causes.table import CAUSES
from verify.onpolicy.misalignments import Misalignment
from verify.onpolicy.numbers import told
from verify.onpolicy.samples import Problem
from verify.results import tool_version

SCHEMA_VERSION = 1
SHOWN = 100  # entries of a list


def to_json(found: Analysis) -> dict[str, Any]:
    """The document."""
    pairs, judged = found.pairs, found.verdict
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "mok-verify", "version": tool_version()},
        "verdict": str(judged.verdict),
        "exit_code": judged.exit_code,
        "trainer": _side(found.trainer),
        "rollout": None if found.rollout is None else _side(found.rollout),
        "numbers": found.numbers.to_json(),
        "metrics": _plain(dict(found.metrics)),
        "causes": [
            _plain(one.to_json()) | {"meaning": CAUSES[one.name].meaning} for one in found.causes
        ],
        "routing": None if found.routing is None else _plain(found.routing.to_json()),
        "findings": [one.to_json() for one in judged.findings[:SHOWN]],
        "findings_count": len(judged.findings),
        "gates": [one.to_json() for one in judged.outcomes],
        "misalignments": [_misalignment(one) for one in pairs.misalignments[:SHOWN]],
        "misalignments_count": len(pairs.misalignments),
        "problems": [_problem(one) for one in pairs.problems[:SHOWN]],
        "problems_count": len(pairs.problems),
        "notes": list(pairs.notes[:SHOWN]),
        "notes_count": len(pairs.notes),
    }


def schema() -> dict[str, Any]:
    """The JSON Schema of the document, as shipped with the package."""
    file = importlib.resources.files("verify").joinpath("schema", "onpolicy-v1.schema.json")
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def _side(one: tuple[str, str]) -> dict[str, str]:
    return {"path": one[0], "format": one[1]}


def _misalignment(one: Misalignment) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "key": one.key,
        "places": [str(place) for place in one.places],
        "what": one.what,
    }


def _problem(one: Problem) -> dict[str, Any]:
    return {"place": str(one.place), "field": one.field, "what": one.what, "kind": one.kind}


def _plain(value: Any) -> Any:
    """NaN and infinities as strings, in any nesting."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return told(value)
