"""Evidence: what ci/gpu.sh measured, made small, checked and kept under ci/evidence/.

    python ci/gpu/evidence.py collect report/gpu/run.json    one file per part
    python ci/gpu/evidence.py check                          every committed file

One file per part, `ci/evidence/DEVICE/PART.json`, with `-xN` after PART for N ranks:

    format       "mok-verify-evidence-v1"
    part         one of options.NAMES
    status       passed; for peers, forward, backward and bench also "timed out", as README says
    commit       40 hex digits: what was measured
    dirty        false, or null for a copy of a tree, where git was not asked
    sources      by folder the SHA-256 of what was measured (sources.py), equal to the commit's
    measured     UTC, ISO 8601
    ranks, seconds, command
    environment  the part of verify's environment record that bits and speed depend on
    results      by step: "exit", "status", and what it gave (see extracts.py)

A part that failed or could not run leaves no file, and `collect` says so (exit code 1). Refuses
(exit code 2, and then nothing is written) what is no run, a run whose commit is unknown or was not
what its tree held, one with uncommitted changes, and files above 200 kB. Of several measurements of
one part the newest is kept. What a device with some evidence lacks of `REQUIRED` must be named in
README's Limits, where tables.py puts it; `check` prints it.

Above 400 lines because what a file may say and how it is checked belong on one page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]

import extracts  # noqa: E402 - all four beside this file
import paths  # noqa: E402
import shapes  # noqa: E402
import sources  # noqa: E402

FOLDER = ROOT / "ci" / "evidence"
FORMAT = "mok-verify-evidence-v1"
RUN_FORMAT = "mok-verify-gpu-run-v1"
MAX_BYTES = 200_000
PARTS = (
    *("tests", "digest", "faults", "verify", "degrees", "backward-degrees", "training", "peers"),
    *("forward", "backward", "bench", "sanitize", "endurance", "backward-endurance"),
    "recording",
)
# their steps stand alone: each that ended is worth its row
MAY_TIME_OUT = ("peers", "forward", "backward", "bench")
SHOWN: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "degrees": lambda row: row["equal"] and not row["lacking"] and not row["broken"],
    "backward-degrees": lambda row: row["equal"] and not row["lacking"],
    "training": lambda row: row["equal"] and row["kernels"] == row["wanted"] > 0,
    **dict.fromkeys(
        ("endurance", "backward-endurance"),
        lambda row: row["distinct"] == 1 and row["under_load"] >= row["wanted"],
    ),
    "recording": lambda row: row["same"],
}
"""By part, what each row of its document shows in a run that passed."""
REQUIRED = {"h200": (*PARTS, "verify-x2", "training-x2")}
"""By device, the files that belong together: once one is there, README names those that are not."""
Json = dict[str, Any]


class EvidenceError(ValueError):
    """A run or an evidence file that cannot be used; the message says which and why."""


OfCommit = Callable[[str], Mapping[str, str] | None]


@dataclass(frozen=True)
class Collected:
    """The files that were written; of parts that were not, why; and what was passed over."""

    written: list[Path]
    left_out: list[str]
    older: list[str]


def collect(
    runs: Sequence[Json], folder: Path = FOLDER, of_commit: OfCommit = sources.of_commit
) -> Collected:
    """Writes the evidence of every part of some runs: all that can be, or nothing.

    Of two measurements of one file, and of a file that is there already, the newest is kept. Raises
    EvidenceError for what is no evidence, before anything is written.
    """
    chosen: dict[str, tuple[Json, str]] = {}
    left_out, older = [], []
    for run in runs:
        _check_run(run)
        for part in run["parts"]:
            suffix = f"-x{run['ranks']}" if run["ranks"] > 1 else ""
            name = f"{device_name(run['environment'])}/{part['name']}{suffix}.json"
            if not _kept(part["name"], part["status"]):
                left_out.append(f"{name}: {part['status']} in the run of {run['started']}")
                continue
            made = _evidence(run, part)
            text = json.dumps(made, indent=1, sort_keys=True, allow_nan=False) + "\n"
            problem = problem_of(made, len(text)) or source_problem(made, of_commit)
            if problem:
                raise EvidenceError(f"{part['name']}: {problem}")
            other = chosen[name][0] if name in chosen else _there(folder / name)
            if other is not None and _when(other) > _when(made):
                older.append(f"{name}: kept that of {other['measured']}, not {made['measured']}")
                continue
            if other is not None and _when(other) < _when(made):
                older.append(f"{name}: kept that of {made['measured']}, not {other['measured']}")
            chosen[name] = made, text
    for name, (_, text) in chosen.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Collected([folder / name for name in chosen], left_out, older)


def _check_run(run: Json) -> None:
    if not isinstance(run, dict) or run.get("format") != RUN_FORMAT:
        given = run.get("format") if isinstance(run, dict) else type(run).__name__
        raise EvidenceError(f"not a run of ci/gpu.sh: format {given!r}, not {RUN_FORMAT!r}")
    problem = shapes.RUN(run, "the run")
    if problem or shapes.too_deep(run):
        raise EvidenceError(problem or f"the run is nested deeper than {shapes.DEEPEST} levels")
    _check_names(run)
    if not re.fullmatch(r"[0-9a-f]{40}", run["commit"]):
        raise EvidenceError(
            f"the run names no commit ({run['commit']!r}), so that nobody could repeat it; "
            "run ci/gpu.sh with --commit SHA"
        )
    if not isinstance(run.get("sources"), dict):
        raise EvidenceError(
            "the run does not say what its sources held, so that its commit is only a claim; "
            "run ci/gpu.sh of this version again"
        )


def _check_names(run: Json) -> None:
    """Each part and step once: of two with one name the first would be lost in silence."""
    named = [part["name"] for part in run["parts"]]
    unknown = [name for name in named if name not in PARTS]
    if unknown:
        raise EvidenceError(f"the run has a part {unknown[0]!r}; known are {', '.join(PARTS)}")
    steps = [(part["name"], [step["name"] for step in part["steps"]]) for part in run["parts"]]
    for what, names in (("the run", named), *((f"part {name!r}", some) for name, some in steps)):
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise EvidenceError(f"{what} has {twice[0]!r} twice; only one could be kept")


def _kept(part: str, status: str) -> bool:
    return status == "passed" or (status == "timed out" and part in MAY_TIME_OUT)


def _there(path: Path) -> Json | None:
    """A file that is there already, if it is evidence."""
    try:
        found: Json = shapes.read_json(path)
    except ValueError:
        return None
    return found if problem_of(found, 0) is None else None


def _when(one: Json) -> datetime:
    return datetime.fromisoformat(one["measured"])


def source_problem(one: Json, of_commit: OfCommit = sources.of_commit) -> str | None:
    """Why the sources of some evidence are not those of its commit, or None.

    Raises NoHistory where git cannot tell.
    """
    known = of_commit(one["commit"])
    if known is None:
        return f"commit {one['commit']} is not in this history"
    other = sources.changed(one["sources"], known)
    if not other:
        return None
    return (
        f"what was measured is not commit {one['commit'][:12]}: {', '.join(other)} held something "
        "else (files that git does not track count as well)"
    )


def missing(found: Mapping[str, Json]) -> list[str]:
    """What a device that has some evidence lacks of `REQUIRED`; README's Limits name it."""
    return [
        f"{device}/{name}.json"
        for device, names in REQUIRED.items()
        if any(one.startswith(f"{device}/") for one in found)
        for name in names
        if f"{device}/{name}.json" not in found
    ]


