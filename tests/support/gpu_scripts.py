"""The scripts of ci/gpu as modules, as they find one another when they are run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "ci" / "gpu"
READERS = (
    *("sources", "paths", "shapes", "extracts", "goals", "evidence"),
    *("table_grids", "verdict_tables", "speed_tables", "forward_tables", "tables"),
)
NAMES = (
    *(*READERS, "options", "steps", "commands", "parts", "one_gpu"),
    *("training_model", "training"),
)


@contextmanager
def gpu_scripts() -> Iterator[dict[str, ModuleType]]:
    """By name, each anew; afterwards none of them can be imported any more."""
    path = list(sys.path)
    try:
        sys.path.insert(0, str(FOLDER))
        yield {name: _load(name) for name in NAMES}
    finally:
        sys.path[:] = path
        for name in NAMES:
            sys.modules.pop(name, None)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
