"""What running two recorded runs again has shown, for people and as a JSON document.

The verdict is the first line, then the culprit, what it was made of, and how its tensors differ. No
line starts with text that a recording controls, and all of it is printable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verify.digests import SCHEME
from verify.reasons import EXIT_CODES
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number
from verify.replaying.explaining import Explanation, Told, Try
from verify.results import tool_version
from verify.tracing import documents, trace_text
from verify.tracing.findings import label
from verify.tracing.sentences import sentence

SCHEMA_VERSION = 1
_LONGEST = 100
_SHOWN = 6  # events


def text(found: Explanation, kept: str | None = None) -> str:
    """The report, without a newline at its end. kept: where the tensors are, if they are."""
    if not found.tries:
        return trace_text.text(found.found)
    return "\n".join([_headline(found), *_culprit(found), *_tries(found), *_further(found, kept)])


def to_json(found: Explanation, kept: str | None = None) -> dict[str, Any]:
    """The document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "mok-verify", "version": tool_version(), "digest_scheme": SCHEME},
        "verdict": found.verdict.value,
        "exit_code": exit_code(found),
        "explained": found.explained is not None,
        "tries": [
            {
                "parted": one.parted,
                "inputs_equal": one.inputs_equal,
                "said": one.said,
                "events": [_event(each) for each in one.at],
                "inputs": [_event(each) for each in one.given],
            }
            for one in found.tries
        ],
        "diff": documents.to_json(found.found),
        "first_diff": None if found.first is None else documents.to_json(found.first),
        "kept": kept,
    }


def exit_code(found: Explanation) -> int:
    """1 explained, 3 not seen again; without a culprit what the comparison ends with."""
    return EXIT_CODES[found.verdict]


def _event(one: Told) -> dict[str, Any]:
    name, kind, path, occurrence = one.key
    return {
        "step": one.step,
        "name": name,
        "kind": kind,
        "path": path,
        "occurrence": occurrence,
        "equal": one.difference is None and not one.problem,
        "problem": one.problem,
        "difference": one.difference,
    }


def _headline(found: Explanation) -> str:
    tries = number(len(found.tries), "try")
    if found.explained is not None:
        return f"verdict={found.verdict} they part at the same place again, in {tries}"
    if all(one.at and one.at[0].problem for one in found.tries):
        return f"verdict={found.verdict} not explained: no tensors to compare in {tries}"
    return f"verdict={found.verdict} not explained: not seen again at the same place in {tries}"


def _culprit(found: Explanation) -> Iterator[str]:
    assert found.found.culprit is not None
    if found.first is not None and found.first.culprit is not None:
        yield f"recorded in full, since {sentence(found.first.culprit, found.first)}"
    yield f"culprit: {sentence(found.found.culprit, found.found)}"
    yield from (f"  hint: {printable(hint)}" for hint in found.found.culprit.hints)


def _tries(found: Explanation) -> Iterator[str]:
    explained = found.explained
    if explained is None:
        for count, one in enumerate(found.tries, 1):
            yield f"try {count}: {printable(one.said)}"
        return
    yield from _given(explained)
    differing = [told.difference for told in explained.at if told.difference is not None]
    for difference in differing[:_SHOWN]:
        yield from (f"  | {clipped(line, 300)}" for line in difference["lines"])
        yield from (f"  | {line}" for line in tile_lines(difference))
        yield from (f"  suggests: {printable(said)}" for said in difference["suggests"])
    if len(differing) > _SHOWN:
        yield f"  and {len(differing) - _SHOWN} more events at fault in the JSON document"


def _given(one: Try) -> Iterator[str]:
    """What the culprit was made of, which is equal."""
    equal = [each for each in one.given if not each.problem]
    if equal:
        names = ", ".join(clipped(label(*each.key), _LONGEST) for each in equal[:_SHOWN])
        more = len(equal) - _SHOWN
        yield f"equal again: {names}" + (f" and {more} more" if more > 0 else "")
    for each in one.given:
        if each.problem:
            yield f"not compared: {clipped(label(*each.key), _LONGEST)}: {printable(each.problem)}"


def tile_lines(difference: Mapping[str, Any]) -> list[str]:
    """The map of differing elements: one character for each tile of the last two dimensions."""
    tiles = difference.get("tiles")
    if not tiles or not tiles["counts"]:
        return []
    rows, columns = tiles["shape"]
    high, wide = tiles["tile"]
    deep = max(1, difference["numel"] // max(1, rows * columns))
    shown = [
        "".join(
            _mark(count, deep * _size(rows, high, i) * _size(columns, wide, j))
            for j, count in enumerate(line)
        )
        for i, line in enumerate(tiles["counts"])
    ]
    title = f"tiles of {high} x {wide} elements: . equal, # all differ, digits: tenths that differ"
    return [title, *(f"  {line}" for line in shown)]


def _size(whole: int, tile: int, place: int) -> int:
    return min(tile, whole - place * tile)


def _mark(count: int, size: int) -> str:
    if count == 0:
        return "."
    return "#" if count >= size else str(min(9, 10 * count // size))


def _further(found: Explanation, kept: str | None) -> Sequence[str]:
    if kept is None:
        return ["further: --keep FOLDER keeps tensors and recordings"]
    return [f"further: tensors of both runs: {printable(kept)}/try-{len(found.tries)}/"]
