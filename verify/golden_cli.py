"""`verify golden status | update | prune`: the verbs of the folder of goldens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from verify import input_files
from verify.errors import InputFileError
from verify.goldens import DEFAULT_FOLDER
from verify.terminal import TEXT_OR_JSON, emit, epilog, progress

_FOLDER = click.option(
    "--golden",
    "folder",
    type=click.Path(path_type=Path),
    default=DEFAULT_FOLDER,
    show_default=True,
    help="The folder of goldens.",
)


@click.group(
    epilog=epilog(
        "verify golden status my_case.py",
        "verify golden update my_case.py --reason 'sums in fp32 now'",
        "verify golden prune --dry-run",
    )
)
def golden() -> None:
    """Store what cases gave when they were right, and see what is stored."""


@golden.command(epilog=epilog("verify golden status", "verify golden status 'moe/exact-*'"))
@click.argument("targets", nargs=-1)
@_FOLDER
@TEXT_OR_JSON
def status(targets: tuple[str, ...], folder: Path, form: str) -> int:
    """Show what is stored, and what the TARGETS lack. Nothing is executed.

    Exit code 0 when everything is there, 3 when something is missing or unused, 2 when a file
    cannot be read.
    """
    from verify.goldens import status as package

    rows = package.status(targets, folder)
    emit(json.dumps(rows, indent=1) if form == "json" else package.text(rows, folder))
    return package.exit_code(rows)


@golden.command(
    epilog=epilog(
        "verify golden update 'moe/exact-*'",
        "verify golden update checks/layer.py --reason 'bias added before the activation'",
    )
)
@click.argument("targets", nargs=-1, required=True)
@_FOLDER
@click.option("--reason", default="", help="Why goldens change; kept in the index.")
@click.option("--allow-nonfinite", is_flag=True, help="NaN and infinities are meant.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "markdown", "json")),
    help="What is printed on stdout.  [default: text on a terminal, else markdown]",
)
def update(
    targets: tuple[str, ...], folder: Path, reason: str, allow_nonfinite: bool, form: str | None
) -> int:
    """Run the TARGETS and store what they give; prints the table for the pull request.

    Refused: cases that are not VERIFIED on repeat, reference and exact, NaN and infinities, a dirty
    tree or a changed golden without --reason, and CI. Then nothing at all is written.
    """
    from verify.goldens import recording
    from verify.rendering.goldens import page, screen

    rows = recording.update(
        targets, folder, reason=reason, allow_nonfinite=allow_nonfinite, progress=progress()
    )
    if form is None:
        form = "text" if sys.stdout.isatty() else "markdown"
    if form == "json":
        emit(json.dumps(rows, indent=1))
    else:
        emit(screen(rows) if form == "text" else page(rows))
    return 0


@golden.command(epilog=epilog("verify golden prune --dry-run", "verify golden prune"))
@_FOLDER
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(folder: Path, dry_run: bool) -> int:
    """Remove goldens that no case declares any more, and files that no entry names."""
    from verify.goldens import status as package

    if not input_files.exists(folder):
        raise InputFileError(f"{folder}: no such folder of goldens")
    gone = package.prune(folder, dry_run=dry_run)
    what = "would be removed" if dry_run else "removed"
    emit("\n".join([*gone, f"{len(gone)} {what}"]))
    return 0
