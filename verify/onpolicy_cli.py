"""`verify onpolicy TRAINER ROLLOUT`: why do sampler and trainer disagree?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from verify.onpolicy.live.command import asked, model_options, run
from verify.terminal import TEXT_OR_JSON, emit, epilog, progress, speaks

FILE = click.Path(path_type=Path)


def _versions(
    _context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for one in given:
        name, separator, path = one.partition("=")
        if not (name and separator and path):
            raise click.BadParameter(f"{one!r}; give VERSION=FILE, such as step-41=step41.jsonl")
        if name in found:
            raise click.BadParameter(f"version {name!r} is given twice")
        found[name] = Path(path)
    return found


@click.command(
    epilog=epilog(
        "verify onpolicy trainer.jsonl rollout.jsonl",
        "verify onpolicy train_data_step12.jsonl --html report.html",
        "verify onpolicy trainer.jsonl rollout.jsonl --fail-on 'differing_tokens>0'",
        "verify onpolicy --formats",
        "verify onpolicy --model checkpoint/ --experts mok --tokens 32",
        "verify onpolicy --model model.py::build --dtype bfloat16 --layout padded-left",
    )
)
@click.argument("trainer", type=FILE, required=False)
@click.argument("rollout", type=FILE, required=False)
@click.option(
    "--fail-on",
    "bounds",
    multiple=True,
    metavar="EXPR",
    help="A bound, such as 'abs_p99>0.01' or 'differing_tokens>0'; true is a mismatch.",
)
@click.option("--read-as", metavar="NAME", help="The files' format, if it is not found by itself.")
@click.option("--trainer-again", type=FILE, help="The same tokens scored by the trainer again.")
@click.option(
    "--version",
    "versions",
    multiple=True,
    callback=_versions,
    metavar="VERSION=FILE",
    help="The same tokens scored by other versions of the trainer's weights.",
)
@click.option("--run-config", type=FILE, help="JSON of the sampling parameters that the run set.")
@click.option("--generation-config", type=FILE, help="generation_config.json of the model.")
@click.option("--weights", type=FILE, help="What `verify weights --format json` printed.")
@click.option(
    "--html",
    "page",
    type=FILE,
    metavar="FILE",
    help="Also draw it there: tokens of the worst samples, scatter, positions, layers.",
)
@click.option("--metrics", is_flag=True, help="Print the metrics of verl, slime and others too.")
@click.option("--formats", is_flag=True, help="Print what can be read of each format, and end.")
@model_options
@TEXT_OR_JSON
def onpolicy(
    trainer: Path | None,
    rollout: Path | None,
    bounds: tuple[str, ...],
    read_as: str | None,
    trainer_again: Path | None,
    versions: dict[str, Path],
    run_config: Path | None,
    generation_config: Path | None,
    weights: Path | None,
    page: Path | None,
    metrics: bool,
    formats: bool,
    form: str,
    **live: Any,
) -> int:
    """Say what, where and probably why two log-probabilities of the same token differ.

    TRAINER and ROLLOUT are what the trainer and the sampler dumped, files or folders; one file may
    hold both. Structural faults, such as other tokens, are a mismatch by themselves; noise is
    measured, and judged by --fail-on only. Without such a bound, exit code 3 says that values
    differ and nothing structural was found.

    --model samples with a cache, scores in one pass, alone and in other company (a batch, padding,
    packed, chunks), and names the first module whose bits differ.
    """
    if formats:
        from verify.onpolicy import report_text
        from verify.onpolicy.formats.table import matrix

        emit(json.dumps(matrix(), indent=1) if form == "json" else report_text.formats_text())
        return 0
    evident = (trainer_again, run_config, generation_config, weights, *versions.values())
    looking = asked(live, (trainer, rollout, *evident))
    if trainer is None and not looking:
        raise click.UsageError("give TRAINER and ROLLOUT, or one file that holds both sides")
    from verify.onpolicy import documents, report_text
    from verify.onpolicy.analysing import analyse, evidence_from
    from verify.onpolicy.gates import parse_gate

    gates = [parse_gate(bound) for bound in bounds]
    if page is not None:
        from verify.onpolicy import report_page

        model_file = (live["model"] or "").partition("::")[0] or None
        report_page.refuse(page, trainer, rollout, *evident, model_file, live["save"])
    model = None
    if looking:
        examined = run(live, gates, progress())
        found, model = examined.analysis, examined.report
    else:
        assert trainer is not None
        evidence = evidence_from(
            run_config=run_config,
            generation_config=generation_config,
            weights=weights,
            trainer_again=trainer_again,
            versions=versions,
            read_as=read_as,
        )
        found = analyse(
            trainer, rollout, read_as=read_as, evidence=evidence, gates=gates, progress=progress()
        )
    if form == "json":
        document = documents.to_json(found) | ({} if model is None else {"model": model.to_json()})
        emit(json.dumps(document, indent=1, allow_nan=False))
    else:
        emit(report_text.text(found, metrics=metrics))
        if model is not None:
            emit(model.text())
    if page is not None and speaks():
        report_page.write_page(found, page, "" if model is None else model.text())
    return found.verdict.exit_code