def device_name(environment: Mapping[str, Any]) -> str:
    """`h200` for NVIDIA H200, fit for a folder's name; several kinds of devices are joined."""
    problem = shapes.DEVICES((environment.get("cuda") or {}).get("devices"), "devices")
    if problem:
        raise EvidenceError(
            f"the environment names no CUDA device, of which evidence would be: {problem}"
        )
    names = {one["name"] for one in environment["cuda"]["devices"]}
    words = [
        re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")[:60]
        for name in sorted(names)
    ]
    if not all(words):
        raise EvidenceError(f"no folder can be named after the devices {', '.join(sorted(names))}")
    return "+".join(words)


def _evidence(run: Json, part: Json) -> Json:
    for step in part["steps"]:
        check = shapes.DOCUMENTS.get(part["name"])
        if check and step["document"] is not None:
            problem = check(step["document"], f"the document of step {step['name']!r}")
            if problem:
                raise EvidenceError(f"{part['name']}: {problem}")
    ranks = f" --ranks {run['ranks']}" if run["ranks"] > 1 else ""
    return {
        "format": FORMAT,
        "part": part["name"],
        "status": part["status"],
        "commit": run["commit"],
        "dirty": run["dirty"],
        "sources": {
            name: run["sources"][name]
            for name in sources.folders_of(part["name"])
            if name in run["sources"]
        },
        "measured": run["started"],
        "ranks": run["ranks"],
        "seconds": part["seconds"],
        "command": f"bash ci/gpu.sh --parts {part['name']}{ranks}",
        "environment": extracts.environment_of(run["environment"]),
        "results": {
            step["name"]: extracts.result_of(part["name"], step)
            for step in part["steps"]
            if step["name"] not in extracts.PREPARATIONS
        },
    }


def read(folder: Path = FOLDER) -> dict[str, Json]:
    """Every committed evidence file by its path below the folder, such as `h200/verify.json`.

    Raises EvidenceError naming the file and what is wrong with it.
    """
    found = {}
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        try:
            evidence = shapes.read_json(path)
        except ValueError as error:
            raise EvidenceError(f"{name}: {error}") from error
        problem = problem_of(evidence, path.stat().st_size) or _misplaced(evidence, name)
        if problem:
            raise EvidenceError(f"{name}: {problem}")
        found[name] = evidence
    return found


