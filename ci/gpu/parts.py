"""The parts of ci/gpu.sh: which commands each has, and the run of all into run.json.

Parts run one after another, each within its own time. What a part leaves is written at once, so
that a run that is cut short keeps what it had.
"""

from __future__ import annotations

import importlib.metadata
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import options  # all three beside this file
import sources
from options import NAMES
from steps import ROOT, Part, Step, run_part

from verify import devices
from verify.environment import environment, source_state

FORMAT = "mok-verify-gpu-run-v1"
FAILED, UNAVAILABLE = 1, 3
# what compute-sanitizer prints, with exit code 1, on a device or a driver that it does not know
NO_SANITIZER = ("Device not supported", "Unable to find injection library")


@dataclass(frozen=True)
class Place:
    """What the commands need to know: interpreter, folder for their files, ranks."""

    python: str
    raw: Path
    ranks: int = 1
    root: Path = ROOT

    def verify(self, name: str, *words: str, good: Sequence[int] = (0,)) -> Step:
        """A run of `verify`, whose result document is kept."""
        report = self.raw / name
        command = [self.python, "-m", "verify", "run", *words, "--report", str(report)]
        return Step(name, command, str(report / "result.json"), good)

    def mok(self, name: str, *words: str) -> Step:
        """A benchmark of `mok` that prints its document."""
        code = "import sys; from mok.cli import main; sys.exit(main())"
        return Step(name, [self.python, "-c", code, *words, "--json"], "-", unavailable=(3,))


def parts(place: Place) -> list[Part]:
    """All parts, in the order in which they run. Peers come before the benchmark that quotes it."""
    python, raw = place.python, place.raw
    return [
        Part("tests", 120, [_tests(place)]),
        Part("digest", 60, [place.mok("digest", "bench", "digest", "--device", "cuda")]),
        Part(
            "faults",
            100,
            [
                Step(
                    "faults",
                    [python, "ci/gpu/faults.py", "--json", str(raw / "faults.json")],
                    str(raw / "faults.json"),
                    unavailable=(3,),
                )
            ],
        ),
        Part("verify", 150, _layer(place)),
        Part("peers", 240, _peers(place)),
        Part("bench", 215, _bench(place)),
        Part("sanitize", 120, _sanitize(place)),
    ]


