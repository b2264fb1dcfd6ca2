"""The command `verify`: one verb per question, no nesting; every verb's help ends with examples.

It parses, calls and prints; it decides nothing. Machine output stands alone on stdout, progress and
errors go to stderr. torch is imported only by the verbs that execute something.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from verify import diffs, listing, rendering, reports, results, scaffold
from verify.golden_cli import golden
from verify.onpolicy_cli import onpolicy
from verify.replay_cli import replay
from verify.terminal import TEXT_OR_JSON, Verbs, emit, epilog, fail, progress, speaks
from verify.trace_cli import trace
from verify.weights_cli import weights

_FORMAT = click.option(
    "--format",
    "form",
    type=click.Choice(rendering.FORMATS),
    default="text",
    show_default=True,
    help="What is printed on stdout.",
)
_REPORT = click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write result.json, report.html, report.md and junit.xml there.",
)


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    """`a,b` as a tuple of names; None when the option was not given."""
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise click.BadParameter("give names separated by commas, such as repeat,process")
    return names


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=epilog(
        "verify init my_case.py         write a case file to start from",
        "verify run my_case.py          check it",
        "verify run moe --ranks 4       check the bundled layer on four ranks",
    ),
)
@click.version_option(results.tool_version(), prog_name="mok-verify")
def main() -> None:
    """Is it bit-deterministic? Checks it, and shows the evidence."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # for package.module:case; last, so that nothing here shadows


@main.command(
    epilog=epilog(
        "verify run my_case.py",
        "verify run my_case.py::layer --claims repeat,process --runs 100",
        "verify run package.module:case --format json > result.json",
        "verify run moe --ranks 4 --report report",
        "verify run moe --ranks 2 --device cuda",
    )
)
@click.argument("targets", nargs=-1, required=True)
@click.option(
    "--ranks", type=click.IntRange(1), help="Processes that execute together, not the case's own."
)
@click.option(
    "--runs", type=click.IntRange(1), default=5, show_default=True, help="Per claim and rank."
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Fresh processes for the claim `process`.",
)
@click.option("--claims", callback=_names, metavar="A,B", help="Only these claims.")
@click.option(
    "--device",
    metavar="NAME",
    help="cpu, cuda (rank r on GPU r) or cuda:N, instead of where the case puts its tensors.",
)
@click.option("--seed", type=int, help="Other inputs than the case's own seed gives.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds without progress after which a run is given up.",
)
@_FORMAT
@_REPORT
@click.option("--timings", is_flag=True, help="Print the time of digests and bookkeeping too.")
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare with the goldens there, also for cases that do not promise it by themselves.",
)
def run(
    targets: tuple[str, ...],
    form: str,
    report: Path | None,
    timings: bool,
    **options: Any,
) -> int:
    """Execute cases again and again and compare bits.

    TARGETS are file.py, file.py::case, package.module:case, or names of built-in cases.
    """
    from verify import running

    if report is not None and speaks():
        reports.remove(report)
    try:
        result = running.run(targets, running.RunOptions(**options), progress=progress())
        if report is not None and speaks():
            reports.write(result, report)
        emit(rendering.render(result, form, timings=timings))
    finally:
        running.leave()
    return results.exit_code(result)


@main.command(
    epilog=epilog(
        "verify gate",
        "verify gate --since origin/main --report report",
        "verify gate --config ci/nightly.toml",
    )
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("ci/gate.toml"),
    show_default=True,
    help="Cases, budget, and the sources that they must cover.",
)
@click.option("--since", metavar="REV", help="Changed sources must be covered; their cases first.")
@_FORMAT
@_REPORT
def gate(config: Path, since: str | None, form: str, report: Path | None) -> int:
    """Check the checker, then the cases of ci/gate.toml: what CI runs before a merge.

    Run it from the root of the repository: paths and patterns of the file start there. Controls
    come first. With --since, a changed source that no case covers is UNVERIFIED.

    \b
    The file, TOML; only `cases` is needed:
      cases = ["file.py", "file.py::case", "package.module:case", "moe/exact-*"]
      golden = "golden"         the folder of goldens
      ranks, runs, processes, claims, seed, timeout    as for `verify run`
      require_clean = false     uncommitted changes are UNVERIFIED
      [controls] only = "*"     which planted faults run first
      [sources]  kernels, exempt    patterns of files that need a case, or need none
      [budget]   seconds, executions    affected cases must run within it
    """
    from verify.gates import running

    written = reports.files(report) if report is not None else []
    if report is not None:
        reports.remove(report)
    result = running.run(config, since, written, progress=progress())
    if report is not None:
        reports.write(result, report)
    emit(rendering.render(result, form))
    return results.exit_code(result)


