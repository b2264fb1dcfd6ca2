"""A whole gate: its order, its verdict, its document, and errors before anything runs.

Cases are executed for real but in this process; the controls are fakes, except where said.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from verify import controls, goldens, results
from verify.cli import main
from verify.conduct import conduct, set_up
from verify.errors import InputFileError, UnsupportedError, VerifyError
from verify.evidence import Record
from verify.gates import running
from verify.reasons import GATE_REASONS
from verify.sessions import Session
from verify.staging import Stage

GOOD = """
import torch, verify

X = {"x": verify.normal(32, 8)}

@verify.case(inputs=X, claims=("repeat",), sources=("kernel_*.py",))
def good(x):
    return torch.tanh(x)

@verify.case(inputs=X, claims=("repeat",))
def other(x):
    return x * 2
"""
BAD = (
    GOOD
    + """
@verify.case(inputs=X, claims=("repeat",))
def bad(x):
    return x * torch.rand(())
"""
)
CONFIG = """
cases = ["gate_cases.py"]
[controls]
only = "reason/input-mutated"
[sources]
kernels = ["*.py"]
exempt = ["other_*.py"]
"""
PASSED = {"status": "passed", "passed": 1, "failed": []}
FAILED = {"status": "failed", "passed": 0, "failed": ["reason/input-mutated"]}


class Repository:
    """A repository with a gate, as the current directory; `calls` tells what ran, in order."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls, self.controls = root, [], PASSED

    def put(self, **files: str) -> Repository:
        for name, text in files.items():
            (self.root / name.replace("__", ".")).write_text(text)
        return self

    def git(self, *words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *names, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def gate(self, since: str | None = None, report: Path | None = None) -> dict[str, Any]:
        """The document of the gate, valid by the schema."""
        document = running.run(Path("gate.toml"), since, report)
        jsonschema.Draft202012Validator(results.schema()).validate(document)
        assert document["exit_code"] == results.exit_code(document)
        return document


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = tmp_path / "repo"
    root.mkdir()
    monkeypatch.chdir(root)
    made = Repository(root)

    def check(names: Sequence[str], *, progress: Callable[[str], None]) -> Mapping[str, Any]:
        made.calls.append("controls")
        assert names == ["reason/input-mutated"]
        return made.controls

    def here(cases: Any, ranks: int, options: Any, folder: Path, progress: Any) -> list[Record]:
        records: list[Record] = []
        for found, plan in cases:
            made.calls.append(found.case.name)
            stage = set_up(found, 0, 1, None, lambda failure: failure)
            assert isinstance(stage, Stage)
            conduct(Session(stage, plan, records.append))
        return records

    monkeypatch.setattr(controls, "run", check)
    monkeypatch.setattr(running, "collect", here)
    made.git("init", "-q", "-b", "main")
    made.put(gate_cases__py=GOOD, kernel_a__py="1", other_a__py="1", gate__toml=CONFIG)
    made.commit()
    return made


def findings_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(row["reason"], row["verdict"]) for row in document["gate"]["findings"]]


def test_a_gate_without_since(repository: Repository) -> None:
    document = repository.gate()
    assert repository.calls == ["controls", "good", "other"]
    assert (document["verdict"], document["exit_code"]) == ("VERIFIED", 0)
    assert document["controls"] == PASSED
    gate = document["gate"]
    used = gate.pop("budget")
    assert used.pop("used_seconds") > 0
    assert used == {
        "seconds": None,
        "executions": None,
        "used_executions": document["totals"]["executions"],
    }
    assert gate == {
        "config": "gate.toml",
        "since": None,
        "base": None,
        "kernels": ["*.py"],
        "changed": [],
        "affected": [],
        "uncovered": [],
        "left_out": [],
        "golden_changes": [],
        "findings": [],
    }


def test_without_changes_nothing_is_affected(repository: Repository) -> None:
    document = repository.gate("HEAD")
    assert (document["exit_code"], document["gate"]["affected"]) == (0, [])
    assert document["gate"]["base"] == repository.git("rev-parse", "HEAD")


