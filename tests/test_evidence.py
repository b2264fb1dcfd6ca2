"""Evidence of GPU runs: README's figures are those that were measured, and every file says where.

The first test judges what is committed; the others break things on purpose and are told.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _load(name: str) -> ModuleType:
    """A script of ci/gpu as a module of its own name there."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    path = list(sys.path)
    names = ("evidence", "parts", "tables")
    try:
        sys.path.insert(0, str(ROOT / "ci" / "gpu"))  # where Python finds them when they are run
        yield {name: _load(name) for name in names}
    finally:
        sys.path[:] = path
        for name in (*names, "steps"):
            sys.modules.pop(name, None)


def test_what_is_committed_is_evidence_and_readme_says_nothing_else(
    scripts: dict[str, ModuleType],
) -> None:
    found = scripts["evidence"].read()
    assert scripts["tables"].problems((ROOT / "README.md").read_text(), found) == []
    for name, one in found.items():
        assert one["dirty"] is not True, f"{name} was measured with uncommitted changes"


ENVIRONMENT = {
    "platform": "Linux",
    "machine": "x86_64",
    "cpu_model": "a cpu",
    "cpu_count": 16,
    "python": "CPython 3.12.3",
    "torch": "2.11.0+cu130",
    "torch_git": "abc",
    "flags": {"deterministic_algorithms": False},
    "variables": {
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_HOME": "/opt/cuda",
        "OMP_NUM_THREADS": "1",
    },
    "cuda": {
        "runtime": "13.0",
        "driver": "580.1",
        "devices": [{"name": "NVIDIA H200", "capability": "9.0"}],
        "visible": 1,
        "links": {},
        "nccl": "2.28.9",
    },
}
JUNIT = (
    "<testsuites><testsuite><testcase classname='a' name='one'/>"
    "<testcase classname='a' name='two'><failure message='x'/></testcase>"
    "<testcase classname='a' name='three'><skipped/></testcase></testsuite></testsuites>"
)
FAULTS = {
    "schema_version": 1,
    "passed": True,
    "environment": ENVIRONMENT,
    "faults": [
        {
            "name": "atomic-sum",
            "claim": "repeat",
            "fault": "adds floats with atomics",
            "caught": True,
            "plain_check": {"noticed": 3, "trials": 100},
            "claims": {
                "repeat": {
                    "executions": 30,
                    "differing": 29,
                    "interval_95": [0.83, 1.0],
                    "variants": {},
                }
            },
            "twin": {"executions": 90, "differing": 0, "not_verified": [], "claims": {}},
        }
    ],
}
DIGEST = {
    "unit": "TB/s",
    "protocol": "2 GB, alternating",
    "rows": [{"dtype": "bf16", "verify digest": 4.125, "torch.hash_tensor": None}],
    "share_of_read": 0.9375,
}


def step(name: str, document: Any = None, **more: Any) -> dict[str, Any]:
    given = {"name": name, "command": f"verify {name}", "status": "passed", "exit": 0}
    return {**given, "seconds": 1.5, "document": document, **more}


@pytest.fixture
def run(mixed_result: dict[str, Any]) -> dict[str, Any]:
    """As parts.py writes it: every part but the benchmark, which has tests of its own."""
    sanitize = [
        step("memcheck sanitize_digest", said="ERROR SUMMARY: 0 errors"),
        step("racecheck sanitize_digest", said="RACECHECK SUMMARY: 0 hazards displayed"),
    ]
    steps = {
        "tests": [step("pytest", JUNIT)],
        "digest": [step("digest", DIGEST)],
        "faults": [step("faults", FAULTS)],
        "verify": [step("layer", mixed_result)],
        "peers": [step("peers", mixed_result)],
        "sanitize": sanitize,
    }
    return {
        "format": "mok-verify-gpu-run-v1",
        "commit": COMMIT,
        "dirty": False,
        "started": "2026-01-02T03:04:05+00:00",
        "ranks": 1,
        "seconds": 60.0,
        "environment": ENVIRONMENT,
        "parts": [
            {"name": name, "status": "passed", "seconds": 12.5, "steps": some}
            for name, some in steps.items()
        ],
    }


