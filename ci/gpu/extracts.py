"""What evidence keeps of a run of ci/gpu.sh: little enough to commit, no path of any machine."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from typing import Any

import paths  # beside this file

ENVIRONMENT = ("platform", "machine", "cpu_model", "cpu_count", "python", "torch", "torch_git")
_VARIABLES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "MOK_")

PREPARATIONS = ("warm",)
"""Steps that leave nothing to show: they fill caches for others."""

Json = dict[str, Any]


def environment_of(record: Mapping[str, Any]) -> Json:
    """Without what names the machine rather than its kind: values that hold paths are left out."""
    held = record.get("variables") or {}
    private = private_variables(held)
    variables = {
        name: value
        for name, value in held.items()
        if name.startswith(_VARIABLES) and name not in private and not paths.first_path(value)
    }
    kept = {name: record.get(name) for name in (*ENVIRONMENT, "flags", "cuda")}
    cleaned = paths.without_paths(kept)
    assert isinstance(cleaned, dict)
    return {**cleaned, "variables": variables}


def private_variables(held: Mapping[str, str]) -> list[str]:
    """Variables that verify's own record would not hold, since they look like credentials."""
    from verify.environment import variables  # with torch, for which no table waits

    return sorted(held.keys() - variables(held).keys())


def result_of(part: str, step: Json) -> Json:
    """Of one step of a part what evidence keeps."""
    entry = {"exit": step["exit"], "status": step["status"], "seconds": step["seconds"]}
    if step["document"] is not None:
        entry |= RESULTS.get(part, _whole)(step["document"])
    if "said" in step:
        entry["said"] = paths.without_paths(step["said"])
    return entry


def _whole(document: Json) -> Json:
    """A document as it is, without what the evidence says already, and without paths."""
    kept = {name: value for name, value in document.items() if name != "environment"}
    cleaned = paths.without_paths(kept)
    assert isinstance(cleaned, dict)
    return {"document": cleaned}


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
        "command": paths.command_without_report(document["command"]),
        "verdict": document["verdict"],
        "ranks": document["ranks"],
        "totals": document["totals"],
        "cases": [_case(one) for one in document["cases"]],
    }


def _case(case: Json) -> Json:
    return {
        "case": paths.without_paths(case["case"]),
        "description": paths.without_paths(case["description"]),
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
        "detail": paths.without_paths(finding["detail"])[:300],
        "tensor": finding.get("tensor"),
        "variant": finding.get("variant"),
        "lines": [paths.without_paths(line) for line in difference.get("lines", ())[:3]],
        "suggests": paths.without_paths(list(difference.get("suggests", ())[:2])),
    }


RESULTS: Mapping[str, Callable[[Any], Json]] = {
    "tests": _tests,
    "verify": _verify,
    "peers": _verify,
}
"""What of a step's document is kept: counts for tests, verdicts for verify and peers, and for the
others the document as it is, under `document`."""
