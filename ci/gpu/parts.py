"""The run of ci/gpu.sh: the chosen parts into run.json.

What may run beside others comes first, several steps at once; then, one step after another, what
has to be alone (`commands`). Each part has its own time and its own outcome, written when it is
known, so that a run that is cut short keeps what it had.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import options  # all four beside this file
import sources
from click.core import ParameterSource
from commands import Place, parts
from options import USUAL
from steps import ROOT, Outcome, Part, run_part, run_parts

from verify import devices
from verify.environment import environment, source_state

FORMAT = "mok-verify-gpu-run-v1"
FAILED, UNAVAILABLE = 1, 3
MOST_AT_ONCE = 10


def source_of(root: Path, given: str | None) -> dict[str, Any]:
    """Commit and dirty flag: what was given for a copy of a tree, else git's, or unknown."""
    if given is not None:
        return {"commit": given, "dirty": None}
    state = source_state(root)
    return {"commit": state["commit"] or "unknown", "dirty": state["dirty"]}


def run_all(
    chosen: Sequence[str],
    place: Place,
    out: Path,
    seconds: float,
    source: dict[str, Any],
    say: Callable[[str], None],
    limits: Mapping[str, float] = MappingProxyType({}),
    at_once: int = 1,
) -> dict[str, Any]:
    """Runs the chosen parts within `seconds` in all, and keeps run.json up to date.

    First what may share the GPU, at most `at_once` steps at a time, then one by one what may not.
    """
    started = time.monotonic()
    document: dict[str, Any] = {
        "format": FORMAT,
        "commit": source["commit"],
        "dirty": source["dirty"],
        "sources": sources.of_tree(place.root),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": place.ranks,
        "environment": environment(place.root),
        "parts": [],
    }
    logs = {name: out / f"{name}.log" for name in chosen}
    for log in logs.values():
        log.unlink(missing_ok=True)
    early: dict[str, Outcome] = {}
    told: dict[str, Outcome] = {}

    def left() -> float:
        return seconds - (time.monotonic() - started)

    def found() -> list[Part]:
        now = replace(place, left=left(), chosen=tuple(chosen))
        return [part for part in parts(now) if part.name in chosen]

    def tell(outcome: Outcome) -> None:
        told[outcome.name] = outcome
        document["parts"] = [told[name].to_json() for name in chosen if name in told]
        document["seconds"] = round(time.monotonic() - started, 1)
        partial = out / "run.partial"
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(out / "run.json")
        say(f"{outcome.name}: {outcome.status} in {outcome.seconds:.0f} s")
        for step in outcome.steps:
            if step["status"] != "passed":
                last = str(step.get("why", "")).strip().splitlines()[-1:]
                say(f"  {step['name']}: {step['status']}, exit {step['exit']}: {''.join(last)}")

    def keep(outcome: Outcome) -> None:
        early[outcome.name] = outcome
        if outcome.name not in later:
            tell(outcome)

    whole = found()
    later = [part.name for part in whole if part.only(alone=True).steps]
    first = [part for part in whole if part.only(alone=False).steps or part.name not in later]
    most = {part.name: limits.get(part.name, part.seconds) for part in whole}
    now = {name: min(limit, left()) for name, limit in most.items()}
    run_parts([part.only(alone=False) for part in first], logs, now, at_once, keep)
    for name in later:
        part = next(one for one in found() if one.name == name).only(alone=True)
        before = early.get(name, Outcome(name))
        limit = min(most[name] - before.seconds, left())
        tell(before.and_then(run_part(part, logs[name], limit)))
    return document


def most_at_once(ranks: int, cores: int | None = None) -> int:
    """How many steps may run at a time. Ranks have all GPUs, and wait for each other on them."""
    cores = os.cpu_count() or 1 if cores is None else cores
    return 1 if ranks > 1 else max(1, min(MOST_AT_ONCE, 2 * cores // 3))


def exit_code(document: dict[str, Any]) -> int:
    """0: all passed; 1: one failed or took too long; 3: one could not run here."""
    found = {part["status"] for part in document["parts"]}
    if found & {"failed", "timed out"}:
        return FAILED
    return 0 if found == {"passed"} else UNAVAILABLE


def _end(number: int, _frame: object) -> None:
    """Ends by way of an exception, so that the running step and the files of all are cleared."""
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut that short
    sys.exit(128 + number)


@click.command()
@click.option(
    "--parts",
    "chosen",
    callback=options.names,
    default=",".join(USUAL),
    show_default=True,
    help="With several ranks those of "
    f"{', '.join(options.TOGETHER)} only, by default without backward.",
)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("report/gpu"),
    show_default=True,
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    callback=options.finite,
    default=470.0,
    show_default=True,
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=options.limits,
    metavar="PART=SECONDS",
    help="Another time for one part. May be repeated.",
)
@click.option(
    "--at-once",
    type=click.IntRange(1),
    help="Steps at a time of parts that measure no time. Default: two for three cores, at most "
    f"{MOST_AT_ONCE}; one with several ranks.",
)
@click.option(
    "--commit",
    callback=options.commit,
    help="The commit of which this tree is a copy, 40 hex digits; evidence checks it.",
)
@click.option("--allow-dirty", is_flag=True, help="Measure uncommitted changes; recorded.")
def main(
    chosen: tuple[str, ...],
    ranks: int,
    out: Path,
    seconds: float,
    limits: Mapping[str, float],
    at_once: int | None,
    commit: str | None,
    allow_dirty: bool,
) -> None:
    """Run what needs a GPU, and keep what it measured."""
    default = click.get_current_context().get_parameter_source("chosen")
    chosen = options.of_ranks(chosen, ranks, default=default is ParameterSource.DEFAULT)
    source = source_of(ROOT, commit)
    if source["dirty"] and not allow_dirty:
        click.echo(
            "the tree has uncommitted changes, so that its commit does not say what is measured; "
            "commit them, or say --allow-dirty",
            err=True,
        )
        sys.exit(2)
    present = devices.count()
    if present < ranks:
        click.echo(f"{ranks} ranks need {ranks} CUDA devices, {present} are here", err=True)
        sys.exit(2)
    options.make_usable(out, chosen)
    if source["commit"] == "unknown":
        click.echo("no commit is known, so that this can be no evidence; see --commit", err=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    with tempfile.TemporaryDirectory(prefix="mok-gpu-", ignore_cleanup_errors=True) as raw:
        place = Place(sys.executable, Path(raw), ranks)
        beside = at_once or most_at_once(ranks)
        document = run_all(chosen, place, out, seconds, source, click.echo, limits, beside)
    code = exit_code(document)
    done = ", ".join(f"{part['name']} {part['status']}" for part in document["parts"])
    click.echo(f"commit {document['commit']}, {document['seconds']:.0f} s: {done}; exit {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