def test_a_mismatch_is_worse_than_anything_else(repository: Repository) -> None:
    repository.controls = FAILED
    repository.put(gate_cases__py=BAD)
    document = repository.gate("main")
    assert (document["verdict"], document["exit_code"]) == ("MISMATCH", 1)
    assert findings_of(document) == [("control-failed", "UNVERIFIED")]
    assert repository.calls == ["controls", "good", "other", "bad"]


def test_a_control_that_fails(repository: Repository) -> None:
    repository.controls = FAILED
    document = repository.gate()
    assert (document["verdict"], document["exit_code"]) == ("UNVERIFIED", 3)
    assert findings_of(document) == [("control-failed", "UNVERIFIED")]
    assert "reason/input-mutated" in document["gate"]["findings"][0]["detail"]
    assert document["totals"]["verified"] == 2


def test_changed_sources_must_be_covered(repository: Repository) -> None:
    base = repository.git("rev-parse", "HEAD")
    repository.put(kernel_a__py="2", other_a__py="2").commit()
    document = repository.gate(base)
    assert (document["exit_code"], findings_of(document)) == (0, [])
    assert document["gate"]["changed"] == ["kernel_a.py", "other_a.py"]
    assert document["gate"]["affected"] == ["good"]

    repository.put(stray__py="1")
    document = repository.gate(base)
    assert (document["exit_code"], document["verdict"]) == (3, "UNVERIFIED")
    assert findings_of(document) == [("not-covered", "UNVERIFIED")]
    assert document["gate"]["uncovered"] == ["stray.py"]
    assert repository.gate()["exit_code"] == 0, "nobody asked"


def test_a_commit_that_only_renames_passes(repository: Repository) -> None:
    base = repository.git("rev-parse", "HEAD")
    repository.git("mv", "kernel_a.py", "kernel_b.py")
    repository.commit()
    document = repository.gate(base)
    assert (document["exit_code"], findings_of(document)) == (0, [])
    assert document["gate"]["affected"] == ["good", "other"]


def test_a_clean_tree_if_it_is_wanted(repository: Repository) -> None:
    repository.put(gate__toml="require_clean = true\n" + CONFIG).commit()
    report = repository.root / "report"
    results.write_text(report / "result.json", "earlier")
    assert findings_of(repository.gate(report=report)) == []
    document = repository.gate()
    assert findings_of(document) == [("dirty-source", "UNVERIFIED")]
    assert "report/result.json" in document["gate"]["findings"][0]["detail"]
    repository.put(gate__toml=CONFIG)
    assert findings_of(repository.gate()) == [], "nobody asked"


def test_the_budget_fails_what_it_cuts_off_and_lists_the_rest(repository: Repository) -> None:
    base = repository.git("rev-parse", "HEAD")
    repository.put(gate__toml=CONFIG + "[budget]\nexecutions = 1\n", kernel_a__py="2").commit()
    document = repository.gate(base)
    assert repository.calls == ["controls", "good"]
    assert (document["exit_code"], findings_of(document)) == (0, [])
    assert document["gate"]["left_out"] == ["other"]
    assert [case["case"] for case in document["cases"]] == ["good"]

    repository.put(gate_cases__py=GOOD + "# changed")
    document = repository.gate(base)
    assert (document["exit_code"], document["gate"]["left_out"]) == (3, [])
    assert findings_of(document) == [("budget-spent", "UNVERIFIED")]
    (claim,) = document["cases"][1]["claims"]
    assert (claim["verdict"], claim["executions"]) == ("UNVERIFIED", 0)
    (finding,) = claim["findings"]
    assert finding["reason"] == "not-run"
    assert "executions were made" in finding["detail"]
    assert repository.gate()["exit_code"] == 3, "without --since every case has to run"


