"""A whole gate: its order, its verdict, its document, and errors before anything runs.

Cases are executed for real but in this process; the controls are fakes, except where said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from golden_runs import entry, put

from verify import controls, goldens, results
from verify.cli import main
from verify.conduct import conduct, set_up
from verify.errors import InputFileError, UnsupportedError, VerifyError
from verify.evidence import Record
from verify.gates import running
from verify.plans import RunOptions
from verify.reasons import GATE_REASONS
from verify.rendering import render
from verify.running import shown
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
CONTROLS = '[controls]\nonly = "reason/input-mutated"\n'
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

    def gate(self, since: str | None = None, *written: Path) -> dict[str, Any]:
        """The document of the gate, valid by the schema."""
        document = running.run(Path("gate.toml"), since, written)
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
        "goldens_not_checked": 0,
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


def test_controls_that_cannot_run_here_are_kept(repository: Repository) -> None:
    left_out = {"gpu/split-k": "needs a CUDA device"}
    repository.controls = {**PASSED, "not_run": left_out}
    assert repository.gate()["controls"] == {**PASSED, "not_run": left_out}
    repository.controls = {**PASSED, "not_run": {}}
    assert repository.gate()["controls"] == PASSED


def test_a_gate_without_a_control_that_ran_is_not_verified(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = {"gpu/a": "needs a CUDA device", "gpu/b": "needs a CUDA device"}
    repository.controls = {"status": "not-run", "passed": 0, "failed": [], "not_run": left_out}
    document = repository.gate()
    assert (document["verdict"], document["exit_code"]) == ("UNVERIFIED", 3)
    assert findings_of(document) == [("control-failed", "UNVERIFIED")]
    said = "none of the chosen controls ran here (needs a CUDA device): gpu/a, gpu/b"
    assert document["gate"]["findings"][0]["detail"].startswith(said)
    assert said in render(document, "text")


def test_progress_counts_what_runs_here(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    running.run(Path("gate.toml"), None, (), progress=said.append)
    assert said[0] == "1 controls, then 2 cases"
    assert running._runnable(["reason/input-mutated", "gpu/split-k"]) == "1 of 2"


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
    report = repository.root / "report" / "result.json"
    results.write_text(report, "earlier")
    assert findings_of(repository.gate(None, report)) == []
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


@pytest.mark.parametrize("report", [".", "kernels", "../repo"])
def test_a_report_beside_the_sources_hides_none_of_them(
    repository: Repository, report: str
) -> None:
    """Once, every change below the folder of the report was left out, with `.` all of them."""
    (repository.root / "kernels").mkdir()
    wanted = CONFIG.replace('kernels = ["*.py"]', 'kernels = ["kernels/*.py"]')
    repository.put(gate__toml="require_clean = true\n" + wanted)
    Path("kernels/new.py").write_text("1")
    repository.commit()
    words = ["gate", "--config", "gate.toml", "--since", "HEAD", "--report", report]
    for _ in range(2):  # the second time the reports of the first are there
        passed = CliRunner().invoke(main, words)
        assert passed.exit_code == 0, passed.stdout
    Path("kernels/new.py").write_text("2")
    assert CliRunner().invoke(main, words).exit_code == 3
    gate = results.read(Path(report))["gate"]
    assert (gate["changed"], gate["uncovered"]) == (["kernels/new.py"], ["kernels/new.py"])
    assert [one["reason"] for one in gate["findings"]] == ["not-covered", "dirty-source"]
    assert gate["findings"][1]["detail"] == "not committed: kernels/new.py"


SWITCH = """
import torch, verify

@verify.case(inputs={"x": verify.normal(8, 4)}, claims=("repeat",), golden="exact")
def switched(x):
    return x * 2

@verify.case(inputs={"x": verify.normal(8, 4)}, claims=("repeat",), golden="exact")
def kept(x):
    return x * 3
