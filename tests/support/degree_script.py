"""ci/gpu/degrees.py and its problem as modules, as they find one another when they are run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "ci" / "gpu"


def load_problem() -> ModuleType:
    """The problem whose bits must be the same at every degree."""
    return _load("degree_problem")


def load_degrees() -> ModuleType:
    """The script that runs it."""
    load_problem()
    _load("one_gpu")
    return _load("degrees")


def load_backward_degrees() -> ModuleType:
    """The script that runs its gradients."""
    load_degrees()
    return _load("backward_degrees")


def _load(name: str) -> ModuleType:
    found = sys.modules.get(name)
    if found is not None:
        return found
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
