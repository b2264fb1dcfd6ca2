"""The result of a replay for people and as a JSON document, version 1, additive from here on.

The verdict is the first line, then the pairs, then for each that parted what is to blame. No line
starts with text that a recording controls, and all of it is printable.
"""

from __future__ import annotations

import importlib.resources
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tabulate import tabulate

from verify.digests import SCHEME
from verify.reasons import EXIT_CODES, Verdict
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number
from verify.replaying.findings import Finding
from verify.replaying.replays import Pair, Replay
from verify.results import tool_version
from verify.tracing import documents
from verify.tracing.causes import Cause
from verify.tracing.definitions import START
from verify.tracing.findings import Culprit
from verify.tracing.sentences import event, sentence, step

SCHEMA_VERSION = 1
_LONGEST = 100
_RUNS = {"repeat": "again", "stopped": "stopped", "resumed": "resumed"}
_SHOWN_OTHERS = 3


def text(found: Replay, kept: str | None = None) -> str:
    """The report, without a newline at its end. kept: where the recordings are, if they are."""
    return "\n".join(
        [
            _headline(found),
            *_table(found),
            *(line for pair in found.pairs for line in _parted(pair, found)),
            *_reasons(found),
            *(f"suspect: {one.kind}: {printable(one.what)}" for one in found.suspects),
            *_further(found, kept),
        ]
    )


def to_json(found: Replay, kept: str | None = None) -> dict[str, Any]:
    """The document."""
    border = found.border
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "mok-verify", "version": tool_version(), "digest_scheme": SCHEME},
        "verdict": found.verdict.value,
        "exit_code": exit_code(found),
        "command": list(found.command),
        "steps": found.steps,
        "stop_after": found.stop_after,
        "resumed_at": None if border is None else border.step + 1,
        "pairs": [_pair(pair) for pair in found.pairs],
        "suspects": [{"kind": one.kind.value, "what": one.what} for one in found.suspects],
        "reasons": list(found.reasons),
        "kept": kept,
    }


def exit_code(found: Replay) -> int:
    """0 verified, 1 mismatch, 3 nothing wrong found but something missing."""
    return EXIT_CODES[found.verdict]


def schema() -> dict[str, Any]:
    """The JSON Schema of the document, as shipped with the package."""
    file = importlib.resources.files("verify").joinpath("schema", "replay-v1.schema.json")
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def _pair(pair: Pair) -> dict[str, Any]:
    named = replace(pair.diff, a="whole", b=_RUNS[pair.name])
    findings = [
        {
            "kind": one.kind.value,
            "rank": one.rank,
            "step": one.step,
            "names": list(one.names),
            "count": one.count,
            "what": one.what,
            "remedy": one.remedy,
            "sentence": said(one),
        }
        for one in pair.findings
    ]
    return {
        "name": pair.name,
        "runs": ["whole", _RUNS[pair.name]],
        "verdict": pair.verdict.value,
        "findings": findings,
        "diff": documents.to_json(named),
    }


def said(one: Finding) -> str:
    """A finding in a sentence."""
    names = ", ".join(clipped(name, _LONGEST) for name in one.names)
    more = one.count - len(one.names)
    names += f" and {more} more" if more > 0 else ""
    return f"rank {one.rank}, step {one.step}: {one.kind.value}: {names}: {printable(one.what)}"


def _headline(found: Replay) -> str:
    parted = [pair for pair in found.pairs if pair.verdict is Verdict.MISMATCH]
    made = f"{number(found.steps, 'step')}"
    if found.border is not None:
        inside = "inside of" if found.border.part else "at"
        made += f", stopped after {found.stop_after}, resumed {inside} step {found.border.step + 1}"
    if parted:
        names = " and ".join(f"{pair.name} (whole, {_RUNS[pair.name]})" for pair in parted)
        said = f"parted: {names}; {made}"
    elif found.reasons:
        said = f"{made}; {number(len(found.reasons), 'reason')} not to call it VERIFIED"
    else:
        said = f"{number(len(found.pairs), 'pair')} of runs equal; {made}"
    return f"verdict={found.verdict} {said}"


