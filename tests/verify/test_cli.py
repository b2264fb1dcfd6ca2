"""The command line: exit codes whatever happens, clean stdout, help with examples, real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from verify import results, running, targets
from verify.cases import Case
from verify.cli import main
from verify.errors import CaseError
from verify.verdicts import CaseVerdict

ROOT = Path(__file__).resolve().parents[2]
VERBS = (
    "run",
    "list",
    "diff",
    "golden",
    "gate",
    "controls",
    "report",
    "env",
    "init",
    "trace",
    "weights",
    "replay",
    "onpolicy",
)


def invoke(*words):
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="verify")


@pytest.fixture
def fake(monkeypatch):
    """Replaces the run; the returned namespace holds what to give back and what was asked for."""
    asked = types.SimpleNamespace(result=None, error=None, targets=None, options=None)

    def run(wanted, options, *, progress):
        asked.targets, asked.options = wanted, options
        progress("a step")
        if asked.error is not None:
            raise asked.error
        return asked.result

    monkeypatch.setattr(running, "run", run)
    return asked


def _spawn(*words, cwd=ROOT, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_examples_and_exit_codes(verb):
    shown = invoke(verb, "--help")
    assert shown.exit_code == 0
    assert f"  verify {verb}" in shown.output.split("Examples:")[1]
    assert "Exit codes: 0 verified, 1 mismatch, 2 usage" in shown.output


def test_help_lists_the_verbs_without_importing_torch():
    code = (
        "import os, sys, runpy; sys.argv = ['verify', '--help']\n"
        "leave = os._exit\n"
        "os._exit = lambda code: leave(code or 9 * ('torch' in sys.modules))\n"
        "runpy.run_module('verify', run_name='__main__')"
    )
    done = _spawn("-c", code)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)


def test_run_passes_options_on(fake, make_result):
    fake.result = make_result()
    shown = invoke(
        "run", "a.py", "moe", "--ranks", 2, "--runs", 9, "--processes", 1,
        "--claims", "repeat, process", "--seed", 3, "--timeout", 5,
    )  # fmt: skip
    assert shown.exit_code == 0
    assert shown.stdout.endswith("verdict=VERIFIED 1 case, 1 claim, 1 rank, 1 execution\n")
    assert fake.targets == ("a.py", "moe")
    assert fake.options == running.RunOptions(
        ranks=2, runs=9, processes=1, claims=("repeat", "process"), seed=3, timeout=5.0
    )
    invoke("run", "a.py")
    assert fake.options == running.RunOptions()


def test_exit_codes_of_run(fake, make_result, mixed, make_claim):
    fake.result = mixed
    assert invoke("run", "x").exit_code == 1
    fake.result = make_result([CaseVerdict("c", "c", [])])
    assert invoke("run", "x").exit_code == 3
    fake.result = make_result([])
    assert invoke("run", "x").exit_code == 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CaseError("no case 'x'\nsecond line"), "verify: no case 'x'\nsecond line\n"),
        (ValueError("odd"), "verify: unexpected ValueError: odd (VERIFY_DEBUG=1"),
        (SystemExit(0), "verify: the code under test called sys.exit(0)"),
        (SystemExit(1), "verify: the code under test called sys.exit(1)"),
        (KeyboardInterrupt(), "verify: interrupted; nothing is claimed"),
        (BrokenPipeError(), ""),
        (MemoryError(), "verify: unexpected MemoryError"),
    ],
)
def test_whatever_is_raised_ends_with_2(fake, monkeypatch, error, said):
    monkeypatch.setattr("verify.terminal._discard_output", lambda: None)
    monkeypatch.delenv("VERIFY_DEBUG", raising=False)
    fake.error = error
    shown = invoke("run", "x")
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith(said)
    assert "Traceback" not in shown.stderr


def test_traceback_when_debugging(fake, monkeypatch):
    monkeypatch.setenv("VERIFY_DEBUG", "1")
    fake.error = ValueError("odd")
    shown = invoke("run", "x")
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("run", "x", "--runs", "0"),
        ("run", "x", "--timeout", "0"),
        ("run", "x", "--claims", ","),
        ("run", "x", "--format", "yaml"),
        ("nothing",),
        ("diff", "one"),
        (),
    ],
)
def test_usage_errors(fake, words):
    shown = invoke(*words)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert "Usage: verify" in shown.stderr


def test_json_stands_alone_on_stdout(fake, mixed):
    fake.result = mixed
    shown = invoke("run", "x", "--format", "json")
    assert json.loads(shown.stdout) == mixed
    assert shown.stderr == ""  # progress only on a terminal


def test_reports_are_written_and_can_be_drawn_again(fake, mixed, tmp_path):
    fake.result = mixed
    folder = tmp_path / "deep" / "report"
    shown = invoke("run", "x", "--report", folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "junit.xml",
        "report.html",
        "report.md",
        "result.json",
    ]
    again = invoke("report", folder)
    assert (again.exit_code, again.stdout) == (0, shown.stdout)
    assert invoke("report", folder, "--exit-code").exit_code == 1
    page = invoke("report", folder / "result.json", "--format", "markdown").stdout
    assert page == (folder / "report.md").read_text()


def test_reports_of_an_earlier_run_do_not_outlive_a_failed_one(fake, make_result, tmp_path):
    fake.result = make_result()
    assert invoke("run", "x", "--report", tmp_path).exit_code == 0
    (tmp_path / "mine.txt").write_text("kept")
    fake.error = CaseError("gone")
    assert invoke("run", "x", "--report", tmp_path).exit_code == 2
    assert os.listdir(tmp_path) == ["mine.txt"]
    assert invoke("report", tmp_path, "--exit-code").exit_code == 2
    results.write(make_result(), tmp_path / "result.json")
    (tmp_path / "report.md").mkdir()
    shown = invoke("run", "x", "--report", tmp_path)
    assert shown.exit_code == 2
    assert "cannot remove" in shown.stderr


@pytest.mark.parametrize("document", [None, "{}", "[]", "not JSON", '{"tool": {"name": "other"}}'])
@pytest.mark.parametrize("page", ["report.md", "report.html", "junit.xml"])
def test_a_report_does_not_replace_files_of_somebody_else(
    fake, make_result, tmp_path, page, document
):
    fake.result = make_result()
    (tmp_path / page).write_text("mine")
    if document is not None:
        (tmp_path / "result.json").write_text(document)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    shown = invoke("run", "x", "--report", tmp_path)
    assert (shown.exit_code, shown.stdout, fake.targets) == (2, "", None)
    assert page in shown.stderr
    assert "but no result.json that verify wrote" in shown.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_report_replaces_one_of_an_earlier_run_whatever_its_version(fake, make_result, tmp_path):
    fake.result = make_result()
    (tmp_path / "report.md").write_text("old")
    results.write({**make_result(), "schema_version": 9}, tmp_path / "result.json")
    shown = invoke("run", "x", "--report", tmp_path)
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "report.md").read_text() != "old"
    assert results.read(tmp_path) == fake.result


def test_report_of_something_else(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    shown = invoke("report", tmp_path / "x.json", "--exit-code")
    assert shown.exit_code == 2
    assert str(tmp_path / "x.json") in shown.stderr
    assert invoke("report", tmp_path / "none").exit_code == 2


def test_only_rank_0_prints_under_torchrun(fake, make_result, monkeypatch, tmp_path):
    fake.result = make_result()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    shown = invoke("run", "x", "--report", tmp_path / "r")
    assert (shown.exit_code, shown.output) == (0, "")
    assert not (tmp_path / "r").exists()
    monkeypatch.setenv("RANK", "0")
    assert "verdict=VERIFIED" in invoke("run", "x", "--report", tmp_path / "r").stdout
    assert (tmp_path / "r" / "result.json").exists()


def test_progress_needs_a_terminal_and_no_ci(monkeypatch, capsys):
    from verify.terminal import progress

    progress()("hidden")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("CI", "true")
    progress()("hidden")
    monkeypatch.delenv("CI")
    progress()("shown\x1b")
    assert capsys.readouterr().err == "shown\\x1b\n"


def test_list_in_both_formats_and_empty(monkeypatch):
    found = [targets.Found(Case(name="c", execute=lambda: None, description="d"), "m:c")]
    monkeypatch.setattr(targets, "builtin", lambda: found)
    assert "m:c" in invoke("list").stdout
    (entry,) = json.loads(invoke("list", "--format", "json").stdout)
    assert entry["claims"] == ["repeat", "process", "memory", "threads", "history"]
    monkeypatch.setattr(targets, "builtin", list)
    assert invoke("list").exit_code == 3
    assert json.loads(invoke("list", "--format", "json").stdout) == []


def test_list_names_close_cases(tmp_path):
    path = tmp_path / "cases_for_list.py"
    path.write_text("import verify\n@verify.case\ndef attention():\n    'Softmax.'\n")
    assert "Softmax." in invoke("list", path).stdout
    shown = invoke("list", f"{path}::atention")
    assert shown.exit_code == 2
    assert "did you mean attention" in shown.stderr


def test_diff_exit_codes(tmp_path, make_result, mixed):
    results.write(make_result(), tmp_path / "a.json")
    results.write(mixed, tmp_path / "b.json")
    results.write(make_result([]), tmp_path / "c.json")
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    assert invoke("diff", a, a).exit_code == 0
    assert invoke("diff", a, b).exit_code == 1
    assert invoke("diff", c, c).exit_code == 3
    assert invoke("diff", a, tmp_path / "none").exit_code == 2
    assert json.loads(invoke("diff", a, b, "--format", "json").stdout)["exit_code"] == 1


def test_env_in_both_formats():
    record = json.loads(invoke("env", "--format", "json").stdout)
    assert record["torch"]
    assert "flags.deterministic_algorithms" in invoke("env").stdout


def test_controls_are_listed_chosen_and_run(monkeypatch):
    from verify import controls

    names = [line.split()[0] for line in invoke("controls", "--list").stdout.splitlines()]
    assert names == controls.names()
    assert json.loads(invoke("controls", "--list", "--format", "json").stdout) == names
    shown = invoke("controls", "--only", "no such control")
    assert (shown.exit_code, shown.stdout) == (3, "")
    assert "no control matches 'no such control'" in shown.stderr

    asked = []

    def run(only, disable, *, progress):
        asked.append((only, disable))
        return {**controls.ControlsReport(()).to_json(), "exit_code": 1}

    monkeypatch.setattr(controls, "run", run)
    shown = invoke("controls", "--only", names[0], "--disable", "memory", "--format", "json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["exit_code"] == 1
    assert asked == [([names[0]], "memory")]
    assert "nothing ran" in invoke("controls").stdout


def test_init_refuses_to_overwrite_and_names_that_shadow(tmp_path):
    path = tmp_path / "sub dir" / "case.py"
    shown = invoke("init", path)
    assert shown.exit_code == 0
    assert f"verify run '{path}'" in shown.stdout
    path.write_text("mine")
    assert invoke("init", path).exit_code == 2
    assert path.read_text() == "mine"
    assert os.listdir(path.parent) == ["case.py"]
    assert invoke("init", tmp_path / "verify.py").exit_code == 2
    assert invoke("init", tmp_path / "case.txt").exit_code == 2
    assert invoke("init", path / "below_a_file.py").exit_code == 2


def test_a_closed_pipe_is_no_verdict(tmp_path, make_result):
    results.write(make_result(), tmp_path / "result.json")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "verify", "report", str(tmp_path), "--exit-code"],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (2, "")


ENDS = """
import atexit, os, sys, threading, time, types
import verify.running, verify.results
from verify import results
from verify.cli import entry, main

