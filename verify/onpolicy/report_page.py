"""What the doctor found as one HTML file to look at: no script, no address, at most 2 MB.

First the verdict and the first cause with its evidence; then numbers, the worst samples token by
token, where the mismatch lies, and the field's metrics; behind them, what could not be aligned or
read. What does not fit is folded and counted, every name is text, and a Content-Security-Policy
forbids all but the page's own style. The same analysis gives the same bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from verify.errors import InputFileError
from verify.onpolicy import report_drawing as drawing
from verify.onpolicy import report_words as words
from verify.onpolicy.analysing import Analysis
from verify.onpolicy.figures import FIGURES
from verify.onpolicy.metrics import METRICS
from verify.onpolicy.report_figures import Figures, figures
from verify.onpolicy.report_squares import drawn_scatter
from verify.onpolicy.report_strips import TOKENS, strips
from verify.onpolicy.report_text import headline, leading, spot, value
from verify.onpolicy.report_words import LINE, LISTED, NAME
from verify.onpolicy.routing_table import FAULTS
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import percent
from verify.results import tool_version, write_text

LIMIT = 2_000_000  # bytes of the whole page
_FEWER = (TOKENS, 120, 40, 0)  # tokens of a sample that are shown one by one, if all do not fit
_CAUSES, _FINDINGS, _MODEL_LINES = 6, 20, 200
_MEANING = {
    0: "verified",
    1: "mismatch",
    3: "nothing structural found, but values differ without a bound, or something is missing",
}
_STATES = {True: "fired", False: "holds", None: "not measured"}
_TILES = {
    "compared_tokens": "tokens compared",
    "differing_tokens": "tokens that differ",
    "masked_tokens": "hidden by the mask",
    "abs_mean": "mean |d|",
    "abs_p50": "median |d|",
    "abs_p99": "p99 of |d|",
    "abs_max": "largest |d|",
    "share_beyond_ln2": "share beyond a factor of 2",
    "k1": "k1",
    "k3": "k3",
    "chi2_token": "chi-square",
    "ess_token": "effective sample size",
}


def refuse(path: Path, *others: str | Path | None) -> None:
    """Raises InputFileError for a file that a page must not be written to: a folder, one of the
    other files of the command, or a file inside a folder that is read."""
    if os.path.isdir(path):  # of os, which says False where Path raises
        raise InputFileError(f"{path}: is a folder; give the name of the page, such as report.html")
    real = os.path.realpath(path)
    for other in others:
        if other is None:
            continue
        folder = os.path.realpath(other)
        linked = os.path.exists(other) and os.path.exists(path) and os.path.samefile(path, other)
        if linked or real == folder:
            raise InputFileError(
                f"{path}: is another file of this command; give the page another name"
            )
        if os.path.isdir(other) and os.path.commonpath([folder, real]) == folder:
            raise InputFileError(
                f"{path}: lies in {other}, all files of which are read; put the page elsewhere"
            )


def write_page(found: Analysis, path: Path, model: str = "") -> None:
    """Draws the analysis, and writes it whole or not at all. InputFileError when it cannot be."""
    write_text(path, render(found, model))


def render(found: Analysis, model: str = "") -> str:
    """The page, at most LIMIT bytes of UTF-8, ending in a newline. Where long names would make it
    larger, fewer tokens are shown one by one. model: what --model says besides, lines of text."""
    parts = _parts(found, figures(found.pairs))
    parts["model"] = [clipped(line, LINE) for line in model.splitlines()[:_MODEL_LINES]]
    draw = _environment().get_template("onpolicy.jinja").render
    flips = None if found.routing is None else found.routing.flips
    page = ""
    for limit in _FEWER:
        shown = [words.strip(one, at) for at, one in enumerate(strips(found.pairs, flips, limit))]
        page = draw(parts, strips=shown)
        if len(page.encode("utf-8")) <= LIMIT:
            break
    return page


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("verify.rendering"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["value"] = value
    made.filters["percent"] = percent
    made.filters["name"] = lambda text: clipped(text, NAME)
    return made


def _parts(found: Analysis, drawn: Figures) -> dict[str, Any]:
    """Everything on the page but the strips of tokens."""
    first = leading(found.causes)
    others = [one for one in found.causes if one is not first]
    numbers, pairs = found.numbers, found.pairs
    routing = found.routing
    return {
        "head": _head(found),
        "findings": [words.finding(one) for one in found.verdict.findings[:_FINDINGS]],
        "findings_more": len(found.verdict.findings) - _FINDINGS,
        "cause": words.cause(first) if first is not None else None,
        "others": [words.cause(one) for one in others[:_CAUSES]],
        "others_more": len(others) - _CAUSES,
        "gates": [
            (printable(one.gate.text), value(one.value), _STATES[one.fired])
            for one in found.verdict.outcomes
        ],
        "tiles": [(said, value(numbers.figures[name])) for name, said in _TILES.items()],
        "spots": [
            (title, spot(one))
            for title, one in (("first", numbers.first), ("largest", numbers.largest))
            if one is not None
        ],
        "figures": [
            (name, value(numbers.figures[name]), FIGURES[name].formula) for name in FIGURES
        ],
        "scatter": None if drawn.scatter is None else drawn_scatter(drawn.scatter),
        "scattered": drawn.scatter,
        "positions": drawing.along(drawn.positions),
        "position_width": _width(drawn.positions),
        "by_sample": drawing.along(drawn.by_sample) if len(pairs.samples) > 1 else None,
        "sample_width": _width(drawn.by_sample),
        "samples": [words.sample(one) for one in drawn.samples],
        "samples_more": drawn.samples_more,
        "groupings": [words.grouping(one) for one in drawn.groupings],
        "routing": routing,
        "routing_faults": [
            (one.kind, clipped(one.where, NAME), clipped(one.what, LINE), FAULTS[one.kind])
            for one in (routing.faults if routing is not None else ())[:LISTED]
        ],
        "routing_faults_more": len(routing.faults) - LISTED if routing is not None else 0,
        "layers": drawing.drawn_layers(routing.layers) if routing is not None else None,
        "histogram": drawing.drawn_bars(drawn),
        "metrics": [
            (METRICS[name].projects, name, value(one), METRICS[name].formula)
            for name, one in found.metrics.items()
        ],
        "misalignments": words.misalignments(found),
        "misalignments_more": len(pairs.misalignments) - LISTED,
        "problems": [
            (clipped(one.place, LINE), clipped(one.field, NAME), clipped(one.what, LINE))
            for one in pairs.problems[:LISTED]
        ],
        "problems_more": len(pairs.problems) - LISTED,
        "notes": [clipped(one, LINE) for one in pairs.notes[:LISTED]],
        "notes_more": len(pairs.notes) - LISTED,
        "levels": words.levels(),
    }


def _head(found: Analysis) -> dict[str, Any]:
    code = found.verdict.exit_code
    line = headline(found)
    sides = [("trainer", found.trainer)]
    if found.rollout is not None:
        sides.append(("rollout", found.rollout))
    else:
        sides = [("both sides", found.trainer)]
    return {
        "verdict": found.verdict.verdict.value,
        "line": line,
        "totals": line.partition(" ")[2],
        "facts": [
            ("exit code", f"{code}, {_MEANING[code]}"),
            *((name, f"{clipped(path, LINE)} ({form})") for name, (path, form) in sides),
            ("tool", f"mok-verify {tool_version()}"),
        ],
    }


def _width(ranges: Sequence[Any]) -> int:
    return ranges[0].high - ranges[0].low + 1 if ranges else 1
