"""What an execution leaves behind: digests and measurements, never tensors.

These records cross process and rank borders as JSON lines; `decision` turns them into verdicts.
No torch here, so that a verdict can be formed, tested and drawn where torch is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

BASE = "base"
FIRST = "first"
PROBE = "probe"
RETRY = "retry"
COLD_CACHE = "cold-l2"  # the variant of `contention` that is no load
UNSUPPORTED = "tensor that cannot be compared"  # how `not_compared` names such an output


@dataclass(frozen=True)
class Facts:
    """What one output looked like: enough to tell a vacuous result from a real one."""

    numel: int
    constant: bool
    nonfinite: int


@dataclass(frozen=True)
class Failure:
    """An exception of the user's code, as text."""

    type: str
    message: str
    traceback: str
    after_peer: bool = False  # a consequence of another rank's failure, not a cause


@dataclass(frozen=True)
class Execution:
    """One execution of a case on one rank, under one condition.

    `claim` is the claim that it was made for, or "base". `variant` names the condition's setting.
    `outputs` maps tensor names to digest texts. `expected` holds the digests to compare with where
    they are not simply those of this rank's base execution (other batch, other expert-parallel
    degree); `compare` says how: "own" (this rank's base), "sum" (shards of all ranks add up to the
    expectation), "exact" (this rank's expectation), "measured" (`measurements` against a reference)
    or "none" (a probe).
    """

    case: str
    claim: str
    variant: str
    rank: int
    run: int
    process: int = 0
    compare: str = "own"
    arm: str = "restored"
    requested: Mapping[str, Any] = field(default_factory=dict)
    effective: Mapping[str, Any] = field(default_factory=dict)
    in_effect: bool = True
    group: Sequence[int] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    same_inputs: bool = True
    mutated: Sequence[str] = ()
    overwritten: Sequence[str] = ()
    unchanged: Sequence[str] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, str] | None = None
    not_compared: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Facts] = field(default_factory=dict)
    generator: Mapping[str, str] = field(default_factory=dict)
    consumed: Sequence[str] = ()
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measurements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    overhead: float = 0.0


@dataclass(frozen=True)
class Trouble:
    """Something that kept evidence from being made: a reason of the closed list and what is known.

    `claim` None means that it concerns every claim of the case.
    """

    case: str
    reason: str
    detail: str
    claim: str | None = None
    rank: int | None = None
    process: int = 0


@dataclass(frozen=True)
class Plan:
    """What was promised and asked for, so that missing evidence can be told from none needed."""

    case: str
    target: str
    claims: Sequence[str]
    ranks: int
    runs: Mapping[str, int]  # least number of executions per rank, by claim
    seed: int = 0
    placement: Mapping[str, str] = field(default_factory=dict)  # pattern -> "replicated" | ...
    batch: Mapping[str, int] = field(default_factory=dict)  # pattern -> dimension
    constants: Sequence[str] = ()
    random: bool = False
    description: str = ""
    sources: Sequence[str] = ()
    source_digest: str = ""
    device: str = ""  # "" where the case puts its tensors


@dataclass(frozen=True)
class Finished:
    """Says that one rank has done everything for a case: a later death does not touch it.

    footprint: by `cpu` and `cuda:N`, bytes `needed` by its process and the `room` there
    (`footprints`); of a main process whose case uses a GPU and promises `process`, else empty.
    """

    case: str
    rank: int
    process: int = 0
    footprint: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


Record = Execution | Trouble | Plan | Finished
_KINDS: dict[str, type] = {
    "execution": Execution,
    "trouble": Trouble,
    "plan": Plan,
    "finished": Finished,
}


def to_line(record: Record) -> str:
    """One record as one JSON line, without the newline. Only finite numbers and strings."""
    kind = type(record).__name__.lower()
    return json.dumps({"kind": kind, **asdict(record)}, sort_keys=True, allow_nan=False)


def from_line(line: str) -> Record:
    """The record of one JSON line. Raises ValueError for a line that is not one."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("kind") not in list(_KINDS):
        raise ValueError(f"not an evidence record: {line[:80]!r}")
    kind = data.pop("kind")
    try:
        if kind == "execution":
            data["facts"] = {name: Facts(**facts) for name, facts in data["facts"].items()}
            data["failure"] = Failure(**data["failure"]) if data["failure"] else None
        return _KINDS[kind](**data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an evidence record: {error}: {line[:80]!r}") from error
