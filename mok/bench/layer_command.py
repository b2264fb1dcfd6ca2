"""`mok bench layer` on the command line: options in, document, tables and figures out.

Exit codes: 0 measured, 2 usage or a run that broke off, 3 nothing was measured. Progress goes to
stderr on a terminal only. Refuses to time a CPU on shapes that would take it hours, unless they are
named.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mok.bench.layer import Options

NOTHING_MEASURED = 3
DOCUMENT = "layer.json"
PREVIOUS = "layer.previous.json"
"""What an earlier run left, while ranks that may die before they write have the name."""


class BrokenOffError(click.ClickException):
    """No rank measured anything; click's own errors would exit with 1."""

    exit_code = 2


@dataclass(frozen=True)
class Job:
    """What one rank needs; it must survive pickling."""

    options: Options
    determinism: tuple[str, ...]
    command: str
    target: str  # where rank 0 writes the document
    progress: bool


def _finite(context: click.Context, parameter: click.Parameter, value: float | None) -> Any:
    """FloatRange lets NaN through, and a document cannot hold either."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds; give a finite one, 0 or more.")
    return value


@click.command(epilog="Example: mok bench layer --shape kimi-shard --pair mok,sonicmoe --out bench")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME|T=..,E=..,H=..,I=..,K=..",
    help="May be repeated. Default: the six shapes with known rates; on a CPU the small one.",
)
@click.option("--tokens", type=click.IntRange(1), help="T of each rank instead of the shape's.")
@click.option(
    "--routing",
    default="gaussian",
    show_default=True,
    metavar="gaussian|skewed|FILE",
    help="FILE: safetensors with topk_experts int64 and router_weights fp32, both [T, K].",
)
@click.option("--device", default=None, help="cpu, cuda or cuda:N. Default: cuda where it is.")
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1))
@click.option("--contender", "contenders", multiple=True, help="Time these only. May be repeated.")
@click.option(
    "--direction",
    type=click.Choice(("forward", "backward", "both")),
    help="What to time of every contender. Default: both; of mok on Hopper forward alone where "
    "its backward is the portable one (MOK_HOPPER_BACKWARD).",
)
@click.option("--alone", multiple=True, help="Loop these alone. Default: mok, sonicmoe, torch.")
@click.option("--pair", "pairs", multiple=True, metavar="A,B", help="Alternate two in a loop.")
@click.option(
    "--rounds", default=25, show_default=True, type=click.IntRange(0), help="0: no rotation."
)
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0),
    callback=_finite,
    help="0: no loops.",
)
@click.option("--accuracy/--no-accuracy", default=True, help="Error on the small shape first.")
@click.option(
    "--sample", default=0, type=click.IntRange(0), help="Error of so many tokens of each shape too."
)
@click.option("--gemms", is_flag=True, help="Time peers' grouped GEMMs by themselves too.")
@click.option(
    "--determinism",
    multiple=True,
    type=click.Path(exists=True),
    help="A result.json of verify to quote. May be repeated.",
)
@click.option(
    "--limit",
    type=click.FloatRange(0),
    callback=_finite,
    help="Begin no step after so many seconds.",
)
@click.option(
    "--by-shape", is_flag=True, help="Both protocols of a shape before the next shape's rotation."
)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for document and figures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def layer(as_json: bool, out: str | None, **given: Any) -> None:
    """Time mixture-of-experts layers against peers and ceilings: ms, TFLOP/s, joules, error."""
    from mok.errors import MoKError
    from verify.errors import VerifyError

    try:
        document = _run(given, out)
    except (MoKError, VerifyError) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(document, indent=1))
    else:
        from mok.bench import tables

        click.echo(tables.text(document))
    if out is not None:
        _write_figures(document, Path(out))
    if not document["rows"] and not document["accuracy"]:
        click.echo("nothing measured", err=True)
        sys.exit(NOTHING_MEASURED)
    if document["ended"] != "finished" and not document["ended"].startswith("stopped"):
        click.echo(f"broke off: {document['ended']}", err=True)
        sys.exit(2)


def _run(given: dict[str, Any], out: str | None) -> dict[str, Any]:
    from mok.bench import document, ranks
    from mok.bench.instruments import find_device, open_instruments
    from mok.bench.layer_inputs import check_routing

    job = _job(given, out)
    options = job.options
    ranks.check_ranks(options.ranks, options.device)
    if options.ranks == 1:
        return _measure(job, open_instruments(options.device), ranks.Together())
    # Each rank would say it again, as a traceback, after an earlier document was put aside.
    find_device(options.device)
    for shape in options.shapes:
        check_routing(shape, options.routing, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        target = job.target or str(Path(folder) / DOCUMENT)
        command = Job(options, job.determinism, job.command, target, job.progress)
        kept = _put_aside(Path(target))
        try:
            ranks.spawn(_one_rank, options.ranks, command)
        except Exception as error:
            if not Path(target).exists():
                told = f"; an earlier document is now {kept}" if kept else ""
                raise BrokenOffError(
                    f"no rank measured anything{told}: {_last_line(error)}"
                ) from error
            saved = document.load(Path(target))
            saved["ended"] = f"a rank failed: {_last_line(error)[:300]}"
            document.save(saved, Path(target))
            return saved
        return document.load(Path(target))


def _last_line(error: Exception) -> str:
    """What a rank died of; the lines before are its traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _put_aside(target: Path) -> Path | None:
    """Renames an earlier document, so that nobody takes it for one of this run; its new path."""
    from mok.errors import InputError

    if not target.exists():
        return None
    previous = target.with_name(PREVIOUS)
    try:
        return target.replace(previous)
    except OSError as error:
        raise InputError(
            f"{target} of an earlier run cannot be renamed to {PREVIOUS} "
            f"({error.strerror or error}). Move it, or give another --out."
        ) from error


