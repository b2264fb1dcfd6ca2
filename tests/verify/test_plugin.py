"""The pytest plugin, in projects of its own outside of the repository, with and without xdist.

`Project.here` runs pytest in this process, which is quick; `Project.run` in one of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from nested_pytest import run_here

from verify import results

ROOT = Path(__file__).resolve().parents[2]

CHECKS = """
import os, random
import pytest, torch, verify

def noisy(a):
    return a + int.from_bytes(os.urandom(4), "little")

def test_good(bitwise):
    bitwise.equal({"a": torch.ones(2)}, {"a": torch.ones(2)})

def test_bad(bitwise):
    bitwise.equal(torch.tensor([0.0]), torch.tensor([-0.0]))

def test_noisy(bitwise):
    bitwise.repeatable(noisy, torch.ones(3))

def test_empty(bitwise):
    bitwise.repeatable(lambda a: None, torch.ones(3))

def test_check(bitwise):
    @verify.case(inputs={"x": verify.normal(8)}, claims=("repeat",))
    def local(x):
        return x + 1
    assert bitwise.check(local).case == "local"

def test_forgot(bitwise):
    pass

@pytest.mark.skip(reason="later")
def test_skipped(bitwise):
    pass

def test_plain():
    pass
"""


class Project:
    """A folder with tests, and what one pytest run in it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        (folder / "pytest.ini").write_text(
            "[pytest]\naddopts = --strict-markers -p no:cacheprovider\nfilterwarnings = error\n"
        )

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    def run(self, *words: str, launcher: tuple[str, ...] = ("-m", "pytest")) -> str:
        """Both output streams; `code` holds the exit status."""
        done = subprocess.run(
            [sys.executable, *launcher, "-p", "xdist.plugin", "-p", "_mok_verify_pytest", *words],
            cwd=self.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
                "PYTHONPATH": str(ROOT),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # not a second time, when it is installed
                **self.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        self.code = done.returncode
        return done.stdout

    def here(self, *words: str) -> str:
        """The same in this process, without xdist."""
        self.code, said = run_here(self.folder, words, **self.environment)
        return said

    def result(self, folder: str = "out") -> dict:
        document = results.read(self.folder / folder)
        jsonschema.validate(document, results.schema())
        return document


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def _states(document):
    """(test, verdict, reason) of every entry."""
    return {
        (
            case["target"].rpartition("::")[2],
            case["verdict"],
            next((f["reason"] for c in case["claims"] for f in c["findings"]), None),
        )
        for case in document["cases"]
    }


EXPECTED = {
    ("test_good", "VERIFIED", None),
    ("test_bad", "MISMATCH", "bits-differ"),
    ("test_check", "VERIFIED", None),
    ("test_noisy", "MISMATCH", "bits-differ"),
    ("test_empty", "UNVERIFIED", "nothing-compared"),
    ("test_forgot", "UNVERIFIED", "not-run"),
    ("test_skipped", "UNVERIFIED", "not-run"),
}


def test_loading_imports_neither_torch_nor_verify(project):
    project.write(
        test_plain="""
import sys
def test_nothing_was_imported():
    assert "_mok_verify_pytest" in sys.modules
    assert "torch" not in sys.modules
    assert not [name for name in sys.modules if name.split(".")[0] == "verify"]
"""
    )
    shown = project.run("-q", "-W", "error")
    assert project.code == 0, shown
    assert "verdict" not in shown


@pytest.mark.parametrize("workers", [0, 2])
def test_outcomes_report_and_junit(project, workers):
    project.write(test_it=CHECKS)
    shown = project.run("--verify-report=out", "--junit-xml=j.xml", "-n", str(workers))
    assert project.code == 1
    assert "2 failed, 3 passed, 1 skipped, 2 errors" in shown
    document = project.result()
    assert _states(document) == EXPECTED
    assert document["environment"]["torch"]
    assert document["verdict"] == "MISMATCH"
    assert document["command"].startswith("pytest -p xdist.plugin")
    summary = [line for line in shown.splitlines() if line.startswith("verify: ")]
    assert len(summary) == 1
    assert summary[0].startswith("verify: verdict=MISMATCH 7 cases, ")
    assert summary[0].endswith(" unverified; out/result.json")

    tests = {
        test.get("name"): test
        for test in ElementTree.parse(project.folder / "j.xml").iter("testcase")
    }
    kinds = {
        name: [child.tag for child in test if child.tag in ("failure", "error", "skipped")]
        for name, test in tests.items()
    }
    assert kinds == {
        "test_good": [],
        "test_bad": ["failure"],
        "test_check": [],
        "test_noisy": ["failure"],
        "test_empty": ["error"],
        "test_forgot": ["error"],
        "test_skipped": ["skipped"],
        "test_plain": [],
    }
    properties = {
        (name, item.get("name"), item.get("value"))
        for name, test in tests.items()
        for item in test.iter("property")
    }
    assert ("test_bad", "verify_verdict", "MISMATCH") in properties
    assert ("test_bad", "verify_reason", "bits-differ") in properties
    assert ("test_good", "verify_verdict", "VERIFIED") in properties


def test_first_and_last_line_of_a_failure(project):
    project.write(test_it=CHECKS)
    shown = project.here("-k", "test_bad", "--verify-runs=3")
    lines = [line[1:].strip() for line in shown.splitlines() if line.startswith("E ")]
    assert lines[0] == "VerdictError: verdict=MISMATCH equal (test_it.py::test_bad)"
    assert any("0x80000000" in line for line in lines)
    assert lines[-1] == "reproduce: pytest test_it.py::test_bad --verify-runs 3"
    assert "verify/testing.py" not in shown  # __tracebackhide__
    assert ">       bitwise.equal(torch.tensor([0.0]), torch.tensor([-0.0]))" in shown


def test_allowed_unverified_passes_and_still_says_so(project):
    project.write(test_it=CHECKS)
    shown = project.here(
        "--verify-allow-unverified", "--verify-report=out", "-k", "empty or forgot or good"
    )
    assert project.code == 0, shown
    assert "3 passed" in shown
    assert "verify: verdict=UNVERIFIED" in shown
    assert "(allowed to pass)" in shown
    assert project.result()["exit_code"] == 3


def test_a_mismatch_is_never_allowed(project):
    project.write(test_it=CHECKS)
    project.here("--verify-allow-unverified", "-k", "bad")
    assert project.code == 1


CASES = """
import os
import torch, verify

X = {"x": verify.normal(8, 8)}

@verify.case(inputs=X, claims=("repeat",), name="fine")
def good(x):
    return x @ x

@verify.case(inputs=X, claims=("repeat",))
def bad(x):
    return x + int.from_bytes(os.urandom(4), "little")
"""


@pytest.mark.slow
def test_module_level_cases_are_items(project):
    project.write(test_cases=CASES)
    shown = project.here("-v", "--verify-report=out", "--verify-runs=2")
    assert project.code == 1
    assert "test_cases.py::good PASSED" in shown
    assert "test_cases.py::bad FAILED" in shown
    cases = {case["case"]: case for case in project.result()["cases"]}
    assert cases["fine"]["verdict"] == "VERIFIED"
    assert cases["fine"]["outputs"]["0"]["out"].startswith("float32[8,8]")
    assert cases["bad"]["verdict"] == "MISMATCH"
    assert "reproduce: verify run test_cases.py::bad" in shown


def test_collecting_concludes_nothing(project):
    project.write(test_it="def test_it(bitwise):\n    pass\n")
    shown = project.here("--collect-only", "-q", "--verify-report=out")
    assert "test_it.py::test_it" in shown
    assert "verdict" not in shown
    assert not (project.folder / "out").exists()


def test_a_case_that_cannot_be_run_is_an_error(project):
    project.write(
        test_cases="""
import verify
@verify.case(claims=("repeat",))
def broken():
    raise RuntimeError("always")
"""
    )
    shown = project.here("--verify-report=out")
    assert "1 error" in shown
    assert _states(project.result()) == {("broken", "UNVERIFIED", "case-error")}


def test_a_crashed_worker_leaves_its_test_and_the_rest_unverified(project):
    project.write(
        test_crash="""
import os, signal, torch
def test_1(bitwise):
    bitwise.equal(torch.ones(2), torch.ones(2))
def test_2(bitwise):
    bitwise.equal(torch.ones(2), torch.ones(2))
    os.kill(os.getpid(), signal.SIGKILL)
def test_3(bitwise):
    bitwise.equal(torch.ones(2), torch.ones(2))
def test_4():
    pass
"""
    )
    project.run("-n", "1", "--max-worker-restart=0", "--verify-report=out")
    assert project.code == 1
    document = project.result()
    assert _states(document) == {
        ("test_1", "VERIFIED", None),  # what was reported before the death is kept
        ("test_2", "UNVERIFIED", "crashed"),
        ("test_3", "UNVERIFIED", "not-run"),
    }
    assert document["exit_code"] == 3


def test_what_stopped_early_never_ran(project):
    project.write(test_it=CHECKS)
    project.here("-x", "-k", "bad or noisy", "--verify-report=out")
    assert _states(project.result()) == {
        ("test_bad", "MISMATCH", "bits-differ"),
        ("test_noisy", "UNVERIFIED", "not-run"),
    }


def test_a_report_without_any_check_says_that_nothing_ran(project):
    project.write(test_plain="def test_plain():\n    pass\n")
    shown = project.run("--verify-report=out")
    assert project.code == 0
    assert "nothing was checked" in shown
    assert project.result()["exit_code"] == 3


def test_marker_gives_options_and_refuses_others(project):
    project.write(
        test_marks="""
import pytest
@pytest.mark.verify(runs=3, claims=("repeat",))
def test_options(bitwise):
    assert bitwise.defaults == {"runs": 3, "claims": ("repeat",)}
@pytest.mark.verify(run=3)
def test_typo(bitwise):
    pass
"""
    )
    shown = project.here("--verify-allow-unverified")
    assert "1 passed, 1 error" in shown
    assert "the marker verify takes claims, runs, ranks, timeout by name, not run" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verify-runs=0"], "'0' is not a positive number"),
        (["--verify-report=pytest.ini"], "it is a file, not a folder"),
    ],
)
def test_wrong_options(project, words, said):
    assert said in project.here(*words)
    assert project.code == 4


