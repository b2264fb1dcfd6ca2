"""Is it bit-deterministic, did a change break it, and where do two runs part?

Everything public is here; names are loaded when first used, so that importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify.api import assert_bitwise, assert_repeatable, check
    from verify.budgets import Reference, reduction
    from verify.cases import Case, case
    from verify.checkpoints.live import save_weights_digests, weights_digests
    from verify.errors import CaseError, InputFileError, UnsupportedError, VerifyError
    from verify.hashing import digest
    from verify.inputs import generate, integers, normal, permutation, uniform
    from verify.placements import local, replicated, sharded
    from verify.tracing.recording import probe, record

_HOMES = {
    "assert_bitwise": "api",
    "assert_repeatable": "api",
    "check": "api",
    "Reference": "budgets",
    "reduction": "budgets",
    "Case": "cases",
    "case": "cases",
    "CaseError": "errors",
    "InputFileError": "errors",
    "UnsupportedError": "errors",
    "VerifyError": "errors",
    "digest": "hashing",
    "generate": "inputs",
    "integers": "inputs",
    "normal": "inputs",
    "permutation": "inputs",
    "uniform": "inputs",
    "save_weights_digests": "checkpoints.live",
    "weights_digests": "checkpoints.live",
    "local": "placements",
    "probe": "tracing.recording",
    "record": "tracing.recording",
    "replicated": "placements",
    "sharded": "placements",
}

__all__ = [
    "Case",
    "CaseError",
    "InputFileError",
    "Reference",
    "UnsupportedError",
    "VerifyError",
    "assert_bitwise",
    "assert_repeatable",
    "case",
    "check",
    "digest",
    "generate",
    "integers",
    "local",
    "normal",
    "permutation",
    "probe",
    "record",
    "reduction",
    "replicated",
    "save_weights_digests",
    "sharded",
    "uniform",
    "weights_digests",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verify' has no attribute {name!r}")
    return getattr(import_module(f"verify.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
