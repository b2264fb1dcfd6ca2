"""What has been found on one rank so far: counts in full, lists of what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from verify.tracing.causes import Cause
from verify.tracing.definitions import Key
from verify.tracing.findings import Culprit, Form, Place, RankDiff, Unmatched

FormKey = tuple[str, str, str, int, str, str, str]
SideKey = tuple[str, str, str, str, int]


@dataclass
class Outcome:
    """What was found on one rank; lists are cut at SHOWN, counts are not."""

    rank: int | None
    steps: int = 0
    compared: int = 0
    differing: int = 0
    first: Place | None = None
    cause: Cause | None = None
    culprits: list[Culprit] = field(default_factory=list)
    culprits_count: int = 0
    inherits: list[Place] = field(default_factory=list)
    inherits_count: int = 0
    moved: int = 0
    forms: dict[FormKey, list[int]] = field(default_factory=dict)
    unmatched: dict[SideKey, list[int]] = field(default_factory=dict)
    elsewhere: dict[Key, int] = field(default_factory=dict)
    still: dict[Key, int] = field(default_factory=dict)  # generators
    cut: dict[Key, int] = field(default_factory=dict)  # behind where the other run's step ended
    crossing: dict[Key, int] = field(default_factory=dict)  # of two steps, not both in full
    moments: dict[Key, int] = field(default_factory=dict)  # state of another moment

    def told(self) -> RankDiff:
        only = dict.fromkeys("ab", 0)
        for key, (_, count) in self.unmatched.items():
            only[key[0]] += count
        return RankDiff(
            self.rank,
            self.steps,
            self.compared,
            self.differing,
            self.first,
            self.cause,
            only["a"],
            only["b"],
            self.moved,
        )

    def told_forms(self) -> Iterator[Form]:
        for key, (first, count) in self.forms.items():
            yield Form(self.rank, *key, first, count)

    def told_unmatched(self) -> Iterator[Unmatched]:
        for key, (first, count) in self.unmatched.items():
            yield Unmatched(self.rank, *key, first, count)
