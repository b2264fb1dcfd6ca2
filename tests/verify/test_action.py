"""The GitHub action: inputs are never part of a script, and its script runs a gate anywhere.

The script is run in scratch repositories with a HOME of their own and without network: nothing is
installed, and the interpreter of these tests, or a `verify` on PATH, is what it finds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verify import results

CI = Path(__file__).resolve().parents[2] / "ci"
ACTION = (CI / "action.yml").read_text()
SCRIPT = (CI / "action.sh").read_text()
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")

CASES = """
import torch, verify

@verify.case(inputs={"x": verify.normal(32, 8)}, claims=("repeat",))
def layer(x):
    return torch.tanh(x)
"""
BAD = CASES.replace("torch.tanh(x)", "x * torch.rand(())")
CONFIG = 'cases = ["my_case.py"]\nruns = 2\n[controls]\nonly = "reason/input-mutated"\n'


def steps() -> list[str]:
    """The steps of the action, each as its text."""
    return re.split(r"\n    - ", ACTION.split("\n  steps:\n")[1])


def test_no_expression_is_part_of_a_script() -> None:
    scripts = [line for line in ACTION.splitlines() if re.match(r"\s*(- )?[\"']?run\b", line)]
    assert scripts == ['      run: bash "$GITHUB_ACTION_PATH/action.sh"']
    for line in ACTION.splitlines():
        if EXPRESSION.search(line):
            allowed = r"      +[A-Z_a-z-]+: \$\{\{ [^}]+ \}\}|    value: \$\{\{ [^}]+ \}\}"
            paths = r"          \$\{\{ steps\.gate\.outputs\.report \}\}/[a-z.]+"
            assert re.fullmatch(f"{allowed}|{paths}", line), line
    assert "${{" not in SCRIPT
    assert "eval" not in SCRIPT
    assert "\t" not in ACTION


def test_every_input_reaches_the_script_or_a_step_by_name() -> None:
    declared = re.findall(r"^  ([a-z-]+):\n    description", ACTION.split("\noutputs:")[0], re.M)
    assert declared == ["config", "since", "report", "python", "install", "artifact"]
    used = {
        name for found in EXPRESSION.findall(ACTION) for name in re.findall(r"inputs\.(\w+)", found)
    }
    assert used == set(declared)
    given = dict(re.findall(r"^        (GATE_\w+): \$\{\{ (.+) \}\}$", ACTION, re.M))
    assert {"inputs.config", "inputs.since", "inputs.report", "inputs.install"} <= set(
        given.values()
    )
    assert set(re.findall(r"GATE_[A-Z]+", SCRIPT)) == set(given)


def test_the_report_is_uploaded_whatever_happened_and_outputs_are_those_of_the_script() -> None:
    upload = next(step for step in steps() if "upload-artifact" in step)
    assert upload.startswith("if: always()")
    for name in ("result.json", "report.html", "report.md", "junit.xml"):
        assert f"outputs.report }}}}/{name}" in upload
    outputs = set(re.findall(r"steps\.gate\.outputs\.([\w-]+)", ACTION.split("\nruns:")[0]))
    assert outputs == {"verdict", "exit-code", "report"}
    assert outputs <= set(re.findall(r"([a-z-]+)=%s", SCRIPT))
    assert "continue-on-error" not in ACTION


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A repository with one commit: a case that passes, and a gate."""
    root = tmp_path / "some repo"
    (root / "ci").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (root / "my_case.py").write_text(CASES)
    (root / "ci" / "gate.toml").write_text(CONFIG)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], cwd=root, env=_environment(root), check=True)
    return root


