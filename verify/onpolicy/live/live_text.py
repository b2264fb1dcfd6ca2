"""What was found of a model, for a terminal: its conditions, and the modules behind them.

Names of modules and messages come from the model: all of it is printable, and every line begins
with a word of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from verify.onpolicy.live.conditions import Condition, ModelReport
from verify.onpolicy.live.locating import Parted
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number

_NAME, _LONGEST = 60, 300
HEAD = ("condition", "verdict", "tokens differ", "largest |d|", "in float64", "first module")


def text(report: ModelReport) -> str:
    """The part of the report that follows the doctor's."""
    return "\n".join([*_about(report), *_table(report), *_where(report), *_rest(report)])


def _about(report: ModelReport) -> Iterator[str]:
    facts = report.facts
    said = [
        printable(facts["class"]),
        f"{facts['parameters']:,} parameters in {printable(facts['dtype'])} on {facts['device']}",
        *(f"{name} {printable(facts[name])}" for name in ("attention", "experts") if facts[name]),
    ]
    yield f"model: {clipped(facts['name'], _LONGEST)}: {', '.join(said)}"
    yield (
        f"model: {number(report.request.samples, 'sample')} of at most "
        f"{number(report.request.tokens, 'token')}, seed {report.request.seed}; every condition is "
        "compared with the sequence alone in one pass"
    )


def _table(report: ModelReport) -> Iterator[str]:
    rows = [_row(one) for one in report.conditions]
    table = tabulate(rows, HEAD, tablefmt="simple", disable_numparse=True)
    yield from (f"  {line.rstrip()}" for line in table.splitlines())


def _row(one: Condition) -> tuple[str, ...]:
    state = f"verdict={one.verdict}"
    if one.problem:
        return (one.name, state, "not run", "-", "-", "-")
    wide = "-"
    if one.wide is not None:
        wide = "?" if one.wide.largest is None else f"{one.wide.largest:.3g}"
    return (
        one.name,
        state,
        f"{one.differing:,} of {one.compared:,}",
        "0" if not one.differing else _size(one.largest),
        wide,
        "-" if one.parted is None else clipped(one.parted.module, _NAME),
    )


def _where(report: ModelReport) -> Iterator[str]:
    for one in report.conditions:
        if one.problem:
            yield f"{one.name}: not run: {clipped(one.problem, _LONGEST)}"
        if one.parted is not None:
            yield f"{one.name}: {_sentence(one.parted)}"
        if one.parted is not None or one.differing:
            yield from _modules(one)
        if one.wide is not None and one.wide.problem:
            yield f"{one.name}: float64 says nothing: {clipped(one.wide.problem, _LONGEST)}"
        elif one.wide is not None and one.wide.structural:
            assert one.wide.parted is not None
            yield (
                f"{one.name}: no rounding: {_named(one.wide.parted)} computes something else, in "
                "float64 as well"
            )
        elif one.wide is not None:
            flips = one.wide.parted is not None
            why = (
                "but for a router's choice between equals" if flips else "what is left is rounding"
            )
            yield f"{one.name}: in float64 no module differs beyond 2^-12 of its rows, {why}"


def _sentence(parted: Parted) -> str:
    part = parted.before.removeprefix(f"{parted.module}.")
    where = f", before its {clipped(part, _NAME)}" if part else ""
    size = "" if parted.largest is None else f", largest |d| {_size(parted.largest)}"
    return (
        f"equal bits up to {_named(parted)}{where}: {parted.differing:,} of {parted.compared:,} "
        f"places differ, first sample {parted.sequence} position {parted.position}{size}"
    )


def _named(parted: Parted) -> str:
    return f"{clipped(parted.module, _NAME)} ({printable(parted.type)})"


def _modules(one: Condition) -> Iterator[str]:
    """Which row-wise modules gave other rows for equal ones; experts in any case."""
    for kind in one.rows:
        if kind.experts or kind.other:
            what = "experts" if kind.experts else "row by row"
            first = f", first {clipped(kind.first, _NAME)}" if kind.first else ""
            yield (
                f"  {what}: {printable(kind.type)}: other bits for equal inputs at {kind.other:,} "
                f"of {kind.rows:,} places, in {kind.differing} of "
                f"{number(kind.modules, 'module')}{first}"
            )


def _rest(report: ModelReport) -> Iterator[str]:
    equal = [one.name for one in report.conditions if not one.problem and one.parted is None]
    if equal:
        yield f"model: equal bits in every module: {', '.join(equal)}"
    yield from (f"note: {clipped(note, _LONGEST)}" for note in report.notes)


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