"""


def stored(repository: Repository, *entries: tuple[str, str], kind: str = "exact") -> None:
    """Goldens of the names and targets, in the folder of the repository; values do not matter."""
    made = [
        entry(name, {"out": torch.ones(2)}, kind, target=target, inputs="i")
        for name, target in entries
    ]
    put(repository.root / "golden", *made)


def unclaimed(document: Mapping[str, Any]) -> tuple[list[str], int]:
    rows = [row for row in document["gate"]["findings"] if row["reason"] == "golden-unclaimed"]
    details = [row["detail"].removeprefix("declared by no case, so not compared: ") for row in rows]
    return details, document["gate"]["goldens_not_checked"]


def test_a_golden_that_is_switched_off_is_a_finding(repository: Repository) -> None:
    """Once, the same commit could take the golden out and change what it held."""
    targets = [("switched", "switch_a.py::switched"), ("kept", "switch_a.py::kept")]
    repository.put(switch_a__py=SWITCH, gate__toml='cases = ["switch_a.py"]\n' + CONTROLS)
    stored(repository, *targets)
    assert unclaimed(repository.gate()) == ([], 0)
    without = SWITCH.replace(', golden="exact")', ")", 1).replace("x * 2", "x * 3")
    repository.put(switch_b__py=without, gate__toml='cases = ["switch_b.py"]\n' + CONTROLS)
    stored(repository, *((name, f"switch_b.py::{name}") for name, _ in targets))
    document = repository.gate()
    assert unclaimed(document) == (["switched (exact)"], 0)
    assert document["exit_code"] == 3
    renamed = SWITCH.replace("def switched", "def other_name")
    repository.put(switch_c__py=renamed, gate__toml='cases = ["switch_c.py"]\n' + CONTROLS)
    stored(repository, *((name, f"switch_c.py::{name}") for name, _ in targets))
    assert unclaimed(repository.gate()) == (["switched (exact)"], 0)


def test_a_golden_of_what_is_gone_is_a_finding_and_of_another_gate_is_counted(
    repository: Repository,
) -> None:
    repository.put(not_run__py="raise SystemExit('the gate imports only what it runs')")
    stored(repository, ("a", "not_run.py::a"), ("b", "json.decoder:b"), ("moe", "moe"))
    document = repository.gate()
    # the built-in case is there, and declares no exact golden
    assert unclaimed(document) == (["moe (exact)"], 2)
    assert "goldens that no case of this gate checks: 2\n" in render(document, "text")
    stored(repository, ("a", "gone.py::a"), ("b", "json.gone:b"), ("c", "no_module.x:c"))
    assert unclaimed(repository.gate()) == (["a (exact), b (exact), c (exact)"], 0)


def test_a_gate_of_a_part_of_a_file_only_counts_the_other_goldens(repository: Repository) -> None:
    repository.put(switch_d__py=SWITCH, gate__toml='cases = ["switch_d.py::kept"]\n' + CONTROLS)
    stored(repository, ("switched", "switch_d.py::switched"), ("kept", "switch_d.py::kept"))
    assert unclaimed(repository.gate()) == ([], 1)


def test_goldens_are_compared_whatever_the_claims_of_the_gate(repository: Repository) -> None:
    text = 'cases = ["switch_e.py", "gate_cases.py"]\nclaims = ["repeat"]\n' + CONTROLS
    repository.put(switch_e__py=SWITCH, gate__toml=text)
    document = repository.gate()
    claims = {case["case"]: [c["claim"] for c in case["claims"]] for case in document["cases"]}
    assert claims == {
        "switched": ["repeat", "golden"],
        "kept": ["repeat", "golden"],
        "good": ["repeat"],
        "other": ["repeat"],
    }
    assert document["exit_code"] == 3, "no golden is stored"


def test_a_module_that_the_cases_import_affects_every_case(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, a budget left the broken case out as not affected."""
    (repository.root / "lib").mkdir()
    (repository.root / "checks").mkdir()
    monkeypatch.syspath_prepend(str(repository.root / "lib"))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    repository.put(
        gate__toml=CONFIG.replace('gate_cases.py"', 'checks/cases.py"')
        .replace('"*.py"', '"checks/*.py"').replace('"other_*.py"', '"checks/exempt_*.py"')
        + "[budget]\nexecutions = 1\n",
    )  # fmt: skip
    Path("lib/helper_of_gate.py").write_text("F = 2")
    Path("lib/idle_of_gate.py").write_text("F = 2")
    Path("checks/kernel_a.py").write_text("")
    Path("checks/exempt_a.py").write_text("")
    Path("checks/cases.py").write_text(GOOD + "import helper_of_gate\n")
    base = repository.commit()
    Path("lib/idle_of_gate.py").write_text("F = 3")
    Path("checks/exempt_a.py").write_text("1")
    Path("checks/kernel_a.py").write_text("1")
    document = repository.gate(base)
    assert (document["gate"]["affected"], document["gate"]["left_out"]) == (["good"], ["other"])
    Path("lib/helper_of_gate.py").write_text("F = 3")
    document = repository.gate(base)
    assert document["gate"]["affected"] == ["good", "other"]
    assert findings_of(document) == [("budget-spent", "UNVERIFIED")]
    repository.commit()
    assert repository.gate("HEAD")["gate"]["affected"] == []
    Path("checks/late.py").write_text("1")  # may be imported by a worker, when the case runs
    assert repository.gate("HEAD")["gate"]["affected"] == ["good", "other"]


def test_a_pattern_through_a_link_is_refused(repository: Repository) -> None:
    """Git names the file by its real folder, so the pattern matched no change."""
    (repository.root / "src" / "csrc").mkdir(parents=True)
    Path("src/csrc/new.cu").write_text("1")
    Path("csrc").symlink_to("src/csrc")

    def refused(patterns: str, exempt: str = "") -> str:
        text = f'cases = ["gate_cases.py"]\n{CONTROLS}[sources]\nkernels = [{patterns}]\n{exempt}'
        repository.put(gate__toml=text)
        try:
            repository.gate()
        except InputFileError as error:
            return str(error)
        return ""

    assert "reaches csrc/new.cu through a link; git names changes of it as src/csrc" in refused(
        '"csrc/*.cu"'
    )
    assert "write the real path" in refused('"csrc/**"')
    assert repository.calls == []
    assert refused('"src/csrc/*.cu"') == ""
    assert refused('"**/*.cu"') == "", "both names match"
    assert refused('"csrc/*.cu", "src/**"') == ""
    Path("src/deep").symlink_to("../kernels")
    (repository.root / "kernels").mkdir()
    assert "reaches src/deep through a link" in refused('"src/**/*.cu"')
    assert refused('"src/**/*.cu"', 'exempt = ["src/deep/**"]') != "", "it exempts no file"
    assert refused('"src/csrc/*.cu"') == "", "the pattern does not reach the link"


def test_options_stand_in_the_document_as_those_of_a_run(repository: Repository) -> None:
    options = repository.gate()["options"]
    assert options == json.loads(json.dumps(options)), "paths are text"
    assert options["golden"] == "golden"
    assert "keep_goldens" not in options
    given = RunOptions(keep=Path("kept"), golden=Path("golden"))
    assert options == {**shown(given), "keep": None}
    assert shown(given)["keep"] == "kept"
    assert shown(RunOptions())["golden"] is None


def test_every_reason_of_a_gate_is_in_the_schema_and_unverified() -> None:
    assert results.schema()["$defs"]["gate_reason"]["enum"] == list(GATE_REASONS)
    assert {reason.verdict.value for reason in GATE_REASONS.values()} == {"UNVERIFIED"}
