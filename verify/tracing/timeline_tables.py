"""The words of a timeline's page: the tables behind the picture, and the step event by event.

Everything here is printable text of limited length, ready for a template that escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number
from verify.tracing.findings import Form, Place, RankDiff, TraceDiff, Unmatched, label
from verify.tracing.sentences import event, step
from verify.tracing.timeline import Row, Timeline
from verify.tracing.timeline_events import Folded, ShownEvent, State, StepEvents, leading
from verify.tracing.timeline_lanes import COMPUTED, REST, Lane

NAME, LINE, DIGEST = 100, 300, 140  # characters
WORDS = {
    State.ORIGIN: "culprit",
    State.DIFFERS: "differs",
    State.ONLY: "only in one run",
    State.EQUAL: "equal",
    State.NONE: "not compared",
}
DIFFERENCES = {
    "": "",
    "bits": "other bits",
    "dtype": "another dtype",
    "shape": "another shape",
    "replicas": "ranks of one run disagree",
}
_LANE_NAME = 34
_HISTORY = 4  # changes that are told of one row
_SHOWN_RANKS, _SHOWN_LIST = 256, 50
_BEFORE, _BEHIND = 6, 3  # events around the first to look at that stand in the open table


@dataclass(frozen=True)
class Table:
    """rows: of text. more: how many were left to the JSON document."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def history(row: Row, steps: Sequence[int]) -> str:
    """`equal from start to step 3; differs from step 4 to step 9`."""
    runs = list(row.runs(steps))
    said = [
        f"{WORDS[state]} {'at' if low == high else 'from'} {step(low)}"
        + ("" if low == high else f" to {step(high)}")
        for state, low, high in runs[:_HISTORY]
    ]
    if len(runs) > _HISTORY:
        said.append(f"and {number(len(runs) - _HISTORY, 'change')} more")
    return "; ".join(said)


def rank_name(rank: object) -> str:
    """`rank 3`, or what stands for the sum over all."""
    return "sum over ranks" if rank is None else f"rank {rank}"


def group_name(lane: Lane) -> str:
    """The heading that a lane stands under."""
    return lane.phase if lane.phase in COMPUTED else "gradients and state"


def lane_name(lane: Lane, longest: int = _LANE_NAME) -> str:
    """A lane in few characters: the end of a long name tells more than its start."""
    name = lane.name or ("(model)" if lane.phase in COMPUTED else "")
    if lane.name == REST:
        name = f"{lane.modules:,} others"
    shown = printable(name if lane.phase in COMPUTED else f"{lane.phase} {name}".strip())
    folded = f" (+{lane.modules - 1})" if lane.modules > 1 and lane.name != REST else ""
    room = longest - len(folded)
    return (shown if len(shown) <= room else f"...{shown[3 - room :]}") + folded


def tables(found: TraceDiff, picture: Timeline) -> list[Table]:
    """What stands behind the picture, without those that would be empty."""
    every = [
        _ranks(found, picture),
        _lanes(picture),
        _places(found),
        _forms(found.forms, found.forms_count),
        _unmatched(found.unmatched, found.unmatched_count),
        Table(
            "Not compared",
            ("events", "why", "such as"),
            tuple(
                (
                    f"{one.events:,}",
                    clipped(one.reason, LINE),
                    ", ".join(clipped(name, NAME) for name in one.examples),
                )
                for one in found.left
            ),
        ),
        _list("Notes", found.notes),
    ]
    return [one for one in every if one.rows]


def reasons(found: TraceDiff) -> Table:
    """Why a comparison is not VERIFIED."""
    return _list("open" if found.differing else "unverified", found.reasons)


def strip(events: StepEvents) -> dict[str, Any]:
    """The step as a strip: cells, counts of what is folded, and where a phase begins."""
    items: list[dict[str, Any]] = []
    phase = ""
    state = leading(events.counts)
    first = next((one.at for one in events.shown if one.state is state), None)
    for one in events.items:
        if isinstance(one, Folded):
            told = ", ".join(f"{count:,} {WORDS[state]}" for state, count in one.counts)
            items.append({"kind": "fold", "text": told})
            continue
        here = one.phase if one.phase in COMPUTED else "state"
        if here != phase:
            phase = here
            items.append({"kind": "phase", "text": here})
        items.append({"kind": "event", "first": one.at == first, **_cell(one)})
    return {
        "items": items,
        "open": [_row(one) for one in _open(events, first)],
        "folded": list(_groups(events, first)),
        "counts": _counts(events.counts),
        "hidden": sum(events.counts.values()) - sum(1 for _ in events.shown),
    }


def _cell(one: ShownEvent) -> dict[str, str | int]:
    return {
        "at": one.at,
        "state": one.state.value,
        "label": clipped(one.label, NAME),
        "said": _said(one),
        "a": clipped(one.digest_a, DIGEST) or "it is not there",
        "b": clipped(one.digest_b, DIGEST) or "it is not there",
        "same": int(one.state is State.EQUAL),
    }


