"""What is in a recording: each rank's steps and events; of chosen steps, every event.

It refuses to call a recording whole that has no end, or an exception for one, or lacks a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tabulate import tabulate

from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number
from verify.tracing.choices import in_words
from verify.tracing.definitions import KINDS, Event, Recording
from verify.tracing.findings import label
from verify.tracing.rank_diffs import Range, within
from verify.tracing.sentences import step as named

_LANE = 16  # digits of a digest that are shown: one lane
_LONGEST = 100
Run = Mapping[int, Recording]


def overview(run: Run) -> dict[str, Any]:
    """Counts of a run by rank, ready for JSON."""
    return {
        "schema_version": 1,
        "world": max(one.header.world for one in run.values()),
        "ranks": [_rank(rank, one) for rank, one in sorted(run.items())],
    }


def events(run: Run, steps: Range) -> Iterator[dict[str, Any]]:
    """Every event of these steps, ready for JSON."""
    for rank, recording in sorted(run.items()):
        for step in recording.steps:
            if within(step.number, steps):
                yield from (_event(rank, event) for event in step.events)


def whole(run: Run) -> bool:
    """Whether every rank is there and came to its end."""
    return len(run) >= max(one.header.world for one in run.values()) and ended(run)


def ended(run: Run) -> bool:
    """Whether all ranks that are there came to their end: not killed, and without an exception."""
    return all(one.finished for one in run.values())


def exit_code(run: Run, one_file: bool) -> int:
    """0 for a whole run, or a whole file where one was asked for; else 3."""
    return 0 if (ended(run) if one_file else whole(run)) else 3


def text(run: Run) -> str:
    """The overview for people; the last line says whether the recording is whole."""
    shown = overview(run)
    headers = ("rank", "level", "steps", "in full", "events", "programs", "created", "end")
    rows = [
        (
            str(one["rank"]),
            one["level"],
            _steps(one),
            one["in_full"],
            f"{one['events']:,}",
            str(one["programs"]),
            printable(one["created"]),
            clipped(one["reason"] if one["complete"] else one["problem"], _LONGEST),
        )
        for one in shown["ranks"]
    ]
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    kinds = Counter[str]()
    for one in shown["ranks"]:
        kinds.update(one["kinds"])
    counted = ", ".join(f"{kinds[kind]:,} {kind}" for kind in KINDS if kinds[kind])
    state = "whole" if whole(run) else "incomplete"
    have = f"{len(run)} of {number(shown['world'], 'rank')}"
    cut = sum(not one["finished"] for one in shown["ranks"])
    have += f", {cut} of which did not come to the end" * bool(cut)
    return "\n".join(
        [*(line.rstrip() for line in table.splitlines()), f"events: {counted}", f"{state}: {have}"]
    )


def event_text(run: Run, steps: Range) -> Iterator[str]:
    """A line for each event of these steps."""
    for one in events(run, steps):
        name = label(one["name"], one["kind"], one["path"], one["occurrence"])
        head, _, digits = one["digest"].rpartition(":")
        yield (
            f"rank {one['rank']}, {named(one['step'])}, {one['index']}: "
            f"{clipped(name, _LONGEST)} {printable(head)}:{digits[:_LANE]}"
        )


def _rank(rank: int, one: Recording) -> dict[str, Any]:
    kinds = Counter[str]()
    for step in one.steps:
        kinds.update(definition.kind for definition in step.program.definitions)
    return {
        "rank": rank,
        "level": one.header.level,
        "in_full": in_words(one.header.steps),
        "created": one.header.created,
        "complete": one.complete,
        "finished": one.finished,
        "reason": one.reason,
        "problem": one.problem,
        "steps": len(one.steps),
        "first_step": one.steps[0].number if one.steps else None,
        "last_step": one.steps[-1].number if one.steps else None,
        "failed_steps": [step.number for step in one.steps if step.failed],
        "events": sum(map(len, one.steps)),
        "programs": len({id(step.program) for step in one.steps}),
        "kinds": dict(kinds),
    }


def _steps(one: Mapping[str, Any]) -> str:
    if not one["steps"]:
        return "none"
    first, last = named(one["first_step"]), named(one["last_step"])
    return first if first == last else f"{first} to {last}"


def _event(rank: int, event: Event) -> dict[str, Any]:
    one = event.definition
    return {
        "rank": rank,
        "step": event.step,
        "index": event.index,
        "name": one.name,
        "kind": one.kind,
        "path": one.path,
        "occurrence": event.occurrence,
        "module": one.module,
        "digest": str(event.digest),
    }
