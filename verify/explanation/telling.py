"""A difference of two live tensors as the record that a finding carries. It never raises.

Coordinates, bit patterns, counts, tile map and histogram come from `comparison`, causes from
`suggest`. What cannot be explained, or not be written down, is no less wrong: no verdict may hang
on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from verify.comparison import compare, ulp_histogram
from verify.explanation.suggesting import suggest


def explained(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` says, or one line on why nothing is said; it never raises an Exception.

    What cannot be explained, or not be written down, is no less wrong: no verdict may hang on it.
    """
    try:
        made = make()
        json.dumps(made, allow_nan=False)  # as `evidence` will
        return made
    except Exception as error:
        return {"lines": [f"not explained: {type(error).__name__}: {error}"], "suggests": []}


def explain(expected: Tensor, actual: Tensor, name: str, condition: str) -> dict[str, Any]:
    """The difference of two tensors: coordinates, bit patterns, counts, and what it suggests.

    For floats of the same dtype and shape, `ulps` counts the differing elements by ULP distance.
    Never raises an Exception: see `explained`.
    """
    return explained(lambda: _explain(expected, actual, name, condition))


def _explain(expected: Tensor, actual: Tensor, name: str, condition: str) -> dict[str, Any]:
    comparison = compare(expected, actual, name)
    ulps = {} if comparison.problem else _ulps(expected, actual)
    found = explained(
        lambda: {"suggests": list(suggest(comparison, expected, actual, _context(condition)))}
    )
    return {
        **comparison.to_json(),
        **({"ulps": ulps} if ulps else {}),
        "lines": [*comparison.describe(), *found.get("lines", ())],
        "suggests": found["suggests"],
    }


def _ulps(expected: Tensor, actual: Tensor) -> dict[str, int]:
    """Only elements that differ: all others are at 0."""
    try:
        return ulp_histogram(expected, actual, differing_only=True)
    except (ValueError, NotImplementedError):  # no floats; packed dtypes cannot be indexed
        return {}


def _context(condition: str) -> dict[str, Any]:
    """What the explanation may use: the condition, and the bytes that memory was filled with."""
    fills = (0xFE, 0x80, 0xFF) if condition == "memory" else ()
    names = {"names": ("golden", "run")} if condition == "golden" else {}
    return {"condition": condition, "fill_bytes": fills, **names}