def test_results_that_cannot_be_written_fail_the_run(project):
    project.write(
        test_it="""
import pathlib, torch
def test_good(bitwise):
    bitwise.equal(torch.ones(2), torch.ones(2))
    pathlib.Path("out").write_text("in the way")
"""
    )
    shown = project.here("--verify-report=out")
    assert "cannot write out/result.json" in shown
    assert project.code == 3


SHADOW = "which is not the package of mok-verify"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_verify_py_of_the_user_is_named(project, workers):
    project.write(verify="mine = 1\n", test_it=CHECKS, test_cases=CASES)
    shown = project.run("-n", str(workers), "-k", "test_good or case")
    assert project.code != 0
    assert f"`import verify` finds {project.folder / 'verify.py'}, {SHADOW}" in shown
    assert "Rename that file" in shown


def test_a_verify_py_of_the_user_is_no_matter_without_checks(project):
    project.write(
        verify="mine = 1\n", test_it="import verify\ndef test_it():\n    assert verify.mine\n"
    )
    shown = project.run()
    assert project.code == 0, shown
    assert SHADOW not in shown


def test_names_that_no_report_likes(project):
    project.write(
        test_names="""
import pytest, torch
@pytest.mark.parametrize("value", ["a::b|`<script>", "line\\nbreak", "\\udc80"])
def test_name(bitwise, value):
    bitwise.equal({value: torch.ones(1)}, {value: -torch.ones(1)})
"""
    )
    project.run("-n", "1", "--verify-report=out", "--junit-xml=j.xml")
    document = project.result()
    assert [case["verdict"] for case in document["cases"]] == ["MISMATCH"] * 3
    assert len(json.dumps(document)) > 0
    ElementTree.parse(project.folder / "j.xml")


def test_cases_in_lists_are_items_too(project):
    project.write(
        test_lists="""
import torch, verify
def make(name):
    return verify.case(name=name, claims=("repeat",))(lambda: torch.ones(2))
numbers = [1, 2]
table = [make("first"), make("second"), 3]
again = table
more = (table[0], make("third"))
named = table[1]
"""
    )
    shown = project.here("--collect-only", "-q")
    assert [line for line in shown.splitlines() if "::" in line] == [
        "test_lists.py::table[first]",
        "test_lists.py::more[third]",
        "test_lists.py::named",
    ]
