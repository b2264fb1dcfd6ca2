"""Did a load run beside an execution? Arithmetic on what both wrote, on the clock of the device.

A block of a load counts only if it ran before the execution began and was seen to run after the
execution had ended. A load that merely touched the execution does not: a case that cannot start
before the load is gone would touch it, too, and run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RELEASED, TIMED_OUT = 1, 2
HEAD, WORDS = 8, 8  # 64-bit words before the first block's, and of each block; as in load.cuh


@dataclass(frozen=True)
class Trace:
    """What one block of a load wrote: first and last nanosecond at which it ran, the steps that it
    did, its multiprocessor (-1 unknown), and how it ended (0 running, RELEASED, TIMED_OUT)."""

    first: int
    last: int
    steps: int
    multiprocessor: int
    ended: int = 0


@dataclass(frozen=True)
class Overlap:
    """A load beside one execution of `nanoseconds`.

    blocks: of the load that were asked for. started: of these, before it was measured. covering:
    that ran from before the execution until after it. multiprocessors: that those were on.
    timed_out: that gave up waiting. steps: of all blocks until the measurement.
    """

    blocks: int
    started: int
    covering: int
    multiprocessors: int
    timed_out: int
    steps: int
    nanoseconds: int

    @property
    def complete(self) -> bool:
        """Whether every block that was asked for ran beside the whole execution."""
        return self.covering == self.blocks > 0

    def to_json(self) -> dict[str, Any]:
        """Numbers for the evidence."""
        return {
            "load_blocks": self.covering,
            "multiprocessors": self.multiprocessors,
            "load_steps": self.steps,
            "microseconds": round(self.nanoseconds / 1000),
            **({"started": self.started} if self.started != self.blocks else {}),
            **({"timed_out": self.timed_out} if self.timed_out else {}),
        }


def traces_of(words: Sequence[int], blocks: int) -> list[Trace]:
    """The traces in a record of 64-bit words, see csrc/conditions/load.cuh; of started blocks."""
    found = []
    for block in range(blocks):
        first, last, steps, place, ended = words[HEAD + WORDS * block :][:5]
        if first:
            found.append(Trace(first, last, steps, place - 1, ended))
    return found


def settled(traces: Sequence[Trace], blocks: int, end: int) -> bool:
    """Whether waiting longer cannot change what is known about the time until `end`."""
    return len(traces) == blocks and all(t.last >= end or t.ended for t in traces)


def overlap_of(traces: Sequence[Trace], blocks: int, start: int, end: int) -> Overlap:
    """What is known of a load of `blocks` beside an execution from `start` to `end`, nanoseconds.

    An execution without a start or an end (0), or that ends before it starts, is covered by none.
    """
    valid = 0 < start <= end
    covering = [t for t in traces if valid and t.first <= start and t.last >= end]
    return Overlap(
        blocks=blocks,
        started=len(traces),
        covering=len(covering),
        multiprocessors=len({t.multiprocessor for t in covering}),
        timed_out=sum(t.ended == TIMED_OUT for t in traces),
        steps=sum(t.steps for t in traces),
        nanoseconds=max(0, end - start) if valid else 0,
    )