@pytest.fixture
def mixed_result() -> dict[str, Any]:
    """One VERIFIED case, and one whose d_router differs in every run."""
    finding = {
        "reason": "bits-differ",
        "detail": "d_router has other bits",
        "tensor": "d_router",
        "variant": "restored",
        "difference": {"lines": ["first: at /tmp/x/y.py"], "suggests": ["atomics"]},
    }
    good = {"claim": "repeat", "verdict": "VERIFIED", "executions": 20, "differing": 0}
    bad = {"claim": "repeat", "verdict": "MISMATCH", "executions": 20, "differing": 20}
    rest = {"bound": 0.14, "findings": [], "measurements": {}}
    case = {"description": "a layer", "ranks": 1, "device": "cuda"}
    return {
        "command": "verify run cases.py --device cuda --report /tmp/raw/peers",
        "verdict": "MISMATCH",
        "ranks": 1,
        "totals": {"cases": 2},
        "cases": [
            {
                **case,
                "case": "ci/gpu/peer_cases.py::peers/torch/small",
                "verdict": "VERIFIED",
                "claims": [{**good, **rest}],
            },
            {
                **case,
                "case": "ci/gpu/peer_cases.py::peers/liger/small",
                "verdict": "MISMATCH",
                "claims": [{**bad, **rest, "findings": [finding]}],
            },
        ],
    }


