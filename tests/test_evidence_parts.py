"""ci/gpu.sh: its command line, its parts and steps; what fails, hangs or prints junk is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from gpu_scripts import FOLDER, gpu_scripts

from mok.bench.layer_command import layer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_part_that_fails_or_hangs_is_reported_and_the_rest_runs(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    parts = scripts["steps"]
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
        parts.Step("says so", python("raise SystemExit('no tool')"), unsupported=("no tool",)),
        # a test of ours that fails with a tool's words is a failure
        parts.Step("quotes", python("raise SystemExit('Device not supported')")),
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
        "says so": "unavailable",
        "quotes": "failed",
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
    given = source_of(tmp_path, COMMIT)
    assert given == {"commit": COMMIT, "dirty": None}
    place = scripts["commands"].Place("python", tmp_path)
    made = scripts["parts"].run_all([], place, tmp_path, 1.0, given, print)
    assert made["sources"] == scripts["sources"].of_tree()  # so that it can be checked where git is
    assert made["commit"] == COMMIT


def test_every_part_is_named_once_and_fits_the_time_of_all(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    names = scripts["options"].NAMES
    found = scripts["commands"].parts(scripts["commands"].Place("python", tmp_path))
    assert tuple(part.name for part in found) == names == scripts["evidence"].PARTS
    assert set(scripts["tables"].TABLES) == set(names)
    assert all(part.steps and part.seconds < 470 for part in found)
    by_name = {part.name: part for part in found}
    assert by_name["peers"].seconds + by_name["digest"].seconds + by_name["faults"].seconds < 470
    silent = [one.name for part in found if part.name != "sanitize" for one in part.steps]
    assert [one.name for part in found for one in part.steps if not one.unsupported] == silent


def test_the_benchmark_has_rows_of_ours_on_one_gpu(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    steps, options = {}, layer.make_context
    for ranks in (1, 2):
        place = scripts["commands"].Place("python", tmp_path, ranks)
        part = next(one for one in scripts["commands"].parts(place) if one.name == "bench")
        steps[ranks] = {step.name: step for step in part.steps if step.name != "warm"}
        for step in steps[ranks].values():
            words = list(step.command[step.command.index("layer") + 1 :])
            given = options("layer", words).params  # the command line knows every option
            assert given["ranks"] == ranks
            assert step.document == f"{given['out']}/layer.json"
    assert set(steps[1]) == {"accuracy", "layer"}
    assert set(steps[2]) == {"layer"}
    assert steps[1]["accuracy"].document != steps[1]["layer"].document
    assert "mok" in steps[1]["layer"].command


def test_junk_that_a_step_leaves_is_its_failure_and_the_rest_runs(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    parts, xml = scripts["steps"], tmp_path / "a.xml"
    latin = "import sys; sys.stdout.buffer.write(b'\\xff[1]\\r\\n'); "
    steps = [
        parts.Step("bytes", python(latin)),
        parts.Step("bytes as JSON", python(latin), "-"),
        parts.Step("bytes that fail", python(f"{latin}raise SystemExit(4)")),
        parts.Step("depth", python("print('[' * 100_000 + ']' * 100_000)"), "-"),
        parts.Step("writable depth", python("print('[' * 100 + ']' * 100)"), "-"),
        parts.Step("depth that can be read", python("print('[' * 900 + ']' * 900)"), "-"),
        parts.Step("no XML", python(f"open({str(xml)!r}, 'w').write('<a>')"), str(xml)),
        parts.Step("a folder", python("pass"), f"{tmp_path}"),
        parts.Step("good", python("print(1)"), "-"),
    ]
    outcome = parts.run_part(parts.Part("p", 60, steps), tmp_path / "p.log", 60.0)
    found = {one["name"]: one for one in outcome.steps}
    assert [name for name, one in found.items() if one["status"] == "passed"] == [
        "bytes",
        "writable depth",
        "good",
    ]
    assert {one["status"] for one in outcome.steps} == {"passed", "failed"}
    for name, one in found.items():
        if one["status"] == "failed" and name != "bytes that fail":
            assert "its document cannot be read" in one["why"], name
            assert one["document"] is None
    assert "\N{REPLACEMENT CHARACTER}[1]" in found["bytes that fail"]["why"]
    assert "\N{REPLACEMENT CHARACTER}[1]" in (tmp_path / "p.log").read_text(encoding="utf-8")
    assert json.loads(json.dumps(outcome.to_json(), indent=1))["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seconds", "nan"], "nan; allowed is a finite"),
        (["--seconds", "inf"], "inf; allowed is a finite"),
        (["--limit", "digest=\N{SUPERSCRIPT TWO}"], "PART=SECONDS"),
        (["--limit", "digest=0"], "PART=SECONDS"),
        (["--limit", "nothing=3"], "PART=SECONDS"),
        (["--commit", "HEAD"], "'HEAD'; allowed are 40"),
        (["--commit", ""], "''; allowed are 40"),
        (["--commit", COMMIT.upper()], "allowed are 40"),
        (["--parts", "digest,x"], "no part"),
        (["--commit", COMMIT, "--out", "/dev/null/x"], "cannot write into"),
        (["--commit", COMMIT, "--out", "{folder}"], "is a folder; a file is to be written"),
        (["--commit", COMMIT, "--parts", "digest", "--out", "{logs}"], "digest.log"),
    ],
)
def test_what_the_command_line_does_not_allow_is_told_before_anything_runs(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    (tmp_path / "logs" / "digest.log").mkdir(parents=True)
    parts = scripts["parts"]
    monkeypatch.setattr(parts.devices, "count", lambda: 1)
    monkeypatch.setattr(parts, "run_all", lambda *_: pytest.fail("it ran"))
    given = [w.format(folder=tmp_path / "folder", logs=tmp_path / "logs") for w in words]
    done = CliRunner().invoke(parts.main, given)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr


def test_what_the_command_line_allows_runs(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, seen = scripts["parts"], []

    def run_all(*given: object) -> dict[str, object]:
        seen.append(given)
        some = [{"name": "digest", "status": "passed"}]
        return {"commit": COMMIT, "seconds": 1.0, "parts": some}

    monkeypatch.setattr(parts.devices, "count", lambda: 1)
    monkeypatch.setattr(parts, "run_all", run_all)
    monkeypatch.setattr(parts.signal, "signal", lambda *_: None)
    words = ["--limit", "digest=020", "--seconds", "30", "--parts", "digest", "--commit", COMMIT]
    done = CliRunner().invoke(parts.main, [*words, "--out", str(tmp_path / "a" / "b")])
    assert done.exit_code == 0, done.output
    [(chosen, place, out, seconds, source, _, limits, at_once)] = seen
    assert at_once == parts.most_at_once(1)
    assert (chosen, out, seconds, limits) == (
        ("digest",),
        tmp_path / "a" / "b",
        30.0,
        {"digest": 20.0},
    )
    assert source == {"commit": COMMIT, "dirty": None}
    assert out.is_dir()
    assert not place.raw.exists()  # as it is after every run


ENDED = """
import os, sys, time
sys.path[:0] = [{root!r}, {folder!r}]
import parts, steps
from verify import devices
devices.count = lambda: 1
code = "import os, time; open({pid!r}, 'w').write(str(os.getpid())); time.sleep(60)"
step = steps.Step("waits", [sys.executable, "-c", code])
parts.parts = lambda place: [steps.Part("digest", 60, [step])]
parts.main(["--parts", "digest", "--commit", {commit!r}, "--out", {out!r}])
"""


def test_a_run_that_is_told_to_end_leaves_neither_its_step_nor_its_files(tmp_path: Path) -> None:
    pid, temporary = tmp_path / "pid", tmp_path / "tmp"
    temporary.mkdir()
    code = ENDED.format(
        root=str(FOLDER.parents[1]),
        folder=str(FOLDER),
        pid=str(pid),
        commit=COMMIT,
        out=str(tmp_path / "out"),
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(python(code), env=environment, stdout=subprocess.DEVNULL) as run:
        until = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(temporary.glob("mok-gpu-*"))
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not any(temporary.glob("mok-gpu-*"))