def _row(one: ShownEvent) -> dict[str, str | int]:
    places = [one.a, one.b]
    where = "/".join("-" if place is None else str(place) for place in dict.fromkeys(places))
    return {**_cell(one), "where": where, "module": clipped(one.module, 40)}


def _said(one: ShownEvent) -> str:
    if one.state is State.ORIGIN:
        return f"culprit ({one.cause}): {DIFFERENCES[one.difference]}"
    if one.state is State.DIFFERS:
        return f"inherits: {DIFFERENCES[one.difference]}"
    if one.state is State.ONLY:
        return "only in A" if one.digest_a else "only in B"
    return WORDS[one.state]


def _open(events: StepEvents, first: int | None) -> Iterator[ShownEvent]:
    """Origins, and what stands around the first of them."""
    for one in events.shown:
        near = first is not None and -_BEFORE <= one.at - first <= _BEHIND
        if near or (one.state is State.ORIGIN and first is not None):
            yield one


def _groups(events: StepEvents, first: int | None) -> Iterator[dict[str, Any]]:
    """What is folded in the table, by state."""
    opened = {one.at for one in _open(events, first)}
    for state, title in ((State.DIFFERS, "inherits"), *WORDS.items()):
        if state is State.DIFFERS and title == WORDS[State.DIFFERS]:
            continue
        rows = [one for one in events.shown if one.state is state and one.at not in opened]
        total = events.counts.get(state, 0)
        if rows:
            yield {
                "title": f"{title}: {number(total, 'event')}",
                "note": f"{len(rows):,} of them here" if len(rows) < total else "",
                "rows": [_row(one) for one in rows],
            }


def _counts(counts: Mapping[State, int]) -> str:
    names = {**WORDS, State.DIFFERS: "inherits"}
    return ", ".join(f"{counts[state]:,} {names[state]}" for state in names if counts.get(state))


def _ranks(found: TraceDiff, picture: Timeline) -> Table:
    compared = {one.rank: one for one in found.ranks}
    rows = []
    for row in islice(picture.ranks, _SHOWN_RANKS):
        assert not isinstance(row.name, Lane)
        one = compared.get(row.name)
        counts = ("-",) * 6 if one is None else _rank_counts(one)
        rows.append((rank_name(row.name), *counts, history(row, picture.steps)))
    columns = ("rank", "compared", "differ", "only A", "only B", "first difference", "cause")
    return Table(
        "Ranks",
        (*columns, "over the steps"),
        tuple(rows),
        len(picture.ranks) - len(rows),
    )


def _rank_counts(one: RankDiff) -> tuple[str, ...]:
    first = "-" if one.first is None else f"{step(one.first.step)}: {event(one.first)}"
    cause = "-" if one.first is None else str(one.cause or "inherits")
    return (
        f"{one.compared:,}",
        f"{one.differing:,}",
        f"{one.only_a:,}",
        f"{one.only_b:,}",
        first,
        cause,
    )


def _lanes(picture: Timeline) -> Table:
    rows = []
    for row in picture.lanes:
        assert isinstance(row.name, Lane)
        rows.append((row.name.phase, lane_name(row.name, NAME), history(row, picture.steps)))
    title = f"Modules of {rank_name(picture.rank)}"
    return Table(title, ("phase", "module", "over the steps"), tuple(rows))


def _places(found: TraceDiff) -> Table:
    rows = tuple(_place(one) for one in found.inherits)
    columns = ("rank", "step", "event", "class", "difference")
    title = f"Inherits: {number(found.inherits_count, 'event')} of all steps and ranks"
    return Table(title, columns, rows, found.inherits_count - len(rows))


def _place(one: Place) -> tuple[str, ...]:
    return (
        rank_name(one.rank),
        step(one.step),
        event(one),
        clipped(one.module, 40),
        DIFFERENCES[one.difference],
    )


def _forms(forms: Sequence[Form], count: int) -> Table:
    rows = tuple(
        (
            rank_name(one.rank),
            _label(one),
            clipped(one.a, NAME),
            clipped(one.b, NAME),
            _span(one),
        )
        for one in forms
    )
    columns = ("rank", "event", "in A", "in B", "steps")
    return Table("Stored in another dtype or shape", columns, rows, count - len(rows))


def _unmatched(unmatched: Sequence[Unmatched], count: int) -> Table:
    rows = tuple(
        (rank_name(one.rank), one.side.upper(), _label(one), _span(one)) for one in unmatched
    )
    columns = ("rank", "only in", "event", "steps")
    return Table("Events of one run only", columns, rows, count - len(rows))


def _label(one: Form | Unmatched) -> str:
    return clipped(label(one.name, one.kind, one.path, one.occurrence), NAME)


def _span(one: Form | Unmatched) -> str:
    return f"{one.steps:,} from {step(one.first_step)}"


def _list(title: str, lines: Iterable[str]) -> Table:
    every = list(lines)
    rows = tuple((clipped(line, LINE),) for line in every[:_SHOWN_LIST])
    return Table(title, (), rows, len(every) - len(rows))