def _environment(root: Path) -> dict[str, str]:
    """What a fresh machine has: PATH and HOME; the package is found by PYTHONPATH."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    home = {"HOME": str(root.parent / "home"), "GIT_CONFIG_NOSYSTEM": "1"}
    return {**kept, **home, "PYTHONPATH": str(CI.parent), "CI": "true"}


def act(root: Path, *, github: bool = True, **given: str) -> Any:
    """Runs the script; its outputs and its summary are those that a runner would read."""
    files = {name: root.parent / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    environment = {**_environment(root), "GATE_INSTALL": "none", "GATE_PYTHON": sys.executable}
    if github:
        environment |= {name: str(file) for name, file in files.items()}
        environment["GITHUB_ACTIONS"] = "true"
    done = subprocess.run(
        ["bash", CI / "action.sh"],
        cwd=root,
        env={**environment, **given},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = files["GITHUB_OUTPUT"].read_text().splitlines()
    outputs = dict(line.split("=", 1) for line in lines)
    assert len(outputs) == len(lines)
    return SimpleNamespace(
        code=done.returncode,
        out=done.stdout,
        err=done.stderr,
        outputs=outputs,
        summary=files["GITHUB_STEP_SUMMARY"].read_text(),
    )


def files_of(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"__pycache__"}


@pytest.mark.slow
def test_a_gate_that_passes(scratch: Path) -> None:
    done = act(scratch, GATE_SINCE="HEAD")
    assert done.code == 0, done.out + done.err
    report = scratch / "verify-report"
    assert done.outputs == {"verdict": "VERIFIED", "exit-code": "0", "report": str(report)}
    assert done.summary == (report / "report.md").read_text()
    assert done.summary.startswith("### verdict=VERIFIED 1 case, 1 claim")
    document = results.read(report)
    assert document["controls"]["passed"] == 1
    assert document["gate"]["since"] == "HEAD"
    assert done.out.splitlines()[-1].startswith("verdict=VERIFIED")


@pytest.mark.slow
def test_a_gate_that_fails_and_inputs_that_are_only_names(scratch: Path) -> None:
    (scratch / "my_case.py").write_text(BAD)
    config = "$(touch pwned) `touch pwned`; touch pwned\n&& \"touch\" 'pwned'.toml"
    (scratch / config).write_text(CONFIG)
    done = act(scratch, GATE_CONFIG=config, GATE_REPORT="re port;$(touch pwned)")
    assert done.code == 1, done.out + done.err
    report = scratch / "re port;$(touch pwned)"
    assert done.outputs == {"verdict": "MISMATCH", "exit-code": "1", "report": str(report)}
    assert "consumes&#45;global&#45;rng" in done.summary
    assert results.read(report)["gate"]["config"] == config
    assert files_of(scratch) == {".git", "ci", "my_case.py", config, report.name}


def test_a_malformed_file_is_no_verdict_and_leaves_no_earlier_report(scratch: Path) -> None:
    (scratch / "ci" / "gate.toml").write_text("cases = 1")
    report = scratch / "verify-report"
    report.mkdir()
    for name in ("result.json", "report.md", "report.html", "junit.xml", "mine.txt"):
        (report / name).write_text("verdict=VERIFIED")
    done = act(scratch)
    assert (done.code, done.out) == (2, "")
    assert "verify: ci/gate.toml: cases is an integer, it must be a list" in done.err
    assert done.outputs == {"verdict": "ERROR", "exit-code": "2", "report": str(report)}
    assert done.summary == "### verdict=ERROR: the gate ended with exit code 2; its log says why\n"
    assert files_of(report) == {"mine.txt"}


@pytest.mark.parametrize("since", ["$(touch pwned)\nb", "--help"])
def test_a_revision_that_is_none(scratch: Path, since: str) -> None:
    done = act(scratch, GATE_SINCE=since)
    assert done.code == 2
    assert "verify: --since" in done.err
    assert files_of(scratch) == {".git", "ci", "my_case.py"}


@pytest.mark.parametrize("report", ["a\nverdict=VERIFIED", "a\rb", "a*b", "[a]"])
def test_a_report_that_an_upload_would_misread(scratch: Path, report: str) -> None:
    done = act(scratch, GATE_REPORT=report)
    assert (done.code, done.out) == (2, "")
    assert "GATE_REPORT leads to a name with" in done.err
    assert done.outputs == {"verdict": "ERROR", "exit-code": "2"}
    assert files_of(scratch) == {".git", "ci", "my_case.py"}


def test_outside_of_github_and_with_a_verify_on_path(scratch: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "verify").write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" >asked\n'
        f'exec {shlex.quote(sys.executable)} -P -m verify "$@"\n'
    )
    (tools / "verify").chmod(0o755)
    (scratch / "ci" / "gate.toml").unlink()
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = act(scratch, github=False, PATH=path, GATE_PYTHON="", GATE_SINCE="main~2")
    assert (done.code, done.outputs, done.summary) == (2, {}, "")
    assert "ci/gate.toml: no such file" in done.err
    assert (scratch / "asked").read_text().splitlines() == [
        "gate",
        "--config=ci/gate.toml",
        f"--report={scratch}/verify-report",
        "--since=main~2",
    ]


def stand_in(folder: Path, name: str, text: str) -> str:
    """An executable that stands for an interpreter."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("ends", "code"), [(0, 2), (1, 2), (3, 2), (2, 2), (137, 137), (13, 13)])