def run(targets, options, *, progress):
    atexit.register(os._exit, 0)
    threading.Thread(target=time.sleep, args=(60,)).start()
    if options.seed:
        try:
            print("ready", flush=True)
            # a signal between the last bytecode and the system call does not wake a sleep
            for _ in range(600):
                time.sleep(0.1)
        finally:
            print("cleaned up")
    return results.read(__import__("pathlib").Path("earlier.json"))

verify.running.run = run
sys.argv[0] = "verify"
"""


@pytest.mark.parametrize("call", ["main()", "entry()"])
def test_an_exit_that_the_code_under_test_registered_does_not_count(tmp_path, mixed, call):
    results.write(mixed, tmp_path / "earlier.json")
    done = _spawn("-c", ENDS + call, "run", "x", cwd=tmp_path)
    assert done.stdout.splitlines()[-1].startswith("verdict=MISMATCH"), done.stderr
    assert done.returncode == 1


HEARS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_cleans_up_and_ends_with_2(tmp_path, number):
    with subprocess.Popen(
        # under nohup it would inherit that SIGHUP is ignored, and rightly go on
        [sys.executable, "-c", HEARS + ENDS + "entry()", "run", "x", "--seed", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "cleaned up\n")
    assert err == "verify: terminated; nothing is claimed\n"


def test_an_import_that_fails_is_told_in_one_line(tmp_path):
    path = tmp_path / "my_case.py"
    path.write_text("import verify\nprint('hello')\nraise SystemExit(0)\n")
    shown = invoke("run", path, "--format", "json")
    assert (shown.exit_code, shown.stdout) == (2, "")
    said = f"hello\nverify: importing {path} failed: SystemExit: 0 (line 3)\n"
    assert shown.stderr == said


def test_an_error_whose_text_raises(fake):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    fake.error = Odd()
    shown = invoke("run", "x")
    assert shown.exit_code == 2
    assert "unexpected Odd: (its message cannot be shown" in shown.stderr


def test_output_where_the_encoding_lacks_characters(tmp_path, make_result, make_claim):
    results.write(
        make_result([CaseVerdict("caf\u00e9", "c", [make_claim()])]), tmp_path / "result.json"
    )
    done = _spawn("-m", "verify", "report", str(tmp_path), PYTHONIOENCODING="cp1251:strict")
    assert done.returncode == 0, done.stderr
    assert "case caf\\xe9" in done.stdout


@pytest.mark.slow
def test_the_file_of_init_runs_as_it_is_and_verifies(tmp_path):
    """The real thing, once: workers, evidence, decision and report."""
    assert _spawn("-m", "verify", "init", cwd=tmp_path).returncode == 0
    done = _spawn(
        "-m", "verify", "run", "my_case.py", "--runs", "2", "--processes", "1", "--report", "out",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict=VERIFIED 2 cases, 10 claims, 1 rank")
    result = results.read(tmp_path / "out")
    assert result["cases"][0]["target"] == "my_case.py::layer"
    assert set(result["cases"][0]["outputs"]["0"]) == {"out", "grad.x", "grad.weight"}
    assert result["command"].startswith("verify run my_case.py")
