"""Evidence: what ci/gpu.sh measured, made small, checked and kept under ci/evidence/.

    python ci/gpu/evidence.py collect report/gpu/run.json    one file per part
    python ci/gpu/evidence.py check                          every committed file

One file per part, `ci/evidence/DEVICE/PART.json`, with `-xN` after PART for N ranks:

    format       "mok-verify-evidence-v1"
    part         tests, digest, faults, verify, peers, bench or sanitize
    status       passed, failed or timed out, as ci/gpu.sh judged the part
    commit       40 hex digits: what was measured
    dirty        false; true with uncommitted changes; null for a copy of a tree, which nobody asked
    measured     UTC, ISO 8601
    ranks, seconds, command
    environment  the part of verify's environment record that bits and speed depend on
    results      by step: "exit", "status", and what it gave (see `RESULTS`)

A part that could not run leaves no file: there is nothing to show. Refuses a run whose commit is
unknown, and files above 200 kB.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ci" / "evidence"
FORMAT = "mok-verify-evidence-v1"
RUN_FORMAT = "mok-verify-gpu-run-v1"
MAX_BYTES = 200_000
PARTS = ("tests", "digest", "faults", "verify", "peers", "bench", "sanitize")
STATUSES = ("passed", "failed", "timed out")
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "format": str,
    "part": str,
    "status": str,
    "commit": str,
    "dirty": (bool, type(None)),
    "measured": str,
    "ranks": int,
    "seconds": (int, float),
    "command": str,
    "environment": dict,
    "results": dict,
}
ENVIRONMENT = ("platform", "machine", "cpu_model", "cpu_count", "python", "torch", "torch_git")
_VARIABLES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "MOK_")
_PATH = re.compile(r"(^|[\s=:,;'\"])~?/[\w.]")  # of the machine that measured: no one's business

Json = dict[str, Any]


class EvidenceError(ValueError):
    """A run or an evidence file that cannot be used; the message says which and why."""


def collect(run: Json, folder: Path = FOLDER) -> list[Path]:
    """Writes the evidence of every part of a run; returns the files. Raises EvidenceError."""
    if run.get("format") != RUN_FORMAT:
        raise EvidenceError(f"not a run of ci/gpu.sh: format {run.get('format')!r}")
    if not re.fullmatch(r"[0-9a-f]{40}", str(run["commit"])):
        raise EvidenceError(
            f"the run names no commit ({run['commit']!r}), so that nobody could repeat it; "
            "run ci/gpu.sh with --commit SHA"
        )
    written = []
    for part in run["parts"]:
        if part["status"] not in STATUSES:
            continue
        made = _evidence(run, part)
        place = folder / device_name(run["environment"])
        suffix = f"-x{run['ranks']}" if run["ranks"] > 1 else ""
        path = place / f"{part['name']}{suffix}.json"
        text = json.dumps(made, indent=1, sort_keys=True, allow_nan=False) + "\n"
        problem = problem_of(made, len(text))
        if problem:
            raise EvidenceError(f"{part['name']}: {problem}")
        place.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def device_name(environment: Mapping[str, Any]) -> str:
    """`h200` for NVIDIA H200; several kinds of devices are joined."""
    names = {str(one["name"]) for one in (environment.get("cuda") or {}).get("devices", ())}
    words = ["-".join(name.lower().removeprefix("nvidia ").split()) for name in sorted(names)]
    if not words:
        raise EvidenceError("the environment names no CUDA device; evidence is of a GPU")
    return "+".join(words)


def _evidence(run: Json, part: Json) -> Json:
    ranks = f" --ranks {run['ranks']}" if run["ranks"] > 1 else ""
    return {
        "format": FORMAT,
        "part": part["name"],
        "status": part["status"],
        "commit": run["commit"],
        "dirty": run["dirty"],
        "measured": run["started"],
        "ranks": run["ranks"],
        "seconds": part["seconds"],
        "command": f"bash ci/gpu.sh --parts {part['name']}{ranks}",
        "environment": environment_of(run["environment"]),
        "results": {step["name"]: _result(part["name"], step) for step in part["steps"]},
    }


def environment_of(record: Mapping[str, Any]) -> Json:
    """Without what names the machine rather than its kind: values that hold paths are left out."""
    variables = {
        name: value
        for name, value in (record.get("variables") or {}).items()
        if name.startswith(_VARIABLES) and not _PATH.search(str(value))
    }
    kept = {name: record.get(name) for name in ENVIRONMENT}
    cuda = _without_paths(record["cuda"])
    return {**kept, "flags": record.get("flags"), "variables": variables, "cuda": cuda}


def _result(part: str, step: Json) -> Json:
    entry = {"exit": step["exit"], "status": step["status"], "seconds": step["seconds"]}
    if step["document"] is not None:
        entry |= RESULTS.get(part, _whole)(step["document"])
    if "said" in step:
        entry["said"] = step["said"]
    return entry


def _whole(document: Json) -> Json:
    """A document as it is, without what the evidence says already, and without paths."""
    kept = {name: value for name, value in document.items() if name != "environment"}
    cleaned = _without_paths(kept)
    assert isinstance(cleaned, dict)
    return {"document": cleaned}


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_paths(one) for one in value]
    if isinstance(value, str) and _PATH.search(value):
        return re.sub(r"~?/[\w./+-]+", lambda found: Path(found.group()).name, value)
    return value


def _tests(document: str) -> Json:
    """Counts, and the names of what failed, from JUnit."""
    cases = list(ElementTree.fromstring(document).iter("testcase"))
    outcomes = [{child.tag for child in case} for case in cases]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if outcome & {"failure", "error"}
    ]
    skipped = sum("skipped" in outcome for outcome in outcomes)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": failed,
        "skipped": skipped,
    }


def _verify(document: Json) -> Json:
    """Verdicts, counts and findings of a result document, without digests and tile maps."""
    return {
        "command": _without_paths(document["command"]).split(" --report ")[0],
        "verdict": document["verdict"],
        "ranks": document["ranks"],
        "totals": document["totals"],
        "cases": [_case(one) for one in document["cases"]],
    }


def _case(case: Json) -> Json:
    return {
        "case": _without_paths(case["case"]),
        "description": case["description"],
        "verdict": case["verdict"],
        "ranks": case["ranks"],
        "device": case.get("device", ""),
        "claims": [_claim(claim) for claim in case["claims"]],
    }


def _claim(claim: Json) -> Json:
    worst = {
        name: one["worst_ratio"]
        for name, one in claim["measurements"].items()
        if isinstance(one, dict) and isinstance(one.get("worst_ratio"), int | float)
    }
    kept = {
        name: claim[name]
        for name in ("claim", "verdict", "executions", "differing", "bound")
        if name in claim
    }
    findings = [_finding(one) for one in claim["findings"][:8]]
    return {**kept, "findings": findings, **({"worst_ratio": worst} if worst else {})}


def _finding(finding: Json) -> Json:
    difference = finding.get("difference") or {}
    return {
        "reason": finding["reason"],
        "detail": _without_paths(finding["detail"])[:300],
        "tensor": finding.get("tensor"),
        "variant": finding.get("variant"),
        "lines": [_without_paths(line) for line in difference.get("lines", ())[:3]],
        "suggests": list(difference.get("suggests", ())[:2]),
    }


RESULTS: Mapping[str, Callable[[Any], Json]] = {
    "tests": _tests,
    "verify": _verify,
    "peers": _verify,
}
"""What of a step's document is kept: counts for tests, verdicts for verify and peers, and for the
others the document as it is, under `document`."""


def read(folder: Path = FOLDER) -> dict[str, Json]:
    """Every committed evidence file by its path below the folder, such as `h200/verify.json`.

    Raises EvidenceError naming the file and what is wrong with it.
    """
    found = {}
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            evidence = json.loads(text)
        except ValueError as error:
            raise EvidenceError(f"{name}: not JSON: {error}") from error
        problem = problem_of(evidence, len(text)) or _misplaced(evidence, name)
        if problem:
            raise EvidenceError(f"{name}: {problem}")
        found[name] = evidence
    return found


def problem_of(evidence: Any, size: int) -> str | None:
    """What keeps a document from being evidence, or None."""
    if not isinstance(evidence, dict):
        return "not an object"
    for name, kind in FIELDS.items():
        value = evidence.get(name)
        if name not in evidence or not isinstance(value, kind):
            return f"field {name!r} is missing or of another type"
    if evidence["format"] != FORMAT:
        return f"format {evidence['format']!r}; this version reads {FORMAT}"
    if evidence["part"] not in PARTS or evidence["status"] not in STATUSES:
        return f"part {evidence['part']!r}, status {evidence['status']!r}: not known"
    if not re.fullmatch(r"[0-9a-f]{40}", evidence["commit"]):
        return f"commit {evidence['commit']!r} is no commit"
    cuda = evidence["environment"].get("cuda")
    if not isinstance(cuda, dict) or not cuda.get("devices") or not cuda.get("driver"):
        return "its environment names no CUDA device and driver"
    if not evidence["environment"].get("torch"):
        return "its environment names no torch"
    if not evidence["results"]:
        return "it holds no result"
    if size > MAX_BYTES:
        return f"{size} bytes; at most {MAX_BYTES}"
    path = _first_path(evidence["results"]) or _first_path(evidence["environment"])
    return f"it holds a path of the machine that measured: {path!r}" if path else None


def _first_path(value: Any) -> str | None:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next((path for one in value if (path := _first_path(one))), None)
    return value if isinstance(value, str) and _PATH.search(value) else None


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
        for run in runs:
            path = run / "run.json" if run.is_dir() else run
            for written in collect(json.loads(path.read_text()), folder):
                click.echo(f"{written} {written.stat().st_size} bytes")
    except (EvidenceError, ValueError) as error:
        click.echo(f"evidence: {error}", err=True)
        sys.exit(2)


@main.command("check")
def _check() -> None:
    """Read every committed file; exit code 1 when one is no evidence."""
    try:
        found = read()
    except EvidenceError as error:
        click.echo(f"evidence: {error}", err=True)
        sys.exit(1)
    click.echo(f"{len(found)} files")


if __name__ == "__main__":
    main()
