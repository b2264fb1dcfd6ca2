"""The command line `mok`: kernels compiled ahead, benchmarks and the environment.

Exit codes: 0 done, 1 a kernel is not clean, 2 usage or tool error, 3 nothing was measured or
compiled. Refuses to judge speed: a ratio above the goal is printed, not failed.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click
from tabulate import tabulate

from mok.bench.layer_command import layer
from mok.bench.tuning_command import tune

NOT_CLEAN = 1
TOOL_ERROR = 2
NOTHING_MEASURED = 3

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


class _Commands(click.Group):
    """A group whose commands end with 2 when what they say or keep cannot be written."""

    def invoke(self, ctx: click.Context) -> Any:
        """As click's; a full disk or a closed pipe becomes one line instead of a traceback."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            _drop_output()
            if error.errno != errno.EPIPE:  # a reader that has enough, such as head, is no news
                click.echo(f"error: writing failed: {error.strerror}", err=True)
            sys.exit(TOOL_ERROR)


def _drop_output() -> None:
    """What stdout holds and cannot write, so that the interpreter does not complain at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@click.group(
    cls=_Commands,
    epilog="Exit codes: 0 done, 1 a kernel is not clean, 2 usage or tool error, "
    "3 nothing was measured or compiled.",
)
def main() -> None:
    """A mixture-of-experts layer that gives the same bits every time."""


@main.group()
def bench() -> None:
    """Measure speed. Each benchmark states its protocol and machine."""


bench.add_command(layer)
bench.add_command(tune)


@bench.command(epilog="Example: mok bench portable --rounds 31 --json")
@click.option("--rounds", default=15, show_default=True, help="Timed rounds per contender.")
@click.option("--tokens", default=1024, show_default=True, help="T, tokens.")
@_JSON
def portable(rounds: int, tokens: int, as_json: bool) -> None:
    """Portable forward against a plain loop over experts with whole GEMMs."""
    from mok.bench import portable as benchmark

    _report(lambda: benchmark.measure(tokens=tokens, rounds=rounds), as_json)


@bench.command(epilog="Example: mok bench digest --megabytes 64")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), help="Turns per contender [5; cuda: 15].")
@click.option("--megabytes", type=click.IntRange(min=1), help="Size [256; cuda: 2048].")
@_JSON
def digest(device: str, rounds: int | None, megabytes: int | None, as_json: bool) -> None:
    """Speed of verify's digest by dtype, beside torch.hash_tensor and a plain read.

    On one core (GB/s), or on a CUDA device (TB/s) with the host time of a prepared plan.
    """
    given = {"rounds": rounds, "megabytes": megabytes}
    chosen = {name: value for name, value in given.items() if value is not None}

    def measure() -> dict[str, object]:
        from mok.bench import digest as on_host
        from mok.bench import digest_cuda as on_device

        return (on_device if device == "cuda" else on_host).measure(**chosen)

    _report(measure, as_json)


@main.command(epilog="Example: mok build --arch sm_90a --arch sm_100a --json")
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    default=("sm_90a",),
    show_default=True,
    help="Architecture to compile for; more than one may be given.",
)
@click.option("--no-cache", is_flag=True, help="Neither read nor write the kernel cache.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; one per core if not given.")
@_JSON
def build(architectures: tuple[str, ...], no_cache: bool, jobs: int | None, as_json: bool) -> None:
    """Compile every kernel, without a GPU; fail on spills and on what ptxas warns of."""
    from mok import building, kernels
    from mok.toolchain import JitError

    asked = len(dict.fromkeys(architectures)) * len(kernels.CATALOGUE)
    quiet = as_json or not sys.stderr.isatty() or bool(os.environ.get("CI"))
    try:
        with click.progressbar(
            length=asked, label="compiling", file=sys.stderr, hidden=quiet
        ) as bar:
            result = building.build(
                architectures, cache=not no_cache, jobs=jobs, progress=lambda _: bar.update(1)
            )
        described = building.describe_build(result)
    except JitError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(TOOL_ERROR)
    click.echo(json.dumps(described, indent=2) if as_json else _build_table(described))
    if not result.built:
        click.echo(f"nothing was compiled for {', '.join(architectures)}", err=True)
        sys.exit(NOTHING_MEASURED)
    sys.exit(0 if result.clean else NOT_CLEAN)


@main.command(epilog="Example: mok env --json")
@_JSON
def env(as_json: bool) -> None:
    """Which backend would run here, and why."""
    from mok.environment import describe

    facts = describe()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    rows = [(name, _shown(value)) for name, value in facts.items()]
    click.echo(tabulate(rows, tablefmt="plain", maxcolwidths=[None, 100]))


def _report(measure: Callable[[], dict[str, object]], as_json: bool) -> None:
    try:
        result = measure()
    except ImportError as error:
        click.echo(f"nothing measured: {error}", err=True)
        sys.exit(NOTHING_MEASURED)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _print_table(result)
    if not result.get("measured"):
        click.echo("nothing measured", err=True)
        sys.exit(NOTHING_MEASURED)


def _print_table(result: dict[str, object]) -> None:
    rows = result.get("rows")
    if isinstance(rows, list) and rows:
        click.echo(tabulate(rows, headers="keys", floatfmt=".2f", missingval="unsupported"))
    for name, value in result.items():
        if name in ("rows", "measured"):
            continue
        shown = f"{value:.3f}" if isinstance(value, float) else _shown(value)
        click.echo(f"{name}: {shown}")


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return value


_COLUMNS = {
    "source": "source",
    "kernel": "kernel",
    "macros": "macros",
    "arch": "arch",
    "registers": "registers",
    "static_shared": "shared",
    "dynamic_shared": "+ dynamic",
    "stack": "stack",
    "spill_stores": "spilled",
    "spill_loads": "reloaded",
    "seconds": "seconds",
}


def _build_table(described: dict[str, Any]) -> str:
    """The kernels with sizes in bytes, then what was skipped, noted and found, then the verdict."""
    kernels = described["kernels"]
    rows = [{title: row[name] for name, title in _COLUMNS.items()} for row in kernels]
    lines = [tabulate(rows, headers="keys", floatfmt=".2f")] if rows else []
    for one in described["skipped"]:
        needs = " or ".join(one["needs"])
        lines.append(f"skipped: {one['variant']} for {one['arch']}, it needs {needs}")
    for one in described["notes"]:
        lines.append(f"note: {one['variant']} ({one['arch']}): {one['note']}")
    for one in described["findings"]:
        kind = f"planted ({one['allowed']})" if "allowed" in one else "FINDING"
        lines.append(f"{kind}: {one['variant']} ({one['arch']}): {one['finding']}")
    found = sum("allowed" not in one for one in described["findings"])
    verdict = "clean" if described["clean"] else "NOT CLEAN"
    lines.append(
        f"{verdict}: {len(kernels)} kernels, {found} findings, {len(described['skipped'])} skipped;"
        f" NVRTC {described['nvrtc']}; sizes in bytes"
    )
    return "\n".join(lines)
