"""The files of `mok` that the built-in cases execute, so that a change in one of them affects them.

They are found where `mok` is imported from, which need not be the current folder. A test compares
the names with the modules that a case really loads.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_LAYER = (
    "__init__",
    "activations",
    "autocast",
    "checks",
    "config",
    "dispatch",
    "engine",
    "errors",
    "layer",
    "operators",
    "portable",
    "tiles",
    "workspaces",
)
_REFERENCE = ("deviations", "reference")
_EXACT = ("exact",)


def _files(names: tuple[str, ...]) -> tuple[str, ...]:
    spec = find_spec("mok")
    places = (spec.submodule_search_locations if spec else None) or []
    return tuple(str(Path(place) / f"{name}.py") for place in places for name in names)


LAYER = _files(_LAYER)
WITH_REFERENCE = _files((*_LAYER, *_REFERENCE))
WITH_EXACT_CASES = _files((*_LAYER, *_REFERENCE, *_EXACT))