def problem_of(evidence: Any, size: int) -> str | None:
    """What keeps a document from being evidence, or None."""
    shape = shapes.EVIDENCE(evidence, "it")
    if shape:
        return shape
    if evidence["format"] != FORMAT:
        return f"format {evidence['format']!r}; this version reads {FORMAT}"
    part, status = evidence["part"], evidence["status"]
    if part not in PARTS:
        return f"part {part!r}: not known"
    if not _kept(part, status):
        return f"status {status!r} of {part}: not known, or nothing to show"
    if not re.fullmatch(r"[0-9a-f]{40}", evidence["commit"]):
        return f"commit {evidence['commit']!r} is no commit"
    if evidence["dirty"]:
        return "it was measured with uncommitted changes"
    problem = _unsourced(evidence) or _undated(evidence)
    if problem:
        return problem
    problem = _unnamed(evidence["environment"])
    if problem:
        return problem
    if not evidence["results"]:
        return "it holds no result"
    problem = _contradiction(part, status, evidence["results"])
    if problem:
        return problem
    if size > MAX_BYTES:
        return f"{size} bytes; at most {MAX_BYTES}"
    path = paths.first_path(evidence)
    return f"it holds a path of the machine that measured: {path!r}" if path else None


def _unnamed(environment: Json) -> str | None:
    problem = shapes.CUDA(environment.get("cuda"), "cuda")
    if problem:
        return f"its environment names no CUDA device and driver: {problem}"
    if shapes.NAME(environment.get("torch"), "torch"):
        return "its environment names no torch"
    private = extracts.private_variables(environment.get("variables", {}))
    return f"it holds the variable {private[0]}, which may be a credential" if private else None


def _unsourced(evidence: Json) -> str | None:
    wanted = set(sources.folders_of(evidence["part"]))
    held = evidence["sources"]
    if set(held) != wanted or not all(
        re.fullmatch(r"[0-9a-f]{64}", str(one)) for one in held.values()
    ):
        return f"its sources are not a SHA-256 for each of {', '.join(sorted(wanted))}"
    return None


def _undated(evidence: Json) -> str | None:
    try:
        zone = datetime.fromisoformat(evidence["measured"]).tzinfo
    except ValueError:
        zone = None
    return None if zone else f"measured {evidence['measured']!r} is no time with its zone"


def _contradiction(part: str, status: str, results: Mapping[str, Any]) -> str | None:
    """Why the steps do not bear out the status of the part."""
    allowed = ("passed",) if status == "passed" else ("passed", "timed out")
    for name, step in results.items():
        if step["status"] not in allowed:
            return f"the part is {status!r}, its step {name!r} {step['status']!r}"
        if step["status"] == "passed" or step.keys() - {"exit", "status", "seconds"}:
            problem = shapes.RESULTS[part](step, f"its result {name!r}")
            if problem:
                return problem
        if part == "tests" and (step.get("failed") != [] or not step.get("passed")):
            return f"it passed, but of its tests {step.get('passed')} did, not {step.get('failed')}"
        if part == "verify" and step.get("verdict") != "VERIFIED":
            return f"it passed, but {name!r} is {step.get('verdict')!r}"
        if part in SHOWN and not all(map(SHOWN[part], step["document"]["rows"])):
            return f"it passed, but a row of {name!r} does not show what it should"
    return None


def _misplaced(evidence: Json, name: str) -> str | None:
    suffix = f"-x{evidence['ranks']}" if evidence["ranks"] > 1 else ""
    wanted = f"{device_name(evidence['environment'])}/{evidence['part']}{suffix}.json"
    return None if name == wanted else f"belongs at {wanted}"


@click.group()
def main() -> None:
    """Make evidence of what ci/gpu.sh measured, and check what is committed."""


@main.command("collect")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=False)
def _collect(runs: Sequence[Path], folder: Path) -> None:
    """Write ci/evidence/ from run.json files, or folders that hold one."""
    try:
        made = collect([_run_of(run) for run in runs], folder)
    except ValueError as error:  # EvidenceError and NoHistory among them
        click.echo(f"evidence: {error}; nothing was written", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"evidence: not all could be written: {error}", err=True)
        sys.exit(2)
    for path in made.written:
        click.echo(f"{path} {path.stat().st_size} bytes")
    for text in made.older:
        click.echo(text)
    for text in made.left_out:
        click.echo(f"no evidence: {text}", err=True)
    sys.exit(1 if made.left_out else 0)


def _run_of(place: Path) -> Any:
    path = place / "run.json" if place.is_dir() else place
    try:
        return shapes.read_json(path, strict=False)  # a part that is not kept may hold NaN
    except ValueError as error:
        raise EvidenceError(f"{path}: {error}") from error


@main.command("check")
def _check() -> None:
    """Read every committed file; exit code 1 when one is no evidence, or not of its commit."""
    told: list[str] = []
    try:
        found = read()
        for name, one in found.items():
            problem = source_problem(one)
            told += [f"{name}: {problem}"] if problem else []
    except sources.NoHistory as unknown:
        click.echo(f"commits were not checked: {unknown}", err=True)
    except EvidenceError as error:
        click.echo(f"evidence: {error}", err=True)
        sys.exit(1)
    for text in told:
        click.echo(f"evidence: {text}", err=True)
    lacking = missing(found)
    unmeasured = f"; not measured: {', '.join(lacking)}" if lacking else ""
    click.echo(f"{len(found)} files{unmeasured}")
    sys.exit(1 if told else 0)


if __name__ == "__main__":
    main()