def _table(found: Replay) -> Iterator[str]:
    rows = []
    for pair in found.pairs:
        place = _first(pair)
        rows.append(
            (
                pair.name,
                f"whole, {_RUNS[pair.name]}",
                _span(pair, found),
                pair.verdict.value,
                f"{pair.diff.compared:,}",
                f"{pair.diff.differing:,}",
                place,
            )
        )
    headers = ("pair", "runs", "steps", "verdict", "compared", "differ", "first difference")
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    yield from (f"  {line.rstrip()}" for line in table.splitlines())


def _first(pair: Pair) -> str:
    firsts = [one.first for one in pair.diff.ranks if one.first is not None]
    if not firsts:
        return "-"
    first = min(firsts, key=lambda place: (place.step, place.index))
    at = "resume" if pair.name == "resumed" and first.step == START else step(first.step)
    return f"{at}: {event(first)}"


def _span(pair: Pair, found: Replay) -> str:
    first, last = 0, found.steps - 1
    if pair.name == "stopped" and found.stop_after is not None:
        last = found.stop_after - 1
    if pair.name == "resumed" and found.border is not None:
        first = found.border.step + 1
    return f"{first}-{last}" if last > first else str(first)


def _parted(pair: Pair, found: Replay) -> Iterator[str]:
    for finding in pair.findings:
        yield f"{pair.name}: {said(finding)}"
        yield f"  do: {printable(finding.remedy)}"
    culprit = pair.diff.culprit
    if pair.verdict is Verdict.MISMATCH and culprit is not None and not pair.findings:
        yield f"{pair.name}: culprit: {sentence(culprit, pair.diff)}"
        yield from (f"  hint: {printable(hint)}" for hint in _hints(culprit))
        for other in pair.diff.others[:_SHOWN_OTHERS]:
            yield f"  also: {sentence(other, pair.diff)}"
    elif culprit is not None and pair.findings and culprit.place.step > START:
        yield f"  first to differ: {sentence(culprit, pair.diff)}"
    if pair.name == "resumed" and pair.verdict is Verdict.MISMATCH and _unsteady(found):
        yield (
            "  but fresh runs differ from each other, too: mend that first; a difference of the "
            "resumed run may be that one, unless it is of the state at the resume"
        )


def _hints(culprit: Culprit) -> Iterator[str]:
    yield from culprit.hints
    if culprit.place.kind == "rng" and culprit.cause is Cause.START:
        yield (
            "it is not seeded, or something drew from it before the recording began, such as a "
            "validation; give that a generator of its own, or put it into torch.random.fork_rng()"
        )
    elif culprit.cause is Cause.RNG:
        yield "give what draws there a generator of its own, or put it into torch.random.fork_rng()"


def _unsteady(found: Replay) -> bool:
    return any(
        pair.verdict is Verdict.MISMATCH
        for pair in found.pairs
        if pair.name in ("repeat", "stopped")
    )


def _reasons(found: Replay) -> Iterator[str]:
    word = "open" if found.verdict is Verdict.MISMATCH else "unverified"
    for reason in found.reasons:
        yield f"{word}: {clipped(reason, 400)}"


def _further(found: Replay, kept: str | None) -> Iterator[str]:
    if found.verdict is not Verdict.MISMATCH:
        return
    if kept is None:
        yield "further: --keep FOLDER keeps the recordings for verify trace diff and explain"
        return
    for pair in found.pairs:
        if pair.verdict is not Verdict.MISMATCH:
            continue
        if pair.name == "repeat":
            command = _commands(found)
            paths = " ".join(shlex.quote(f"{kept}/{name}") for name in ("whole", "again"))
            yield f"further: verify trace explain {printable(paths)} {command}"
        names = ("whole", _RUNS[pair.name])
        if pair.name == "resumed" and found.border is not None:
            names = (
                f"whole-from-step-{found.border.step + 1}",
                f"resumed-from-step-{found.border.step + 1}",
            )
        paths = " ".join(shlex.quote(f"{kept}/{name}") for name in names)
        yield f"further: verify trace diff {printable(paths)}"


def _commands(found: Replay) -> str:
    """What made `whole` and `again`, as words for `verify trace explain`."""
    one = shlex.join(found.command)
    if not found.again_args:
        return printable(f"-- {one}")
    other = shlex.join((*found.command, *found.again_args))
    return printable(f"--a {shlex.quote(one)} --b {shlex.quote(other)}")
