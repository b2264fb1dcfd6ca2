"""The result document, schema version 1: the one thing that reports, CI and people read afterwards.

It is plain JSON so that a verdict can be drawn again from an artifact, without torch and years
later; changes to it only add. It refuses to hold NaN or infinity as numbers (they become the
strings "nan" and "inf"), to be read from a file of another schema version, and to give exit code 0
when no claim was checked, whatever the field `verdict` says.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import json
import math
import os
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verify import input_files
from verify.digests import SCHEME
from verify.errors import InputFileError
from verify.evidence import BASE, Execution, Plan
from verify.reasons import EXIT_CODES, Verdict, worst
from verify.validation import contents_problem, first_problem
from verify.verdicts import CaseVerdict

SCHEMA_VERSION = 1
FILE_NAME = "result.json"
NO_CONTROLS: dict[str, Any] = {"status": "not-run", "passed": 0, "failed": []}


def build(
    *,
    plans: Sequence[Plan],
    verdicts: Sequence[CaseVerdict],
    executions: Sequence[Execution],
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    command: Sequence[str] | str,
    started: datetime,
    seconds: float,
    ranks: int = 1,
    controls: Mapping[str, Any] | None = None,
    gate: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a run, or of a `gate`. `started` needs a time zone; `command` is as typed."""
    plan_of = {plan.case: plan for plan in plans}
    cases = [
        _case(plan_of.get(verdict.case), verdict, executions, options, ranks)
        for verdict in verdicts
    ]
    document = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "mok-verify", "version": tool_version(), "digest_scheme": SCHEME},
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "command": command if isinstance(command, str) else shlex.join(command),
        "ranks": ranks,
        "options": options,
        "environment": environment,
        "controls": dict(controls or NO_CONTROLS),
        "cases": cases,
        **({"gate": gate} if gate is not None else {}),
    }
    return assemble(document, executions=len(executions))


def assemble(document: Mapping[str, Any], *, executions: int | None = None) -> dict[str, Any]:
    """The document with verdict, exit code and totals taken from its cases, JSON-clean."""
    clean = _clean(document)
    cases = clean["cases"]
    states = [claim["verdict"] for case in cases for claim in case["claims"]]
    if executions is None:
        executions = sum(claim["executions"] for case in cases for claim in case["claims"])
    verdict = worst(_verdicts(clean))
    clean["verdict"] = verdict.value
    clean["exit_code"] = EXIT_CODES[verdict]
    clean["totals"] = {
        "cases": len(cases),
        "claims": len(states),
        "executions": executions,
        **{name.value.lower(): states.count(name.value) for name in Verdict},
    }
    return clean


def exit_code(result: Mapping[str, Any]) -> int:
    """0, 1 or 3, from the claims and the field `verdict`, whichever is worse."""
    stated = [Verdict(result["verdict"])] if "verdict" in result else []
    found = _verdicts(result)
    return EXIT_CODES[worst(stated + found) if found else worst([*stated, Verdict.UNVERIFIED])]


