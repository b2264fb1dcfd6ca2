"""Bounds that a user sets: --fail-on "differing_tokens>0", over figures and the field's metrics.

An expression is a name, a comparison and a number; it fires when it is true. A value that was not
measured, or is NaN, is neither under nor over a bound: such a gate is not judged, and what is not
judged is no pass.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from verify.errors import VerifyError
from verify.onpolicy.figures import FIGURES, Value
from verify.onpolicy.metrics import METRICS, field_metrics
from verify.onpolicy.numbers import Numbers, told
from verify.onpolicy.pairing import Pairs
from verify.rendering.escaping import clipped

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        ">": operator.gt,
        ">=": operator.ge,
        "<": operator.lt,
        "<=": operator.le,
        "==": operator.eq,
        "!=": operator.ne,
    }
)
_UPWARDS = (">", ">=", "!=")
_FORM = re.compile(r"\s*([A-Za-z][\w/]*)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LONGEST = 200


@dataclass(frozen=True)
class Gate:
    """One bound. name: of FIGURES or METRICS. comparison: of COMPARISONS. text: as it was given."""

    name: str
    comparison: str
    bound: float
    text: str

    @property
    def limits(self) -> bool:
        """Whether no wide mismatch passes it: of the right figure, from the side of more."""
        good = (FIGURES.get(self.name) or METRICS[self.name]).good
        return good == "low" and self.comparison in _UPWARDS


@dataclass(frozen=True)
class Outcome:
    """A gate that was looked at. fired: None where its value is NaN or was not measured."""

    gate: Gate
    value: Value
    fired: bool | None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of the report."""
        return {"gate": self.gate.text, "value": told(self.value), "fired": self.fired}


def parse_gate(text: str) -> Gate:
    """The gate that an expression such as "abs_p99 > 0.01" stands for.

    Raises VerifyError that says what is allowed, and which names are close to an unknown one.
    """
    given = clipped(text, 80)
    found = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if not found:
        raise VerifyError(
            f"--fail-on {given!r} is not understood: give NAME, one of {' '.join(COMPARISONS)}, and"
            " a number, such as differing_tokens>0"
        )
    name, comparison, number = found.groups()
    if name not in FIGURES and name not in METRICS:
        close = difflib.get_close_matches(name, [*FIGURES, *METRICS], n=4, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"such as {', '.join(_USUAL)}"
        raise VerifyError(f"--fail-on {given!r}: there is no figure {clipped(name, 60)}; {hint}")
    if not _NUMBER.fullmatch(number) or not math.isfinite(float(number)):
        raise VerifyError(
            f"--fail-on {given!r}: {clipped(number, 40)} is not a finite number, such as 0 or 1e-3"
        )
    return Gate(name, comparison, float(number), text.strip())


_USUAL = ("differing_tokens", "abs_max", "abs_p99", "k3", "share_beyond_ln2")


def look(gates: Sequence[Gate], pairs: Pairs, numbers: Numbers) -> tuple[Outcome, ...]:
    """What each gate says of what was measured. The field's metrics are computed when asked for."""
    metrics = field_metrics(pairs) if any(gate.name not in FIGURES for gate in gates) else {}
    return tuple(
        _outcome(gate, numbers.figures[gate.name] if gate.name in FIGURES else metrics[gate.name])
        for gate in gates
    )


def _outcome(gate: Gate, value: Value) -> Outcome:
    if value is None or math.isnan(value):
        return Outcome(gate, value, None)
    return Outcome(gate, value, COMPARISONS[gate.comparison](value, gate.bound))
