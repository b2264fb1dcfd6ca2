"""`mok bench tune` on the command line: shapes in, a table of knobs out, and what was measured.

The table is written whole at the end, or not at all: a run that breaks off, or in which knobs
changed bits, leaves it as it was. An entry is written where knobs beat the defaults; an entry of
this GPU that an earlier run wrote is measured again, and taken away where it no longer does.
Exit codes: 0 measured, 1 bits differ, 2 usage or a run that broke off, 3 nothing was measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tabulate import tabulate

if TYPE_CHECKING:
    from mok.bench.instruments import Instruments
    from mok.bench.shapes import Shape
    from mok.bench.tuning import Outcome
    from mok.hopper.tuned import Entry, Key

BITS_DIFFER = 1
BROKEN_OFF = 2
NOTHING_MEASURED = 3


@dataclass(frozen=True)
class Job:
    """What to tune and where it goes. keys: of the shapes, in their order."""

    shapes: tuple[Shape, ...]
    keys: tuple[Key, ...]
    seconds: float
    target: Path


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """FloatRange lets NaN through."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds; give a finite one.")
    return value


@click.command(
    epilog="Example: mok bench tune --shape kimi-shard --shape T=16384,E=64,H=4096,I=1536,K=8 "
    "--out tuned.json. Exit codes: 0 measured, 1 bits differ, 2 usage or tool error, 3 nothing "
    "was measured."
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME|T=..,E=..,H=..,I=..,K=..",
    help="May be repeated. Default: the six shapes of mok bench layer. E: experts of one GPU.",
)
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N.")
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1, 600),
    callback=_finite,
    help="Of each loop; about ten loops a shape.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Table to write. Default: the user's, MOK_TUNED or ~/.config/mok/tuned.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune(
    shapes: tuple[str, ...], device: str, seconds: float, out: Path | None, as_json: bool
) -> None:
    """Measure knobs of the Hopper forward beside the defaults; write those that beat them.

    Knobs change speed and never bits: bits are compared before and after every loop. The table is
    read by every process that starts afterwards, on one rank, where no knob is given.
    """
    from mok.bench.protocols import ContenderFailed
    from mok.bench.tuning import BitsDiffer
    from mok.errors import InputError, MoKError
    from verify.errors import VerifyError

    try:
        _require_hopper(device)
        instruments, job = _prepared(shapes, device, seconds, out)
        document = run(job, instruments, _opener(instruments), say=_progress())
    except BitsDiffer as error:
        click.echo(f"BITS DIFFER, nothing was written: {error}", err=True)
        sys.exit(BITS_DIFFER)
    except InputError as error:
        raise click.UsageError(str(error)) from error
    except (MoKError, VerifyError, ContenderFailed, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        click.echo(f"broke off, nothing was written: {said[0][:500]}", err=True)
        sys.exit(BROKEN_OFF)
    click.echo(json.dumps(document, indent=1) if as_json else text(document))
    if not any(one["decided"] for one in document["shapes"]):
        click.echo("nothing measured for long enough", err=True)
        sys.exit(NOTHING_MEASURED)


def run(
    job: Job,
    instruments: Instruments,
    opener_of: Callable[[Shape], Callable[..., Any]],
    *,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Tunes every shape, then writes the table; what was found, JSON-ready.

    Raises BitsDiffer, InputError for a table that is there and wrong, and what a launch raises;
    the table is then as it was.
    """
    from mok.bench.tuning import described, tune
    from mok.hopper.tuned import read_table

    _require_writable(job.target)
    before = read_table(job.target, must_exist=False)
    sms = int(str(instruments.facts["multiprocessors"]))
    outcomes = []
    for shape, key in zip(job.shapes, job.keys, strict=True):
        earlier = before.get(key)
        outcomes.append(
            tune(
                shape,
                instruments,
                opener_of(shape),
                sms=sms,
                seconds=job.seconds,
                earlier=None if earlier is None else earlier.choice,
                say=say,
            )
        )
        instruments.release()
    changes = _keep(job, outcomes)
    return {
        "machine": dict(instruments.facts),
        "protocol": "candidate and defaults in turn in one loop, medians; ratio above 1: faster",
        "seconds_a_loop": job.seconds,
        **_origin(),
        "table": str(job.target),
        "changes": changes,
        "shapes": [described(outcome) for outcome in outcomes],
    }


def _require_writable(target: Path) -> None:
    """Before minutes of measuring, not after them."""
    from mok.errors import InputError

    folder = next(one for one in target.resolve().parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"table {target}: {folder} is no folder that can be written to; allowed: one that is. "
            "Give another --out FILE."
        )


def _keep(job: Job, outcomes: Sequence[Outcome]) -> list[str]:
    """Writes what was found into the table, if that changes it; what changed, by shape."""
    from mok.hopper.tuned import Entry, read_table, table_text
    from verify import results

    # Read again: another run may have written other shapes meanwhile.
    entries: dict[Key, Entry] = dict(read_table(job.target, must_exist=False))
    changes = []
    for key, outcome in zip(job.keys, outcomes, strict=True):
        if outcome.chosen is not None and outcome.ratio is not None:
            entries[key] = Entry(key, outcome.chosen, outcome.ratio, **_origin())
            changes.append(f"{outcome.shape.name}: {outcome.chosen}")
        elif outcome.decided and entries.pop(key, None) is not None:
            changes.append(f"{outcome.shape.name}: entry taken away, {outcome.why}")
    if changes:
        # A link stays one: what it leads to is replaced.
        results.write_text(job.target.resolve(), table_text(entries.values()))
    return changes


def _origin() -> dict[str, Any]:
    """Version, commit and date of what measured."""
    from mok.kernel_sources import source_root
    from verify.environment import source_state

    try:
        version = importlib.metadata.version("mok-verify")
    except importlib.metadata.PackageNotFoundError:
        version = "uninstalled"
    state = source_state(source_root())
    commit = state["commit"]
    if commit is not None and state["dirty"]:
        commit += "+"  # sources that no commit holds
    return {"version": version, "commit": commit, "date": datetime.now(UTC).date().isoformat()}


def _require_hopper(device: str) -> None:
    """Ends with 3 where no Hopper kernel can run."""
    import torch

    from mok.bench.instruments import find_device
    from mok.hopper.support import device_problem

    missing = device.startswith("cuda") and not torch.cuda.is_available()
    problem = device_problem(torch.device("cuda") if missing else find_device(device))
    if problem is not None:
        click.echo(f"nothing measured: the Hopper backend cannot run here: {problem}", err=True)
        sys.exit(NOTHING_MEASURED)


def _prepared(
    names: Sequence[str], device: str, seconds: float, out: Path | None
) -> tuple[Instruments, Job]:
    from mok.bench.instruments import open_instruments
    from mok.bench.shapes import PEER_SHAPES, parse_shape
    from mok.hopper.tuned import user_table

    shapes = [parse_shape(name) for name in names or PEER_SHAPES]
    target = user_table() if out is None else out
    if target is None:
        raise click.UsageError("there is no home folder to keep a table in; give --out FILE.")
    instruments = open_instruments(device)
    job = make_job(shapes, str(instruments.facts["device"]), seconds, target)
    return instruments, job


def make_job(shapes: Sequence[Shape], gpu: str, seconds: float, target: Path) -> Job:
    """Raises InputError for a shape that the kernel cannot run, or two that share an entry."""
    from mok.bench.tuning import sizes_of
    from mok.errors import InputError
    from mok.hopper.tuned import key_of

    by_key: dict[Key, Shape] = {}
    for shape in shapes:
        key = key_of(gpu, sizes_of(shape))
        other = by_key.setdefault(key, shape)
        if other != shape:
            raise InputError(
                f"shapes {other.name} and {shape.name} have the same E, H, I, K and T up to "
                f"{key.T}; allowed: one shape for an entry of the table. Leave one out."
            )
    return Job(tuple(by_key.values()), tuple(by_key), seconds, target)


def _opener(instruments: Instruments) -> Callable[[Shape], Callable[..., Any]]:
    from mok.bench.tuning import hopper_opener

    return lambda shape: hopper_opener(shape, instruments.device)


def _progress() -> Callable[[str], None]:
    """On a terminal only; in CI nothing but the result is printed."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        return lambda line: None
    return lambda line: click.echo(line, err=True)


def text(document: Mapping[str, Any]) -> str:
    """The document as tables."""
    blocks = []
    for shape in document["shapes"]:
        rows = [{"knobs": "defaults again", **_times(shape["noise"])}]
        rows += [
            {"knobs": _knobs(one), **_times(one), "": "better" if one["better"] else ""}
            for one in shape["tried"]
        ]
        if shape["repeated"] is not None:
            rows.append({"knobs": "the best once more", **_times(shape["repeated"])})
        title = f"{shape['shape']}: {shape['why']}; defaults are {_knobs(shape['defaults'])}"
        blocks.append(f"{title}\n{tabulate(rows, headers='keys', floatfmt='.3f')}")
    blocks.append(f"{document['machine'].get('device')}; {document['protocol']}")
    blocks += document["changes"]
    written = "written to" if document["changes"] else "nothing to write to"
    blocks.append(f"{written} {document['table']}")
    return "\n\n".join(blocks)


def _times(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ratio": found["ratio"],
        "p10": found["low"],
        "p90": found["high"],
        "ms": found["other_ms"],
        "defaults' ms": found["first_ms"],
        "calls": found["turns"],
    }


def _knobs(given: Mapping[str, int]) -> str:
    sms = f", {given['num_sms']} SMs" if given["num_sms"] else ""
    return f"{given['least']} to {given['most']} blocks{sms}"
