"""Where a result document breaks the shipped schema, in words: required fields and types only.

Readers get documents from CI artifacts, other versions and editors; a missing field should be named
before a renderer trips over it. It refuses to be a JSON Schema validator (that is `jsonschema`, in
the tests): it follows `$ref`, `type`, `required`, `properties`, `items`, limits and what maps hold,
and leaves closed lists of values alone, so that a later reason does not make a document
unreadable. Only verdicts are a closed list for ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verify.reasons import Verdict

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


def contents_problem(data: Mapping[str, Any]) -> str | None:
    """What else would mislead or trip a reader of a document that keeps to the schema, or None.

    Verdicts that are none, and numbers that are added up or divided where the schema, which leaves
    room for more of them, does not say that they are numbers.
    """
    try:
        Verdict(data["verdict"])
        for case in data["cases"]:
            Verdict(case["verdict"])
            for claim in case["claims"]:
                for shown in (claim, *claim["findings"]):
                    Verdict(shown["verdict"])
    except ValueError as error:
        return str(error)
    for case in data["cases"]:
        median = case["timings"].get("median")
        if median is not None and not {"case_seconds", "overhead_seconds"} <= median.keys():
            return f"case {case['case']!r}: its median timings lack a number"
        for claim in case["claims"]:
            for tensor, measured in claim["measurements"].items():
                problem = _measured_problem(measured)
                if problem:
                    return f"case {case['case']!r}: measurement of {tensor!r}: {problem}"
    return None


_COUNTS = {"numel", "rounded_elsewhere", "forbidden", "over_budget", "nonfinite", "permissive"}
_RATIOS = {"worst_ratio", "relative_l2", "plain_relative_l2"}
_NOT_FINITE = ("nan", "inf", "-inf")  # as the document writes them


def _measured_problem(measured: Mapping[str, Any]) -> str | None:
    for name, value in measured.items():
        if name in _COUNTS and not _is(value, "integer"):
            return f"{name} is {value!r}, it should be a count"
        known = isinstance(value, str) and value in _NOT_FINITE
        if name in _RATIOS and not known and not _is(value, "number"):
            return f"{name} is {value!r}, it should be a number"
    if "plain_relative_l2" in measured and "relative_l2" not in measured:
        return "plain_relative_l2 stands without relative_l2"
    return None


def _problem(data: Any, node: Mapping[str, Any], root: Mapping[str, Any], where: str) -> str | None:
    if "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    names = node.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(_is(data, name) for name in names):
        return f"{where} is a {type(data).__name__}, it should be {' or '.join(names)}"
    if isinstance(data, int | float):
        if data < node.get("minimum", data):
            return f"{where} is {data!r}, it should be at least {node['minimum']}"
        if data > node.get("maximum", data):
            return f"{where} is {data!r}, it should be at most {node['maximum']}"
    if isinstance(data, dict):
        pattern = node.get("propertyNames", {}).get("pattern", "")
        for name in data:
            if not re.search(pattern, name):
                return f"{where} has a field {name!r}, its names should match {pattern}"
        for name in node.get("required", ()):
            if name not in data:
                return f"{where} has no field {name!r}"
        known = node.get("properties", {})
        others = node.get("additionalProperties", {})
        for name, item in data.items():
            if others is False and name not in known:
                return f"{where} has an unknown field {name!r}"
            problem = _problem(item, known.get(name, others), root, f"{where}[{name!r}]")
            if problem:
                return problem
    if isinstance(data, list):
        least, most = node.get("minItems", 0), node.get("maxItems", len(data))
        if not least <= len(data) <= most:
            return f"{where} has {len(data)} items, it should have {least} to {most}"
        for index, item in enumerate(data):
            problem = _problem(item, node.get("items", {}), root, f"{where}[{index}]")
            if problem:
                return problem
    return None


def _is(data: Any, name: str) -> bool:
    if isinstance(data, bool) and name in ("integer", "number"):
        return False
    return isinstance(data, _TYPES[name])
