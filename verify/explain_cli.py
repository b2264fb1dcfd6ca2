"""`verify trace explain A B`: two recorded runs once more, with the tensors at the culprit kept."""

from __future__ import annotations

import json
from pathlib import Path

import click

from verify.replay_cli import KEEP, TIMEOUT, words, workplace
from verify.terminal import TEXT_OR_JSON, emit, epilog, progress


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog=epilog(
        "verify trace explain run_a/ run_b/ -- python train.py run_a",
        "verify trace explain run_a/ run_b/ --tries 10 --keep tensors/ -- train.py run_a",
        "verify trace explain old/ new/ --a 'old/train.py --seed 0' --b 'new/train.py --seed 0'",
    ),
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--a", "command_a", callback=words, metavar="COMMAND", help="What made A.")
@click.option("--b", "command_b", callback=words, metavar="COMMAND", help="What made B.")
@click.option(
    "--tries",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="How often both are run until they part at the same place.",
)
@TIMEOUT
@KEEP
@TEXT_OR_JSON
def explain(
    a: Path,
    b: Path,
    command: tuple[str, ...],
    command_a: tuple[str, ...],
    command_b: tuple[str, ...],
    tries: int,
    timeout: float,
    keep: Path | None,
    form: str,
) -> int:
    """Run both again with the tensors at the culprit kept, and say how they differ.

    COMMAND made both recordings, or --a and --b made one each: a script of Python or a program.
    It records where this says, whatever folder it names, so A and B stay as they are, and is ended
    behind the culprit's step. Exit code 1 says explained, 3 that they did not part there again.
    """
    from verify.replaying import explain_report
    from verify.replaying.explaining import explain_runs
    from verify.replaying.processes import Script, command_of

    commands = (command_a or command, command_b or command)
    if not all(commands) or (command and command_a and command_b):
        raise click.UsageError(
            "give what made both recordings behind --, or --a COMMAND and --b COMMAND"
        )
    scripts = (
        Script(command_of(commands[0]), timeout),
        Script(command_of(commands[1]), timeout),
    )
    with workplace(keep) as folder:
        found = explain_runs(a, b, scripts, folder.resolve(), tries=tries, progress=progress())
    kept = None if keep is None else str(keep)
    if form == "json":
        emit(json.dumps(explain_report.to_json(found, kept), indent=1))
    else:
        emit(explain_report.text(found, kept))
    return explain_report.exit_code(found)