def _job(given: dict[str, Any], out: str | None) -> Job:
    import torch

    from mok.bench.layer import Options
    from mok.bench.shapes import PEER_SHAPES, parse_shape

    device = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    names = given["shapes"] or (("small",) if device == "cpu" else PEER_SHAPES)
    options = Options(
        # Once each: rows of one name would count twice in every ratio.
        shapes=tuple(dict.fromkeys(parse_shape(name, given["tokens"]) for name in names)),
        routing=given["routing"],
        device=device,
        ranks=given["ranks"],
        rounds=given["rounds"],
        seconds=given["seconds"],
        contenders=tuple(given["contenders"]) or None,
        alone=tuple(dict.fromkeys(given["alone"])) or None,
        pairs=tuple(dict.fromkeys(_pair(text) for text in given["pairs"])),
        accuracy=given["accuracy"],
        sample_tokens=given["sample"],
        gemms=given["gemms"],
        limit=given["limit"],
        direction=given["direction"],
        by_shape=given["by_shape"],
    )
    words = ["mok", *sys.argv[1:]] if sys.argv[1:2] == ["bench"] else ["mok", "bench", "layer"]
    target = "" if out is None else str(Path(out) / DOCUMENT)
    progress = sys.stderr.isatty() and not os.environ.get("CI")
    return Job(options, tuple(given["determinism"]), shlex.join(words), target, progress)


def _pair(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise click.UsageError(
            f"--pair {text!r}; allowed: two different contenders, such as mok,sonicmoe."
        )
    return names[0], names[1]


def _one_rank(rank: int, job: Job) -> None:
    """What a spawned process runs."""
    import torch

    from mok.bench import ranks
    from mok.bench.instruments import open_instruments

    if job.options.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.options.ranks))
    name = f"cuda:{rank}" if job.options.device == "cuda" else job.options.device
    instruments = open_instruments(name)
    together = ranks.join(rank, job.options.ranks, torch.device(name))
    try:
        _measure(job, instruments, together)
    finally:
        ranks.leave()


def _measure(job: Job, instruments: Any, together: Any) -> dict[str, Any]:
    from mok.bench import document, layer
    from mok.bench.contenders import available
    from mok.bench.determinism import read_findings

    listing = available(instruments.device.type)
    paths = [Path(path) for path in job.determinism]
    versions = {entry.name: getattr(entry, "version", None) for entry in listing}
    findings = read_findings(paths, versions, _here(instruments)) if paths else []
    speak = job.progress and together.rank == 0
    say: Callable[[str], None] = (lambda line: click.echo(line, err=True)) if speak else _quiet
    save: Callable[[dict[str, Any]], None] = _keep
    if job.target:
        save = lambda found: document.save(found, Path(job.target))  # noqa: E731
    return layer.measure(
        job.options,
        instruments,
        together,
        listing,
        findings=findings,
        command=job.command,
        say=say,
        save=save,
    )


def _here(instruments: Any) -> Any:
    """What quoted findings are held against."""
    import torch

    from mok.bench.determinism import Here
    from verify.environment import source_state

    kind = instruments.device.type
    gpu = instruments.facts.get("device") if kind == "cuda" else None
    return Here(kind, gpu, str(torch.__version__), source_state(Path.cwd())["commit"])


def _quiet(line: str) -> None:
    """In CI nothing but the result is printed."""


def _keep(found: dict[str, Any]) -> None:
    """Without a folder the document lives until it is printed."""


def _write_figures(document: dict[str, Any], folder: Path) -> None:
    from mok.bench import figures, tables
    from verify import results

    results.write_text(folder / "layer.txt", tables.text(document))
    results.write_text(folder / "layer.md", tables.markdown(document, whole=True))
    for protocol in ("rotation", "alone", "pair"):
        if any(row["protocol"] == protocol for row in document["rows"]):
            results.write_text(folder / f"layer-{protocol}.svg", figures.svg(document, protocol))