def test_a_verdict_without_a_result_is_none(
    scratch: Path, tmp_path: Path, ends: int, code: int
) -> None:
    """As when the package is missing: Python ends with 1, and that is no mismatch."""
    done = act(scratch, GATE_PYTHON=stand_in(tmp_path, "python", f"exit {ends}"))
    assert (done.code, done.outputs["verdict"]) == (code, "ERROR")
    assert done.outputs["exit-code"] == str(code)
    assert ("left no result" in done.err) == (ends in (0, 1, 3))


def test_a_summary_that_is_too_long_is_left_out(scratch: Path, tmp_path: Path) -> None:
    writes = 'for last; do :; done; d="${last#--report=}"; mkdir -p "$d"; : >"$d/result.json"\n'
    for size, shown in ((199_999, True), (200_000, False)):
        text = f'{writes}head -c {size} /dev/zero | tr "\\0" x >"$d/report.md"; exit 3'
        done = act(scratch, GATE_PYTHON=stand_in(tmp_path, "python", text))
        assert (done.code, done.outputs["verdict"]) == (3, "UNVERIFIED")
        assert (len(done.summary) == size) == shown
        assert done.summary.startswith("xxx" if shown else "### verdict=UNVERIFIED")


@pytest.mark.parametrize(
    ("install", "asked"),
    [
        ("", [str(CI.parent)]),
        (
            "a==1\n\n  \n./b c[x]\n$(touch pwned)\n--index-url=x",
            ["a==1", "./b c[x]", "$(touch pwned)", "--index-url=x"],
        ),
    ],
)
def test_what_is_installed_is_a_list_of_names(
    scratch: Path, tmp_path: Path, install: str, asked: list[str]
) -> None:
    log = tmp_path / "log"
    python = stand_in(tmp_path, "python", f'printf "%s\\n" "$@" >>{shlex.quote(str(log))}; exit 2')
    done = act(scratch, GATE_PYTHON=python, GATE_INSTALL=install)
    assert done.code == 2
    assert "pip could not install" in done.err
    words = log.read_text().splitlines()
    assert words[:3] == ["-m", "pip", "install"]
    assert words[words.index("--") + 1 :] == asked
    assert files_of(scratch) == {".git", "ci", "my_case.py"}


def test_nothing_is_installed_unasked_outside_of_a_runner(scratch: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    python = stand_in(tmp_path, "python", f'printf "%s\\n" "$@" >>{shlex.quote(str(log))}; exit 2')
    act(scratch, github=False, GATE_PYTHON=python, GATE_INSTALL="")
    assert "pip" not in log.read_text().splitlines()
    assert "gate" in log.read_text().splitlines()


def test_the_report_is_no_part_of_the_repository(scratch: Path) -> None:
    writes = 'for last; do :; done; d="${last#--report=}"; mkdir -p "$d"; : >"$d/result.json"'
    act(scratch, GATE_PYTHON=stand_in(scratch.parent, "python", writes))
    status = ["git", "-C", str(scratch), "status", "--porcelain", "--untracked-files=all"]
    assert (scratch / "verify-report" / ".gitignore").read_text() == "*\n"
    assert "verify-report" not in subprocess.run(status, capture_output=True, text=True).stdout


@pytest.mark.parametrize("python", ["/nowhere/python", "9.99", "$(touch pwned)"])
def test_an_interpreter_that_is_not_there(scratch: Path, python: str) -> None:
    done = act(scratch, GATE_PYTHON=python)
    assert (done.code, done.outputs["verdict"]) == (2, "ERROR")
    assert "no interpreter" in done.err
    assert files_of(scratch) == {".git", "ci", "my_case.py"}


def test_outputs_that_cannot_be_written_are_no_verdict(scratch: Path) -> None:
    done = act(scratch, GATE_CONFIG="gone.toml", GITHUB_OUTPUT=str(scratch / "none" / "file"))
    assert done.code == 2
    assert done.summary == ""