def test_goldens_that_changed_are_listed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"case": "other", "kind": "bits", "tensor": "out", "old": None, "new": "a:b"}
    row |= {"max_ulp": None, "reason": "because"}
    asked = []

    def changes(folder: Path, revision: str) -> list[dict[str, Any]]:
        asked.append((folder, revision))
        return [row]

    monkeypatch.setattr(goldens, "changes_since", changes)
    document = repository.gate("main")
    assert document["gate"]["golden_changes"] == [row]
    assert document["gate"]["affected"] == ["other"]
    assert asked == [(repository.root / "golden", document["gate"]["base"])]
    repository.gate()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("config", "since", "said"),
    [
        ('cases = ["gate_cases.py", "gone.py"]', None, "cases[1] = 'gone.py': no such file"),
        ('cases = ["gate_cases.py::god"]', None, "did you mean good"),
        ('cases = ["moe/exact-none*"]', None, "cases[0] = 'moe/exact-none*': no case"),
        ('cases = ["other_a.py"]', None, "it holds no cases"),
        (CONFIG.replace("*.py", "*.cu"), None, "sources.kernels holds '*.cu', which matches no"),
        (CONFIG.replace("other_", "gone_"), None, "sources.exempt holds 'gone_*.py', which"),
        (CONFIG.replace("reason/", "reasons/"), None, "controls.only = 'reasons/input-mutated'"),
        ('cases = ["gate_cases.py"]\nclaims = ["ep"]', None, "gives no ep"),
        (CONFIG, "nothing", "git knows no commit 'nothing'"),
        ("cases = 1", None, "cases is an integer"),
    ],
)
def test_errors_come_before_anything_runs(
    repository: Repository, config: str, since: str | None, said: str
) -> None:
    repository.put(gate__toml=config)
    with pytest.raises(InputFileError) as caught:
        repository.gate(since)
    assert said in str(caught.value)
    assert since or str(caught.value).startswith("gate.toml: ")
    assert repository.calls == []


def test_a_source_that_a_case_misspells(repository: Repository) -> None:
    repository.put(gate_cases__py=GOOD.replace("kernel_*", "kernal_*"))
    with pytest.raises(VerifyError, match="its source 'kernal_"):
        repository.gate()
    assert repository.calls == []


def test_not_under_torchrun(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UnsupportedError, match="start it alone"):
        repository.gate()
    assert repository.calls == []


def test_cases_are_found_once_each_with_the_options_of_the_file(repository: Repository) -> None:
    cases = '["gate_cases.py", "gate_cases.py::good", "gate_cases.py"]'
    repository.put(gate__toml=CONFIG.replace('["gate_cases.py"]', f"{cases}\nseed = 7\nruns = 2"))
    document = repository.gate()
    assert [(case["case"], case["seed"]) for case in document["cases"]] == [
        ("good", 7),
        ("other", 7),
    ]
    assert [case["claims"][0]["executions"] for case in document["cases"]] == [2, 2]
    assert document["options"]["runs"] == 2
    assert "--seed 7" in document["cases"][0]["reproduce"]


def test_the_verb_writes_reports_and_ends_with_the_code(repository: Repository) -> None:
    def invoke(*words: str) -> Any:
        return CliRunner().invoke(main, list(words), prog_name="verify")

    shown = invoke("gate", "--config", "gate.toml", "--report", "out", "--since", "main")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stderr == ""
    written = {path.name for path in Path("out").iterdir()}
    assert {"result.json", "report.md", "junit.xml"} <= written
    assert results.read(Path("out"))["gate"]["since"] == "main"
    assert invoke("report", "out").stdout == shown.stdout
    repository.put(stray__py="")
    ended = invoke("gate", "--config", "gate.toml", "--report", "out", "--since", "main",
                   "--format", "json")  # fmt: skip
    assert ended.exit_code == 3
    assert json.loads(ended.stdout) == results.read(Path("out"))
    wrong = invoke("gate", "--report", "out")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "verify: ci/gate.toml: no such file" in wrong.stderr
    assert list(Path("out").iterdir()) == [], "the verdict of an earlier run is gone"


def test_every_reason_of_a_gate_is_in_the_schema_and_unverified() -> None:
    assert results.schema()["$defs"]["gate_reason"]["enum"] == list(GATE_REASONS)
    assert {reason.verdict.value for reason in GATE_REASONS.values()} == {"UNVERIFIED"}