def test_a_run_becomes_files_that_are_evidence_and_tables_that_are_theirs(
    scripts: dict[str, ModuleType], run: dict[str, Any], tmp_path: Path
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    files = evidence.collect(run, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        f"h200/{name}.json" for name in ("tests", "digest", "faults", "verify", "peers", "sanitize")
    ]
    found = evidence.read(tmp_path)
    assert found["h200/tests.json"]["results"]["pytest"] == {
        "exit": 0,
        "status": "passed",
        "seconds": 1.5,
        "passed": 1,
        "failed": ["a::two"],
        "skipped": 1,
    }
    assert "/tmp" not in "".join(path.read_text() for path in files)
    assert found["h200/verify.json"]["environment"]["variables"] == {"NCCL_NVLS_ENABLE": "0"}
    before = "# A readme\n\n## Speed\n\ntext\n\n## Files\n\ntree\n"
    assert len(tables.problems(before, found)) == 6
    readme = tables.written(before, found)
    assert tables.problems(readme, found) == []
    assert tables.written(readme, found) == readme
    assert readme.index("## Measured on GPUs") < readme.index("## Files")
    assert readme.endswith("## Files\n\ntree\n")
    for shown in (
        "d_router",
        "20 of 20",
        "29 of 30, 83.0 to 100.0 %",
        "3 of 100",
        "4.125",
        "0.9375",
    ):
        assert shown in readme, shown
    assert f"`bash ci/gpu.sh --parts verify` at commit `{COMMIT[:12]}`, 2026-01-02" in readme


def test_figures_that_are_not_those_of_the_evidence_are_told(
    scripts: dict[str, ModuleType], run: dict[str, Any], tmp_path: Path
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    evidence.collect(run, tmp_path)
    found = evidence.read(tmp_path)
    readme = tables.written("## Files\n", found)
    edited = readme.replace("29 of 30", "30 of 30")
    assert tables.problems(edited, found) == ["table 'faults' is not that of the evidence"]
    (tmp_path / "h200" / "faults.json").unlink()
    left = evidence.read(tmp_path)
    assert tables.problems(readme, left) == ["table 'faults' has no evidence"]
    assert "adds floats" not in tables.written(readme, left)
    cut = readme.replace("<!-- end -->", "", 1)
    assert any("<!-- end -->" in problem for problem in tables.problems(cut, found))
    assert tables.problems("no table", {}) == []
    assert tables.problems("<!-- evidence: bench -->\n| 1 |\n<!-- end -->", {}) == [
        "table 'bench' has no evidence"
    ]


def test_two_ranks_stand_beside_one_and_say_how_they_are_joined(
    scripts: dict[str, ModuleType], run: dict[str, Any], tmp_path: Path
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    evidence.collect(run, tmp_path)
    cuda = {**ENVIRONMENT["cuda"], "visible": 2, "links": {"GPU0-GPU1": "NV18"}}  # type: ignore[dict-item]
    two = {**run, "ranks": 2, "environment": {**ENVIRONMENT, "cuda": cuda}}
    two["parts"] = [one for one in run["parts"] if one["name"] == "verify"]
    evidence.collect(two, tmp_path)
    found = evidence.read(tmp_path)
    assert "h200/verify-x2.json" in found
    text = tables.made(found)["verify"][1]
    assert "2 x NVIDIA H200" in text
    assert "NCCL 2.28.9, NV18" in text
    assert "--ranks 2" in text


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: run.update(commit="unknown"), "with --commit"),
        (lambda run: run.update(format="x"), "not a run"),
        (lambda run: run["environment"].update(cuda=None), "no CUDA device"),
        (lambda run: run["environment"]["cuda"].update(driver=None), "driver"),
        (lambda run: run["parts"][1]["steps"].clear(), "no result"),
        (
            lambda run: run["parts"][1]["steps"][0]["document"].update(rows=["x" * 200_000]),
            "at most 200000",
        ),
    ],
)
def test_a_run_that_nobody_could_repeat_is_refused(
    scripts: dict[str, ModuleType], run: dict[str, Any], tmp_path: Path, change: Change, told: str
) -> None:
    given = json.loads(json.dumps(run))
    change(given)
    with pytest.raises(scripts["evidence"].EvidenceError, match=told):
        scripts["evidence"].collect(given, tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one: one.pop("environment"), "'environment'"),
        (lambda one: one.update(commit="HEAD"), "no commit"),
        (lambda one: one.update(status="unavailable"), "not known"),
        (lambda one: one.update(part="verify"), "belongs at h200/verify.json"),
        (lambda one: one.update(ranks=2), "belongs at h200/digest-x2.json"),
        (lambda one: one["results"].update(note="in /root/x"), "a path"),
        (lambda one: one["environment"].pop("torch"), "no torch"),
    ],
)
def test_a_committed_file_that_is_no_evidence_is_named(
    scripts: dict[str, ModuleType], run: dict[str, Any], tmp_path: Path, change: Change, told: str
) -> None:
    evidence = scripts["evidence"]
    evidence.collect(run, tmp_path)
    path = tmp_path / "h200" / "digest.json"
    one = json.loads(path.read_text())
    change(one)
    path.write_text(json.dumps(one))
    with pytest.raises(evidence.EvidenceError, match=told) as raised:
        evidence.read(tmp_path)
    assert "h200/digest.json" in str(raised.value)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_part_that_fails_or_hangs_is_reported_and_the_rest_runs(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    parts = scripts["parts"]
    file = tmp_path / "made.json"
    steps = [
        parts.Step("good", python("print('{\"a\": 1}')"), "-"),
        parts.Step("file", python(f"open({str(file)!r}, 'w').write('[2]')"), str(file)),
        parts.Step("finding", python("print(3); raise SystemExit(1)"), "-", good=(0, 1)),
        parts.Step("wrong", python("raise SystemExit('because')")),
        parts.Step("silent", python("pass"), needs="0 errors"),
        parts.Step("unreadable", python("print('no json')"), "-"),
        parts.Step("elsewhere", python("raise SystemExit(3)"), unavailable=(3,)),
        parts.Step("absent", ["no-such-program-here"]),
        parts.Step("hangs", python("import time; time.sleep(60)")),
    ]
    outcome = parts.run_part(parts.Part("p", 9, steps), tmp_path / "p.log", 3.0)
    found = {one["name"]: one for one in outcome.steps}
    assert {name: one["status"] for name, one in found.items()} == {
        "good": "passed",
        "file": "passed",
        "finding": "passed",
        "wrong": "failed",
        "silent": "failed",
        "unreadable": "failed",
        "elsewhere": "unavailable",
        "absent": "unavailable",
        "hangs": "timed out",
    }
    assert found["good"]["document"] == {"a": 1}
    assert found["file"]["document"] == [2]
    assert found["finding"]["document"] == 3
    assert "because" in found["wrong"]["why"]
    assert "because" in (tmp_path / "p.log").read_text()
    assert outcome.status == "failed"
    assert outcome.seconds < 20


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["passed", "passed"], 0),
        (["passed", "failed", "unavailable"], 1),
        (["timed out"], 1),
        (["passed", "unavailable"], 3),
        ([], 3),
    ],
)
def test_the_exit_code_says_what_became_of_the_parts(
    scripts: dict[str, ModuleType], statuses: list[str], code: int
) -> None:
    document = {"parts": [{"status": status} for status in statuses]}
    assert scripts["parts"].exit_code(document) == code


def test_a_tree_without_git_is_told_its_commit(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source_of = scripts["parts"].source_of
    assert source_of(tmp_path, None) == {"commit": "unknown", "dirty": None}
    assert source_of(tmp_path, COMMIT) == {"commit": COMMIT, "dirty": None}


def test_every_part_is_named_once_and_fits_the_time_of_all(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    parts = scripts["parts"]
    found = parts.parts(parts.Place("python", tmp_path))
    assert tuple(part.name for part in found) == parts.NAMES == scripts["evidence"].PARTS
    assert set(scripts["tables"].TABLES) == set(parts.NAMES)
    assert all(part.steps and part.seconds < 470 for part in found)
