"""`verify trace show | diff | export`: the verbs of recordings that `verify.record` made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from verify.explain_cli import explain
from verify.terminal import TEXT_OR_JSON, emit, epilog, fail, speaks

_LONGEST_STEP = 18  # digits


def _range(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    """`a:b`, `a:`, `:b` or `a` as (from, up to but not including); (None, None) for all."""
    if value is None:
        return None, None
    parts = value.split(":")
    numbers = [part.strip() for part in parts]
    if len(parts) > 2 or not any(numbers) or not all(map(_is_step, numbers)):
        raise click.BadParameter(
            f"{value!r} is no range of steps; give 10:20 (10 to 19), 10:, :20 or 10; "
            "the state before the first step is -1"
        )
    low, high = (int(numbers[0]) if numbers[0] else None), None
    if len(numbers) == 1:
        high = int(numbers[0]) + 1
    elif numbers[1]:
        high = int(numbers[1])
    if low is not None and high is not None and high <= low:
        raise click.BadParameter(f"{value!r} holds no step; the end is not part of a range")
    return low, high


def _is_step(text: str) -> bool:
    digits = text.removeprefix("-")
    return not text or (digits.isascii() and digits.isdigit() and len(digits) <= _LONGEST_STEP)


_STEPS = click.option(
    "--steps",
    callback=_range,
    metavar="A:B",
    help="Only steps from A up to but not including B; either may be left out. Or one step: A.",
)


@click.group(
    epilog=epilog(
        "verify trace diff run_a/ run_b/",
        "verify trace show run_a/",
        "verify trace export run_a/ jsonl/",
    )
)
def trace() -> None:
    """Find where two recorded runs part.

    Record each with `with verify.record(FOLDER, model):` around its training loop.
    """


@trace.command(epilog=epilog("verify trace show run_a/", "verify trace show run_a/ --steps 3"))
@click.argument("path", type=click.Path(path_type=Path))
@_STEPS
@TEXT_OR_JSON
def show(path: Path, steps: tuple[int | None, int | None], form: str) -> int:
    """Show what a recording holds; with --steps, every event of these.

    PATH is the folder of a run, or the file of one rank. Exit code 3 when a rank or the end of a
    file is missing, as after a run that was killed, or when an exception ended it.
    """
    from verify.tracing import showing
    from verify.tracing.files import read_folder

    run = read_folder(path)
    chosen = steps != (None, None)
    if form == "json":
        shown = showing.overview(run)
        emit(json.dumps({**shown, "events": list(showing.events(run, steps))} if chosen else shown))
    else:
        emit("\n".join(showing.event_text(run, steps)) if chosen else showing.text(run))
    return showing.exit_code(run, path.is_file())


@trace.command(
    epilog=epilog(
        "verify trace diff run_a/ run_b/",
        "verify trace diff run_a/ run_b/ --html diff.html",
        "verify trace diff run_a/ run_b/ --steps 100:200",
        "verify trace diff run_a/rank-00003.trace run_b/rank-00003.trace --format json",
    )
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@_STEPS
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw it there: ranks and modules over steps, and the first step that differs.",
)
@TEXT_OR_JSON
def diff(
    a: Path, b: Path, steps: tuple[int | None, int | None], page: Path | None, form: str
) -> int:
    """Find the first event that differs between two recordings, and what caused it.

    A and B are folders of runs, or files of one rank. Runs on other numbers of ranks are compared
    by sums over the ranks. Exit code 0 says equal, 1 different, 3 that nothing differs but
    something is missing, or that nothing could be compared.
    """
    from verify.tracing import documents, trace_text
    from verify.tracing.divergence import diff as compare

    if page is not None:
        from verify.tracing import timeline_page

        timeline_page.refuse(page, a, b)
    found = compare(a, b, steps)
    emit(
        json.dumps(documents.to_json(found), indent=1) if form == "json" else trace_text.text(found)
    )
    if page is not None and speaks():
        timeline_page.write_page(found, a, b, page)
    return documents.exit_code(found)


@trace.command(
    epilog=epilog(
        "verify trace export run_a/ jsonl/",
        "verify trace export run_a/ jsonl/ --steps :10",
    )
)
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@_STEPS
def export(path: Path, out: Path, steps: tuple[int | None, int | None]) -> int:
    """Write a recording as JSON lines, in the format of Megatron-LM's tracer.

    One file a rank, OUT/rank_000000.jsonl; none is written over. Lines say that no values were
    observed, and carry our digest as metadata. Exit code 3 when the recording is incomplete.
    """
    from verify.rendering.phrases import number
    from verify.tracing import showing
    from verify.tracing.export import export as write
    from verify.tracing.files import read_folder

    run = read_folder(path)
    count = write(run, out, steps)
    if not count:
        fail(f"{path}: holds no event of these steps; the files written are empty")
        return 3
    emit(f"{number(len(run), 'file')}, {count:,} lines")
    return showing.exit_code(run, path.is_file())


trace.add_command(explain)
