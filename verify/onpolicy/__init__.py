"""The on-policy doctor: why sampler and trainer give the same tokens other probabilities.

Names are loaded when first used: inside a training loop `measure_logprobs` needs numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify.onpolicy.causes.ranking import diagnose
    from verify.onpolicy.causes.table import Evidence
    from verify.onpolicy.formats.table import read_dump
    from verify.onpolicy.gates import Gate, parse_gate
    from verify.onpolicy.measuring import measure_logprobs
    from verify.onpolicy.metrics import field_metrics
    from verify.onpolicy.numbers import Numbers, measure
    from verify.onpolicy.pairing import Pairs, pair
    from verify.onpolicy.samples import Dump, Routing, Sample, Series
    from verify.onpolicy.verdicts import OnPolicyVerdict, judge

_HOMES = {
    "diagnose": "causes.ranking",
    "Evidence": "causes.table",
    "read_dump": "formats.table",
    "Gate": "gates",
    "parse_gate": "gates",
    "measure_logprobs": "measuring",
    "field_metrics": "metrics",
    "Numbers": "numbers",
    "measure": "numbers",
    "Pairs": "pairing",
    "pair": "pairing",
    "Dump": "samples",
    "Routing": "samples",
    "Sample": "samples",
    "Series": "samples",
    "OnPolicyVerdict": "verdicts",
    "judge": "verdicts",
}

__all__ = [
    "Dump",
    "Evidence",
    "Gate",
    "Numbers",
    "OnPolicyVerdict",
    "Pairs",
    "Routing",
    "Sample",
    "Series",
    "diagnose",
    "field_metrics",
    "judge",
    "measure",
    "measure_logprobs",
    "pair",
    "parse_gate",
    "read_dump",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verify.onpolicy' has no attribute {name!r}")
    return getattr(import_module(f"verify.onpolicy.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
