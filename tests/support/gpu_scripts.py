"""The scripts of ci/gpu as modules, as they find one another when they are run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "ci" / "gpu"
READERS = (
    *("sources", "paths", "shapes", "extracts", "goals", "evidence"),
    *("table_grids", "verdict_tables", "speed_tables", "forward_tables", "tables"),
)
NAMES = (
    *(*READERS, "options", "steps", "side_by_side", "pytests", "commands", "parts", "one_gpu"),
    *("training_model", "training_rows", "training", "recording"),
)

Json = dict[str, Any]


@contextmanager
def gpu_scripts() -> Iterator[dict[str, ModuleType]]:
    """By name, each anew; afterwards none of them can be imported any more."""
    path = list(sys.path)
    try:
        sys.path.insert(0, str(FOLDER))
        yield {name: load_script(name) for name in NAMES}
    finally:
        sys.path[:] = path
        for name in NAMES:
            sys.modules.pop(name, None)


def load_script(name: str) -> ModuleType:
    """A script anew, as the module that others import by this name."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check_needed(
    check: Callable[[Any, str], str | None], row: Json, optional: Iterable[str]
) -> None:
    """A document's shape allows this row, and none without a value that is not optional."""
    assert check({"rows": [row]}, "it") is None
    assert check({"rows": []}, "it") == "it.rows is empty"
    for name in row.keys() - set(optional):
        less = {key: value for key, value in row.items() if key != name}
        assert check({"rows": [less]}, "it") == f"it.rows[0].{name} is missing"


def check_contradicted(evidence: ModuleType, part: str, row: Json, wrong: Json) -> None:
    """A part that passed may hold this row, and not with what is `wrong`."""
    for shown, told in ((row, False), ({**row, **wrong}, True)):
        step = {"exit": 0, "status": "passed", "seconds": 1.0, "document": {"rows": [shown]}}
        problem = evidence._contradiction(part, "passed", {part: step})
        assert (problem is not None) == told, problem
