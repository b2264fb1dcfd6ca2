"""The command line `mok`: benchmarks and the environment.

Exit codes: 0 done, 2 usage or tool error, 3 nothing was measured. Refuses to judge speed: a ratio
above the goal is printed, not failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import click
from tabulate import tabulate

NOTHING_MEASURED = 3

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(epilog="Exit codes: 0 done, 2 usage or tool error, 3 nothing was measured.")
def main() -> None:
    """A mixture-of-experts layer that gives the same bits every time."""


@main.group()
def bench() -> None:
    """Measure speed. Each benchmark states its protocol and machine."""


@bench.command(epilog="Example: mok bench portable --rounds 31 --json")
@click.option("--rounds", default=15, show_default=True, help="Timed rounds per contender.")
@click.option("--tokens", default=1024, show_default=True, help="T, tokens.")
@_JSON
def portable(rounds: int, tokens: int, as_json: bool) -> None:
    """Portable forward against a plain loop over experts with whole GEMMs."""
    from mok.bench import portable as benchmark

    _report(lambda: benchmark.measure(tokens=tokens, rounds=rounds), as_json)


@bench.command(epilog="Example: mok bench digest --megabytes 64")
@click.option("--rounds", default=5, show_default=True, help="Timed rounds per contender.")
@click.option("--megabytes", default=256, show_default=True, help="Size of the tensor.")
@_JSON
def digest(rounds: int, megabytes: int, as_json: bool) -> None:
    """GB/s of verify's digest on one core, by dtype, beside torch.hash_tensor and a plain read."""
    from mok.bench import digest as benchmark

    _report(lambda: benchmark.measure(megabytes=megabytes, rounds=rounds), as_json)


@main.command(epilog="Example: mok env --json")
@_JSON
def env(as_json: bool) -> None:
    """Which backend would run here, and why."""
    from mok.environment import describe

    facts = describe()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(tabulate(list(facts.items()), tablefmt="plain"))


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
        shown = f"{value:.3f}" if isinstance(value, float) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{key}={item}" for key, item in value.items())
        click.echo(f"{name}: {shown}")
