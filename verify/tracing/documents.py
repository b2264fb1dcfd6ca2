"""The comparison of recordings as a JSON document, version 1. Additive from here on.

It holds every field of `findings` as it is, with the culprits' sentences. Lists that could be long
are cut; a count beside each says how long it was.
"""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import asdict
from typing import Any

from verify.digests import SCHEME
from verify.reasons import EXIT_CODES
from verify.results import tool_version
from verify.tracing.findings import Culprit, TraceDiff
from verify.tracing.sentences import sentence

SCHEMA_VERSION = 1


def to_json(found: TraceDiff) -> dict[str, Any]:
    """The document of a comparison."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "mok-verify", "version": tool_version(), "digest_scheme": SCHEME},
        "exit_code": exit_code(found),
        **_plain(asdict(found)),
        "verdict": found.verdict.value,
        "culprit": _culprit(found.culprit, found),
        "others": [_culprit(one, found) for one in found.others],
    }


def exit_code(found: TraceDiff) -> int:
    """0 equal, 1 different, 3 nothing wrong found but something missing."""
    return EXIT_CODES[found.verdict]


def schema() -> dict[str, Any]:
    """The JSON Schema of the document, as shipped with the package."""
    file = importlib.resources.files("verify").joinpath("schema", "trace-diff-v1.schema.json")
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def _culprit(one: Culprit | None, found: TraceDiff) -> dict[str, Any] | None:
    if one is None:
        return None
    return {**_plain(asdict(one)), "sentence": sentence(one, found)}


def _plain(value: Any) -> Any:
    """Tuples as lists, names of closed lists as strings."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