def _tests(place: Place) -> Step:
    """GPU tests only; the plugin is named where the package is not installed, only on the path."""
    files = sorted(
        str(path.relative_to(place.root))
        for path in (place.root / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8")
    )
    known = [one.name for one in importlib.metadata.entry_points(group="pytest11")]
    plugin = [] if "mok_verify" in known else ["-p", "_mok_verify_pytest"]
    quiet = ["-p", "no:benchmark", "-p", "no:cacheprovider", "-q"]
    chosen = ["-m", "gpu or gpus", "--junitxml", str(place.raw / "tests.xml")]
    command = [place.python, "-m", "pytest", *plugin, *quiet, *chosen, *files]
    return Step("pytest", command, str(place.raw / "tests.xml"), needs=" passed")


def _layer(place: Place) -> list[Step]:
    """The bundled layer on the GPU: with every promise, on ranks of their own GPUs or sharing one.

    One rank alone has no degree and no other rank to compare with, so that the claims `ep` and
    `rank` come from four ranks that share the GPU.
    """
    if place.ranks > 1:
        many = ("--ranks", str(place.ranks), "--device", "cuda")
        return [
            place.verify("layer", "moe", *many),
            place.verify("float64", "moe/float64-*", *many),
        ]
    one = ("--ranks", "1", "--device", "cuda")
    claims = "repeat,process,memory,threads,history,contention,batch,schedule,reference"
    return [
        place.verify("layer", "verify.builtin.moe:moe", *one, "--claims", claims),
        place.verify("exact", "moe/exact-*", *one, "--claims", "repeat,exact"),
        place.verify("float64", "moe/float64-*", *one),
        place.verify("shared", "moe", "--device", "cuda"),
    ]


PEER_CASES = (
    "sonicmoe/tiles",
    "liger/small",
    "sonicmoe/small",
    "torch/small",
    "huggingface/small",
    "deepgemm/small",
    "sonicmoe/qwen3-30b",
)
"""In the order of what they can show: when the time is up, the last ones have not run."""


def _peers(place: Place) -> list[Step]:
    """A peer that is not deterministic is a finding, not a failure; so is one that is missing."""
    words = ["--device", "cuda", "--runs", "20"]
    if place.ranks > 1:
        words += ["--ranks", str(place.ranks)]
        return [place.verify("peers", "ci/gpu/peer_rank_cases.py", *words, good=(0, 1, 3))]
    return [
        place.verify(
            f"peers-{name.replace('/', '-')}",
            f"ci/gpu/peer_cases.py::peers/{name}",
            *words,
            good=(0, 1, 3),
        )
        for name in PEER_CASES
    ]


def _bench(place: Place) -> list[Step]:
    """Ours on a shape that it can do in seconds, then the peers on all of theirs.

    Documents are files that grow, so that a run that is cut short keeps what it had.
    """
    findings = []
    for found in sorted(place.raw.glob("peers*/result.json")):
        findings += ["--determinism", str(found)]
    many = ["--ranks", str(place.ranks)]
    if place.ranks > 1:
        return [_timed(place, "layer", [*many, "--limit", "180", *findings])]
    # ours runs the portable backend so far, 50 times slower than the rest: on the small shape only
    ours = ["--shape", "small", "--contender", "mok", "--contender", "torch", "--rounds", "5"]
    ours += ["--seconds", "1.5", "--alone", "mok", "--alone", "torch", "--limit", "25"]
    others = ("torch", "huggingface", "liger", "sonicmoe")
    peers = ["--limit", "165", "--gemms", *(w for name in others for w in ("--contender", name))]
    return [
        _timed(place, "ours", [*many, *ours, *findings]),
        _timed(place, "layer", [*many, *peers, *findings]),
    ]


def _timed(place: Place, name: str, words: Sequence[str]) -> Step:
    out = place.raw / f"bench-{name}"
    step = place.mok(name, "bench", "layer", "--device", "cuda", *words, "--out", str(out))
    return replace(step, document=str(out / "layer.json"))


def _sanitize(place: Place) -> list[Step]:
    scripts = sorted((place.root / "ci" / "gpu").glob("sanitize_*.py"))
    return [
        Step(
            f"{tool} {script.stem}",
            [
                *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer"),
                *("--tool", tool, "--error-exitcode", "9"),
                # cuda-core asks the driver for functions and parameters until it says no
                *(("--report-api-errors", "no") if tool == "memcheck" else ()),
                *(place.python, str(script.relative_to(place.root))),
            ],
            unavailable=(127,),  # there is no such program
            unsupported=NO_SANITIZER,
            needs="ERROR SUMMARY: 0 errors" if tool != "racecheck" else "RACECHECK SUMMARY: 0",
        )
        for tool in ("memcheck", "racecheck", "initcheck")
        for script in scripts
    ]


def source_of(root: Path, given: str | None) -> dict[str, Any]:
    """Commit and dirty flag: what was given for a copy of a tree, else git's, or unknown."""
    if given is not None:
        return {"commit": given, "dirty": None}
    state = source_state(root)
    return {"commit": state["commit"] or "unknown", "dirty": state["dirty"]}


def run_all(
    chosen: Sequence[str],
    place: Place,
    out: Path,
    seconds: float,
    source: dict[str, Any],
    say: Callable[[str], None],
    limits: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Runs the chosen parts within `seconds` in all, and keeps run.json up to date."""
    started = time.monotonic()
    document: dict[str, Any] = {
        "format": FORMAT,
        "commit": source["commit"],
        "dirty": source["dirty"],
        "sources": sources.of_tree(place.root),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": place.ranks,
        "environment": environment(place.root),
        "parts": [],
    }
    for name in chosen:
        part = next(one for one in parts(place) if one.name == name)
        log = out / f"{name}.log"
        log.unlink(missing_ok=True)
        limit = min(limits.get(name, part.seconds), seconds - (time.monotonic() - started))
        outcome = run_part(part, log, limit)
        document["parts"].append(outcome.to_json())
        document["seconds"] = round(time.monotonic() - started, 1)
        partial = out / "run.partial"
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(out / "run.json")
        say(f"{name}: {outcome.status} in {outcome.seconds:.0f} s")
        for step in outcome.steps:
            if step["status"] != "passed":
                last = str(step.get("why", "")).strip().splitlines()[-1:]
                say(f"  {step['name']}: {step['status']}, exit {step['exit']}: {''.join(last)}")
    return document


def exit_code(document: dict[str, Any]) -> int:
    """0: all passed; 1: one failed or took too long; 3: one could not run here."""
    found = {part["status"] for part in document["parts"]}
    if found & {"failed", "timed out"}:
        return FAILED
    return 0 if found == {"passed"} else UNAVAILABLE


def _end(number: int, _frame: object) -> None:
    """Ends by way of an exception, so that the running step and the files of all are cleared."""
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut that short
    sys.exit(128 + number)


@click.command()
@click.option(
    "--parts", "chosen", callback=options.names, default=",".join(NAMES), show_default=True
)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("report/gpu"),
    show_default=True,
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    callback=options.finite,
    default=470.0,
    show_default=True,
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=options.limits,
    metavar="PART=SECONDS",
    help="Another time for one part. May be repeated.",
)
@click.option(
    "--commit",
    callback=options.commit,
    help="The commit of which this tree is a copy, 40 hex digits; evidence checks it.",
)
@click.option("--allow-dirty", is_flag=True, help="Measure uncommitted changes; recorded.")
def main(
    chosen: tuple[str, ...],
    ranks: int,
    out: Path,
    seconds: float,
    limits: Mapping[str, float],
    commit: str | None,
    allow_dirty: bool,
) -> None:
    """Run what needs a GPU, and keep what it measured."""
    source = source_of(ROOT, commit)
    if source["dirty"] and not allow_dirty:
        click.echo(
            "the tree has uncommitted changes, so that its commit does not say what is measured; "
            "commit them, or say --allow-dirty",
            err=True,
        )
        sys.exit(2)
    present = devices.count()
    if present < ranks:
        click.echo(f"{ranks} ranks need {ranks} CUDA devices, {present} are here", err=True)
        sys.exit(2)
    options.make_usable(out, chosen)
    if source["commit"] == "unknown":
        click.echo("no commit is known, so that this can be no evidence; see --commit", err=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    with tempfile.TemporaryDirectory(prefix="mok-gpu-", ignore_cleanup_errors=True) as raw:
        place = Place(sys.executable, Path(raw), ranks)
        document = run_all(chosen, place, out, seconds, source, click.echo, limits)
    code = exit_code(document)
    done = ", ".join(f"{part['name']} {part['status']}" for part in document["parts"])
    click.echo(f"commit {document['commit']}, {document['seconds']:.0f} s: {done}; exit {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
