"""A comparison of recordings for people: verdict, culprit, ranks, and then what inherits.

The verdict is the first line. No line starts with text that a recording controls, and all of it is
printable.
"""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number
from verify.tracing.findings import Culprit, RankDiff, TraceDiff, label
from verify.tracing.sentences import at, event, sentence, step

_SHOWN = 5
_SHOWN_RANKS = 64
_LONGEST = 100
_DIFFERENCES = {
    "bits": "other bits",
    "dtype": "stored in another dtype",
    "shape": "another shape",
    "replicas": "ranks of one run disagree",
}


def text(found: TraceDiff) -> str:
    """The report of a comparison, without a newline at its end."""
    return "\n".join(
        [
            headline(found),
            *_culprit(found),
            *_reasons(found),
            *_ranks(found),
            *_inherits(found),
            *_forms(found),
            *_unmatched(found),
            *_left(found),
            *(f"note: {clipped(note, 300)}" for note in found.notes),
        ]
    )


def headline(found: TraceDiff) -> str:
    """`verdict=MISMATCH 118 of 2,400 digests differ, from step 3 on`."""
    steps = max((one.steps for one in found.ranks), default=0)
    over = f"over {number(steps, 'step')} of {number(len(found.ranks), 'rank')}"
    if any(one.rank is None for one in found.ranks):
        over = f"over {number(steps, 'step')}, as sums over ranks"
    said = f"{found.differing:,} of {found.compared:,} digests differ {over}"
    if found.culprit is not None:
        said += f", first at {step(found.culprit.place.step)}"
    if found.reasons and not found.differing:
        said += f"; {number(len(found.reasons), 'reason')} not to call it VERIFIED"
    return f"verdict={found.verdict} {said}"


def _culprit(found: TraceDiff) -> Iterator[str]:
    if found.culprit is None:
        if found.differing:
            yield "culprit: none in these steps: all that differs inherits from steps before"
        return
    place = found.culprit.place
    yield f"culprit: {sentence(found.culprit, found)}"
    yield f"  event {place.index} of its step: {_DIFFERENCES[place.difference]}"
    yield f"  A {printable(place.a)}"
    yield f"  B {printable(place.b)}"
    yield from (f"  hint: {printable(hint)}" for hint in found.culprit.hints)
    for other in found.others[:_SHOWN]:
        yield f"also: {also(other, found)}"
    more = found.others_count - min(len(found.others), _SHOWN)
    if more > 0:
        yield f"also: {number(more, 'event')} more whose own inputs are equal"


def also(other: Culprit, found: TraceDiff) -> str:
    """What a further event with equal inputs of its own says."""
    said = sentence(other, found)
    return f"{said}; or it came from another rank, by a collective" if other.collective else said


def _reasons(found: TraceDiff) -> Iterator[str]:
    word = "open" if found.differing else "unverified"
    for reason in found.reasons:
        yield f"{word}: {clipped(reason, 300)}"


def _ranks(found: TraceDiff) -> Iterator[str]:
    if not found.ranks:
        return
    headers = ("rank", "steps", "compared", "differ", "first difference", "cause")
    rows = [_row(one) for one in found.ranks[:_SHOWN_RANKS]]
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    yield from (f"  {line.rstrip()}" for line in table.splitlines())
    if len(found.ranks) > _SHOWN_RANKS:
        yield f"  and {len(found.ranks) - _SHOWN_RANKS} more ranks in the JSON document"


def _row(one: RankDiff) -> tuple[str, ...]:
    first = "-" if one.first is None else f"{step(one.first.step)}: {event(one.first)}"
    cause = "-" if one.first is None else str(one.cause or "inherits")
    rank = "sums" if one.rank is None else str(one.rank)
    return (rank, str(one.steps), f"{one.compared:,}", f"{one.differing:,}", first, cause)


def _inherits(found: TraceDiff) -> Iterator[str]:
    if not found.inherits_count:
        return
    yield f"inherits: {found.inherits_count:,} event{'s' * (found.inherits_count > 1)}, the first:"
    for place in found.inherits[:_SHOWN]:
        yield f"  {at(place)}: {event(place)}"


def _forms(found: TraceDiff) -> Iterator[str]:
    for one in found.forms[:_SHOWN]:
        name = clipped(label(one.name, one.kind, one.path, one.occurrence), _LONGEST)
        rank = "sums" if one.rank is None else f"rank {one.rank}"
        yield (
            f"{_DIFFERENCES[one.difference]}: {rank}: {name}: {printable(one.a)} in A, "
            f"{printable(one.b)} in B, in {number(one.steps, 'step')} from {step(one.first_step)}"
        )
    if found.forms_count > _SHOWN:
        yield f"stored otherwise: {found.forms_count - _SHOWN} more"


def _unmatched(found: TraceDiff) -> Iterator[str]:
    for one in found.unmatched[:_SHOWN]:
        name = clipped(label(one.name, one.kind, one.path, one.occurrence), _LONGEST)
        rank = "sums" if one.rank is None else f"rank {one.rank}"
        yield (
            f"only in {one.side.upper()}: {rank}: {name}, in {number(one.steps, 'step')} from "
            f"{step(one.first_step)}"
        )
    if found.unmatched_count > _SHOWN:
        yield f"only in one run: {found.unmatched_count - _SHOWN} more"
    moved = sum(one.moved for one in found.ranks)
    if moved:
        yield f"order: {number(moved, 'event')} came in another order"


def _left(found: TraceDiff) -> Iterator[str]:
    for one in found.left:
        some = ", ".join(clipped(name, _LONGEST) for name in one.examples)
        yield f"not compared: {one.events:,} events, such as {some}: {printable(one.reason)}"
