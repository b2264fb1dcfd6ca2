"""`verify replay SCRIPT`: does a training script repeat itself, and does it resume as it should?"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from verify.interrupts import interrupts_held
from verify.terminal import TEXT_OR_JSON, emit, epilog, progress


def words(_context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """The words of a text as a shell reads them."""
    if value is None:
        return ()
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} cannot be split into words: {error}", param=parameter
        ) from None


@contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for recordings: `keep`, which must be new or empty, or one that is removed again."""
    if keep is not None:
        if keep.is_dir() and not any(keep.iterdir()):
            yield keep
            return
        try:
            keep.mkdir(parents=True)
        except OSError as error:
            raise click.BadParameter(
                f"{keep} cannot be made ({error.strerror}): give a folder that is new or empty",
                param_hint="--keep",
            ) from error
        yield keep
        return
    folder: Path | None = None
    try:
        with interrupts_held():
            folder = Path(tempfile.mkdtemp(prefix="verify-"))
        yield folder
    finally:
        if folder is not None:
            with interrupts_held():
                shutil.rmtree(folder, ignore_errors=True)


KEEP = click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Leave recordings and what the runs printed there; new or empty.",
)
TIMEOUT = click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds without a step after which a run is ended.",
)


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog=epilog(
        "verify replay train.py --no-resume",
        'verify replay train.py --out {run} --resume-args "--resume {run}/last.pt"',
        "verify replay --stop-after 5 --format json -- train.py --out {run} --format bf16",
        "verify replay train.py --out {run} --again-args --no-validation",
        "verify replay torchrun --nproc-per-node 2 train.py --out {run}",
    ),
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--stop-after",
    type=click.IntRange(1),
    metavar="N",
    help="Steps before the run that is resumed is stopped. Half of all without it.",
)
@click.option(
    "--resume-args",
    callback=words,
    metavar="ARGS",
    help="What the resumed run gets besides; nothing for a script that finds its checkpoint.",
)
@click.option("--no-resume", is_flag=True, help="Only run it twice.")
@click.option(
    "--again-args",
    callback=words,
    metavar="ARGS",
    help="What the second run gets besides: a flag that must not change the training.",
)
@TIMEOUT
@KEEP
@TEXT_OR_JSON
def replay(
    script: str,
    arguments: tuple[str, ...],
    stop_after: int | None,
    resume_args: tuple[str, ...],
    no_resume: bool,
    again_args: tuple[str, ...],
    timeout: float,
    keep: Path | None,
    form: str,
) -> int:
    """Run a training script afresh twice, and once stopped and resumed, and compare all.

    SCRIPT is a file of Python, or a program such as torchrun. Options that are not known here are
    the script's; behind -- all are. Around its training loop, behind loading a checkpoint, it has

    \b
      with verify.record("run", model, optimizer):

    which records where replay says. It saves checkpoints as it always does. {run} in an argument,
    and the variable VERIFY_RUN, is a folder that each run has to itself; the resumed run has that
    of the stopped one, which is stopped when the step behind the last is about to change weights.
    Where it goes on is found by its state. What the script prints is not shown.

    What is in neither the model nor an optimizer, such as averaged weights or a loss scaler, is
    compared as far as it shows in them, or if the script gives it to verify.probe in each step.
    """
    from verify.replaying import replay_report
    from verify.replaying.processes import command_of
    from verify.replaying.replays import ReplayOptions, run

    if no_resume and (resume_args or stop_after is not None):
        raise click.UsageError("--no-resume leaves --resume-args and --stop-after without a run")
    options = ReplayOptions(
        command_of((script, *arguments)),
        again_args,
        resume_args,
        stop_after,
        not no_resume,
        timeout,
    )
    with workplace(keep) as folder:
        found = run(options, folder.resolve(), progress())
    kept = None if keep is None else str(keep)
    if form == "json":
        emit(json.dumps(replay_report.to_json(found, kept), indent=1))
    else:
        emit(replay_report.text(found, kept))
    return replay_report.exit_code(found)
