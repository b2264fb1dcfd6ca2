"""The table of goldens that changed: one for `verify golden update` and for every report.

It reads rows as `verify.goldens.changes` makes them and a result document holds them; of a document
every value is anybody's text. It refuses to leave rows out silently: `more` counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from verify.rendering.escaping import clipped, code, prose
from verify.rendering.phrases import number

COLUMNS = ("case", "kind", "tensor", "old", "new", "largest ULP", "elements", "reason")
SHOWN = 50  # rows in a report
LONGEST = 100  # characters of a cell, so that the page of a pull request stays below its limit
_WHOLE = 2000  # characters of a cell where nothing has a limit
_LANE = 16  # digits of a digest: one lane; fewer would be zeros for small integers
_NOTHING = "-"
_UNCHANGED = "No golden changed.\n"
_PLAIN = re.compile(r"[A-Za-z0-9_,./:\[\]+-]( ?[A-Za-z0-9_,./:\[\]+-])*")
Rows = Sequence[Mapping[str, Any]]


def cells(
    changed: Rows, shown: int | None = SHOWN, longest: int = LONGEST
) -> list[tuple[str, ...]]:
    """The printable cells of COLUMNS for at most `shown` rows (None: for all)."""
    return [
        (
            clipped(row["case"], longest),
            clipped(row["kind"], longest),
            clipped(row["tensor"], longest),
            clipped(_digest(row["old"]), longest),
            clipped(_digest(row["new"]), longest),
            clipped(_count(row["max_ulp"]), longest),
            clipped(_count(row.get("differing")), longest),  # older documents lack it
            clipped(row["reason"] or "", longest),
        )
        for row in changed[:shown]
    ]


def more(changed: Rows) -> list[str]:
    """A sentence about rows that a report leaves out."""
    left = len(changed) - SHOWN
    return [f"and {number(left, 'golden')} more in the result document"] if left > 0 else []


def text(changed: Rows, shown: int | None = SHOWN) -> list[str]:
    """The lines of a table for a terminal; none when nothing changed."""
    if not changed:
        return []
    made = cells(changed, shown)
    table = tabulate(made, headers=COLUMNS, tablefmt="simple", disable_numparse=True)
    left = more(changed) if shown is not None else []
    return [*(line.rstrip() for line in table.splitlines()), *left]


def markdown(changed: Rows, shown: int | None = SHOWN, longest: int = LONGEST) -> Iterator[str]:
    """The pieces of a table in markdown: its head, then a piece a row; none when nothing changed.

    Each ends in a newline. No cell can end the table, mention anybody or hold markup.
    """
    if changed:
        yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    for row in cells(changed, shown, longest):
        *marked, reason = row
        yield f"| {' | '.join(map(_code, marked))} | {prose(reason)} |\n"


def page(changed: Rows) -> str:
    """The whole table for a pull request; a sentence when nothing changed."""
    return "".join(markdown(changed, None, _WHOLE)) or _UNCHANGED


def screen(changed: Rows) -> str:
    """The whole table for a terminal; the same sentence when nothing changed."""
    return "".join(f"{line}\n" for line in text(changed, None)) or _UNCHANGED


def _code(cell: str) -> str:
    """A name, digest or number; readable before it is rendered too, where that is harmless."""
    if cell in ("", _NOTHING):
        return cell
    return f"`{cell}`" if _PLAIN.fullmatch(cell) else code(cell)


def _digest(value: Any) -> Any:
    """A digest's beginning, or whatever else is there."""
    if value is None:
        return _NOTHING
    head, colon, digits = str(value).rpartition(":")
    return f"{head}{colon}{digits[:_LANE]}" if colon else value


def _count(value: Any) -> Any:
    if value is None:
        return _NOTHING
    return f"{value:,}" if isinstance(value, int | float) else value
