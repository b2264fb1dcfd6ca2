"""A comparison of recordings as one HTML file to look at: no script, no address, at most 2 MB.

First the verdict and the culprit; then ranks over steps, modules of one rank over steps, and the
first step that differs, event by event; behind them, tables. What does not fit is folded and
counted, every name is text, and a Content-Security-Policy forbids all but the page's own style. The
same comparison gives the same bytes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verify.errors import InputFileError
from verify.rendering.escaping import clipped
from verify.rendering.pages import page_templates
from verify.results import tool_version, write_text
from verify.tracing import trace_text
from verify.tracing.documents import exit_code
from verify.tracing.findings import TraceDiff
from verify.tracing.sentences import at, event, sentence, step
from verify.tracing.timeline import Row, Timeline, timeline
from verify.tracing.timeline_events import StepEvents, fewer
from verify.tracing.timeline_figures import Figure, figure, shared_rows
from verify.tracing.timeline_lanes import Lane
from verify.tracing.timeline_sides import read_pairs
from verify.tracing.timeline_tables import (
    DIFFERENCES,
    DIGEST,
    LINE,
    NAME,
    WORDS,
    group_name,
    history,
    lane_name,
    rank_name,
    reasons,
    strip,
    tables,
)

LIMIT = 2_000_000  # bytes of the whole page
_FEWER = (120, 30, 0)  # events that are shown of a step, if all do not fit
_RECORDING = re.compile(r"rank-\d{5,}\.trace")
_MEANING = {0: "equal", 1: "they differ", 3: "nothing differs, but something is missing"}


def render(found: TraceDiff, picture: Timeline) -> str:
    """The page, at most LIMIT bytes of UTF-8, ending in a newline. Where long names would make it
    larger, fewer events of the step are shown."""
    parts = _parts(found, picture)
    draw = page_templates().get_template("timeline.jinja").render
    if picture.events is None:
        return draw(parts, events=None)
    page = draw(parts, events=_events(found, picture, picture.events))
    for limit in _FEWER:
        if len(page.encode("utf-8")) <= LIMIT:
            break
        page = draw(parts, events=_events(found, picture, fewer(picture.events, limit)))
    return page


def refuse(path: Path, *runs: Path) -> None:
    """Raises InputFileError for a file that a page must not be written to: a folder, or what is or
    would pass for a recording."""
    if path.is_dir():
        raise InputFileError(f"{path}: is a folder; give the name of the page, such as diff.html")
    if _RECORDING.fullmatch(path.name) or any(path.exists() and _same(path, run) for run in runs):
        raise InputFileError(
            f"{path}: a recording has, or could have, this name; give another, such as diff.html"
        )


def write_page(found: TraceDiff, a: Path, b: Path, path: Path) -> None:
    """Draws the comparison of `a` and `b`, and writes it whole or not at all. InputFileError when
    it cannot be written, or the recordings are no longer those that were compared."""
    write_text(path, render(found, timeline(found, read_pairs(a, b, found))))


def _same(path: Path, run: Path) -> bool:
    return run.exists() and path.samefile(run)


def _parts(found: TraceDiff, picture: Timeline) -> dict[str, Any]:
    """Everything on the page but the step's events."""
    return {
        "head": _head(found),
        "reasons": reasons(found),
        "culprit": _culprit(found),
        "others": [trace_text.also(one, found) for one in found.others],
        "others_more": found.others_count - len(found.others),
        "ranks": _ranks(picture),
        "rows_shared": -(-len(picture.ranks) // max(len(shared_rows(picture.ranks)), 1)),
        "ranks_legend": _legend(picture.ranks),
        "lanes": _lanes(picture),
        "lanes_legend": _legend(picture.lanes),
        "rank": rank_name(picture.rank),
        "folded": picture.folded,
        "tables": tables(found, picture),
    }


def _head(found: TraceDiff) -> dict[str, Any]:
    words = ["verify", "trace", "diff", found.a, found.b]
    if found.steps != (None, None):
        low, high = ("" if one is None else str(one) for one in found.steps)
        words.append(f"--steps={low}:{high}")
    code = exit_code(found)
    said = "no culprit in these steps: all that differs inherits from steps before"
    if found.culprit is not None:
        said = sentence(found.culprit, found)
    return {
        "verdict": found.verdict.value,
        "line": trace_text.headline(found),
        "totals": trace_text.headline(found).partition(" ")[2],
        "culprit": said if found.differing else "",
        "command": clipped(shlex.join(words), 2 * LINE),
        "facts": [
            ("exit code", f"{code}, {_MEANING[code]}"),
            ("A", clipped(found.a, NAME)),
            ("B", clipped(found.b, NAME)),
            ("ranks", " and ".join(map(str, dict.fromkeys(found.worlds)))),
            ("tool", f"mok-verify {tool_version()}"),
        ],
    }


def _culprit(found: TraceDiff) -> dict[str, Any] | None:
    one = found.culprit
    if one is None:
        return None
    return {
        "where": at(one.place),
        "event": event(one.place),
        "cause": str(one.cause),
        "places": [
            ("event", f"{one.place.index} of its step"),
            ("class", clipped(one.place.module, NAME)),
            ("difference", DIFFERENCES[one.place.difference]),
            ("last equal before it", clipped(one.after, NAME) if one.after else ""),
        ],
        "a": clipped(one.place.a, DIGEST),
        "b": clipped(one.place.b, DIGEST),
        "hints": [clipped(hint, 2 * LINE) for hint in one.hints],
    }


def _legend(rows: Sequence[Row]) -> list[tuple[str, str]]:
    met = {state for row in rows for state in row.states}
    return [(state.value, word) for state, word in WORDS.items() if state in met]


def _ranks(picture: Timeline) -> Figure | None:
    if not picture.steps:
        return None
    shown = shared_rows(picture.ranks)
    alone = len(shown) == len(picture.ranks)
    rows = []
    for place, (name, states) in enumerate(shown):
        about = f"{name}: {history(picture.ranks[place], picture.steps)}" if alone else name
        rows.append(("", name, about, states))
    return figure(picture.steps, rows, picture.first)


def _lanes(picture: Timeline) -> Figure | None:
    rows = []
    for row in picture.lanes:
        assert isinstance(row.name, Lane)
        about = f"{lane_name(row.name, NAME)}: {history(row, picture.steps)}"
        rows.append((group_name(row.name), lane_name(row.name), about, row.states))
    return figure(picture.steps, rows, picture.first) if rows and picture.steps else None


def _events(found: TraceDiff, picture: Timeline, events: StepEvents) -> dict[str, Any]:
    drawn = strip(events)
    command = f"verify trace show {shlex.quote(found.a)} --steps={events.number}"
    return {
        **drawn,
        "title": f"{step(events.number).capitalize()} of {rank_name(picture.rank)}",
        "total": sum(events.counts.values()),
        "command": clipped(command, 2 * LINE),
    }
