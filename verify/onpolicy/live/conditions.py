"""What is asked of a model, and what was found of each way of computing the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verify.errors import UnsupportedError
from verify.onpolicy.live.layouts import LAYOUTS
from verify.onpolicy.live.locating import Parted
from verify.onpolicy.live.rowwise import RowWise
from verify.onpolicy.live.widening import Wide
from verify.onpolicy.numbers import told
from verify.reasons import Verdict


@dataclass(frozen=True)
class Request:
    """What is asked for. tokens: of each response, at most. chunk: of a chunked prefill. layouts:
    names of LAYOUTS."""

    tokens: int = 16
    samples: int = 4
    seed: int = 0
    chunk: int = 4
    layouts: tuple[str, ...] = tuple(LAYOUTS)

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("samples", 1), ("chunk", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UnsupportedError(
                    f"--{name} {getattr(self, name)}: allowed are integers from {least}"
                )
        unknown = [name for name in self.layouts if name not in LAYOUTS]
        if unknown:
            raise UnsupportedError(
                f"--layout {unknown[0]!r} is unknown; allowed are {', '.join(LAYOUTS)}"
            )


@dataclass(frozen=True, eq=False)
class Condition:
    """One way of computing the same tokens, against a sequence alone in one pass.

    compared, differing: tokens. largest: of |d|. parted: the first module that differs. rows: which
    kinds of modules gave other rows for equal ones. wide: None where it was not asked. problem: why
    it was not run, or "".
    """

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    compared: int = 0
    differing: int = 0
    largest: float | None = None
    parted: Parted | None = None
    rows: tuple[RowWise, ...] = ()
    wide: Wide | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document."""
        return {
            "name": self.name,
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "compared_tokens": self.compared,
            "differing_tokens": self.differing,
            "abs_max": self.largest,
            "first": None if self.parted is None else self.parted.to_json(),
            "row_wise": [one.to_json() for one in self.rows],
            "float64": None if self.wide is None else self.wide.to_json(),
            "problem": self.problem,
        }


@dataclass(frozen=True, eq=False)
class ModelReport:
    """What was looked at, and every condition. notes: what else should be known."""

    facts: Mapping[str, Any]
    request: Request
    conditions: tuple[Condition, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The field `model` of the document."""
        return _plain(
            {
                **self.facts,
                "samples": self.request.samples,
                "tokens": self.request.tokens,
                "seed": self.request.seed,
                "conditions": [one.to_json() for one in self.conditions],
                "notes": list(self.notes),
            }
        )

    def text(self) -> str:
        """For a terminal."""
        from verify.onpolicy.live import live_text

        return live_text.text(self)


def _plain(value: Any) -> Any:
    """NaN and infinities as strings, in any nesting."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return told(value)