def write(result: Mapping[str, Any], path: Path) -> None:
    """Writes the document whole or not at all; makes the folders above it."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Writes a report whole or not at all. Raises InputFileError with path and reason."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise InputFileError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> dict[str, Any]:
    """The document of a file, or of `result.json` in a folder."""
    file = path / FILE_NAME if path.is_dir() else path
    if file != path and not input_files.exists(file):
        raise InputFileError(f"{file}: no such file (the folder {path} holds no {FILE_NAME})")
    what = "a result document"
    text = input_files.read_text(file, what, pipes=file == path)
    data = input_files.parse_json(text, str(file), what)
    problem = _problem(data)
    if problem:
        raise InputFileError(f"{file}: not {what}: {problem}")
    return data


def schema() -> dict[str, Any]:
    """The JSON Schema of the document, as shipped with the package."""
    file = importlib.resources.files("verify").joinpath("schema", "result-v1.schema.json")
    return json.loads(file.read_text(encoding="utf-8"))


def tool_version() -> str:
    """The installed version of the distribution."""
    try:
        return importlib.metadata.version("mok-verify")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def reproduce(target: str, claim: str | None, options: Mapping[str, Any], ranks: int) -> str:
    """The command that runs one case, or one claim of it, again; empty when nothing can name it.

    Options that were left to their defaults or to the case are left out.
    """
    if not target:
        return ""
    words = ["verify", "run", target]
    words += ["--claims", claim] if claim else []
    if ranks != 1 or options.get("ranks") is not None:
        words += ["--ranks", str(ranks)]
    for name, default in _DEFAULTS:
        if options.get(name, default) not in (None, default):
            words += [f"--{name}", str(options[name])]
    return shlex.join(words)


def _update(target: str, options: Mapping[str, Any]) -> str:
    """The command that stores what the case gives as its golden."""
    folder = ["--golden", str(options["golden"])] if options.get("golden") else []
    return shlex.join(["verify", "golden", "update", target, *folder]) + " --reason TEXT"


_DEFAULTS = (
    ("runs", 5),
    ("processes", 3),
    ("seed", None),
    ("timeout", 300.0),
    ("golden", None),
    ("device", None),
)


def _case(
    plan: Plan | None,
    verdict: CaseVerdict,
    executions: Sequence[Execution],
    options: Mapping[str, Any],
    ranks: int,
) -> dict[str, Any]:
    own = [one for one in executions if one.case == verdict.case]
    bases = _bases(own)
    plan = plan or Plan(verdict.case, verdict.target, (), ranks, {})
    seconds = math.fsum(one.seconds for one in own)
    overhead = math.fsum(one.overhead for one in own)
    claims = []
    for claim in verdict.claims:
        entry = asdict(claim)
        for shown, finding in zip(entry["findings"], claim.findings, strict=True):
            shown["verdict"] = finding.verdict.value
        entry["reproduce"] = reproduce(verdict.target, claim.claim, options, plan.ranks)
        if claim.claim == "golden":
            entry["update"] = _update(verdict.target, options)
        claims.append(entry)
    return {
        "case": verdict.case,
        "target": verdict.target,
        "verdict": verdict.verdict.value,
        "description": plan.description,
        "notes": verdict.notes,
        "ranks": plan.ranks,
        "seed": plan.seed,
        "random": plan.random,
        "placement": plan.placement,
        "batch": plan.batch,
        "device": plan.device,
        "sources": plan.sources,
        "source_digest": plan.source_digest,
        "inputs": {str(rank): one.inputs for rank, one in bases.items()},
        "generator": {str(rank): one.generator for rank, one in bases.items()},
        "outputs": {str(rank): one.outputs for rank, one in bases.items()},
        "reproduce": reproduce(verdict.target, None, options, plan.ranks),
        "claims": claims,
        "timings": {
            "case_seconds": seconds,
            "overhead_seconds": overhead,
            "overhead_share": overhead / seconds if seconds > 0 else None,
            "median": _median_timings(own),
        },
    }


def _median_timings(executions: Sequence[Execution]) -> dict[str, float] | None:
    """The typical execution, seconds: medians over all that were compared with their own base.

    Totals also hold the first execution, whose time is mostly imports and first-time set-up.
    """
    typical = [one for one in executions if one.compare == "own" and one.claim != BASE]
    typical = [one for one in typical if one.process == 0 and one.failure is None]
    if not typical:
        return None
    return {
        "case_seconds": statistics.median(one.seconds for one in typical),
        "overhead_seconds": statistics.median(one.overhead for one in typical),
    }


def _bases(executions: Sequence[Execution]) -> dict[int, Execution]:
    """The base execution of the main process, by rank."""
    bases: dict[int, Execution] = {}
    for one in sorted(executions, key=lambda one: (one.rank, one.process, one.run)):
        if one.claim == BASE:
            bases.setdefault(one.rank, one)
    return bases


def _verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """Of every claim and every finding of a gate; a case without claims and failed controls count
    as UNVERIFIED."""
    verdicts = []
    for case in result["cases"]:
        verdicts += [Verdict(claim["verdict"]) for claim in case["claims"]]
        verdicts += [] if case["claims"] else [Verdict.UNVERIFIED]
    if verdicts and result["controls"]["status"] == "failed":
        verdicts.append(Verdict.UNVERIFIED)
    findings = result.get("gate", {}).get("findings", ())
    return verdicts + [Verdict(finding["verdict"]) for finding in findings]


def _clean(value: Any) -> Any:
    """JSON's own types: tuples become lists, keys become strings, NaN and infinities strings."""
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Verdict):
        return value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Sequence | set | frozenset):
        return [_clean(item) for item in value]
    return str(value)


def _problem(data: Any) -> str | None:
    """What keeps `data` from being a document that the renderers can read."""
    if not isinstance(data, dict) or "schema_version" not in data:
        return "no field schema_version"
    if data["schema_version"] != SCHEMA_VERSION:
        return f"schema_version {data['schema_version']!r}, this version reads {SCHEMA_VERSION}"
    problem = first_problem(data, schema()) or contents_problem(data)
    if problem:
        return problem
    try:
        _verdicts(data)
    except ValueError as error:
        return str(error)
    return None
