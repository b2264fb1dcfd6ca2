"""ci/gpu/degrees.py and its problem as modules, as they find one another when they are run."""

from __future__ import annotations

import sys
from types import ModuleType

from gpu_scripts import load_script


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
    return sys.modules.get(name) or load_script(name)