@main.command(
    "list",
    epilog=epilog("verify list", "verify list my_case.py", "verify list moe --format json"),
)
@click.argument("targets", nargs=-1)
@TEXT_OR_JSON
def list_(targets: tuple[str, ...], form: str) -> int:
    """Show cases and the claims that they promise; the built-in ones without TARGETS."""
    entries = listing.entries(targets)
    emit(json.dumps(entries, indent=1) if form == "json" else listing.text(entries))
    return 0 if entries else 3


@main.command(
    epilog=epilog(
        "verify diff before/result.json after/result.json",
        "verify diff a.safetensors b.safetensors",
        "verify diff golden/ build/golden/",
    )
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@TEXT_OR_JSON
def diff(a: Path, b: Path, form: str) -> int:
    """Compare A with B, bit for bit.

    Both are results (a file or a report folder), safetensors files, or folders of these.
    Exit code 0 says equal, 1 different, 3 that something could not be compared, or that outputs are
    equal but neither run was verified.
    """
    found = diffs.diff(a, b)
    emit(json.dumps(diffs.to_json(found), indent=1) if form == "json" else diffs.text(found))
    return diffs.exit_code(found)


@main.command(
    epilog=epilog(
        "verify controls",
        "verify controls --list",
        "verify controls --only 'memory*'",
        "verify controls --only reason/input-mutated --disable input-mutated",
    )
)
@click.option("--only", metavar="GLOB", help="Only the controls with such names.")
@click.option(
    "--disable", metavar="NAME", help="Switch a detector off: exactly its controls must fail then."
)
@click.option("--list", "listed", is_flag=True, help="Only print their names.")
@TEXT_OR_JSON
def controls(
    only: str | None,
    disable: str | None,
    listed: bool,
    form: str,
) -> int:
    """Check the checker: every planted fault must be caught, every clean twin must pass."""
    from verify import controls as package

    names = package.names(only)
    if not names:
        fail(f"no control matches {only!r}; `verify controls --list` prints them")
        return 3
    if listed:
        emit(json.dumps(names, indent=1) if form == "json" else package.listing(names))
        return 0
    outcome = package.run(names, disable, progress=progress())
    emit(json.dumps(outcome, indent=1) if form == "json" else package.text(outcome))
    return int(outcome["exit_code"])


@main.command(
    epilog=epilog(
        "verify report report/",
        "verify report report/ --exit-code",
        "verify report result.json --format markdown",
    )
)
@click.argument("path", type=click.Path(path_type=Path))
@_FORMAT
@click.option("--timings", is_flag=True, help="Print the time of digests and bookkeeping too.")
@click.option("--exit-code", "real", is_flag=True, help="End with the exit code of the run.")
def report(
    path: Path,
    form: str,
    timings: bool,
    real: bool,
) -> int:
    """Draw a result again, from a file or the folder that holds it.

    Ends with 0 once drawn; --exit-code gives the run's own, as after torchrun, which turns every
    code into 1.
    """
    result = results.read(path)
    emit(rendering.render(result, form, timings=timings))
    return results.exit_code(result) if real else 0


@main.command(epilog=epilog("verify env", "verify env --format json"))
@TEXT_OR_JSON
def env(form: str) -> int:
    """Show the environment record that goes into every result."""
    from verify.environment import environment

    record = environment()
    emit(json.dumps(record, indent=1) if form == "json" else listing.record(record))
    return 0


@main.command(epilog=epilog("verify init", "verify init checks/attention.py"))
@click.argument("path", type=click.Path(path_type=Path), default=Path("my_case.py"))
def init(path: Path) -> int:
    """Write a commented case file that runs as it is (my_case.py without PATH)."""
    emit(scaffold.init(path))
    return 0


main.add_command(golden)
main.add_command(onpolicy)
main.add_command(replay)
main.add_command(trace)
main.add_command(weights)


def entry(arguments: Sequence[str] | None = None) -> None:
    """What `python -m verify` runs; it ends the process, as the console script does."""
    main(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="verify")
