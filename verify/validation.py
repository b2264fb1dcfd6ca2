"""Where a result document breaks the shipped schema, in words: required fields and types only.

Readers get documents from CI artifacts, other versions and editors; a missing field should be named
before a renderer trips over it. It refuses to be a JSON Schema validator (that is `jsonschema`, in
the tests): it follows `$ref`, `type`, `required`, `properties`, `items` and map values, and leaves
the closed lists alone, so that a later reason does not make a document unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def first_problem(data: Any, schema: Mapping[str, Any]) -> str | None:
    """The first place where `data` lacks a field or holds another type, or None."""
    return _problem(data, schema, schema, "the document")


def _problem(data: Any, node: Mapping[str, Any], root: Mapping[str, Any], where: str) -> str | None:
    if "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    names = node.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(_is(data, name) for name in names):
        return f"{where} is a {type(data).__name__}, it should be {' or '.join(names)}"
    if isinstance(data, dict):
        for name in node.get("required", ()):
            if name not in data:
                return f"{where} has no field {name!r}"
        known = node.get("properties", {})
        others = node.get("additionalProperties", {})
        for name, item in data.items():
            problem = _problem(item, known.get(name, others), root, f"{where}[{name!r}]")
            if problem:
                return problem
    if isinstance(data, list):
        for index, item in enumerate(data):
            problem = _problem(item, node.get("items", {}), root, f"{where}[{index}]")
            if problem:
                return problem
    return None


def _is(data: Any, name: str) -> bool:
    if isinstance(data, bool) and name in ("integer", "number"):
        return False
    return isinstance(data, _TYPES[name])
