"""`verify trace`: text, JSON by its schema, exit codes, and what a hostile recording prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from trace_toy import header, record_toy, write_step

from verify.cli import main
from verify.tracing import documents, trace_text
from verify.tracing.causes import Cause
from verify.tracing.definitions import KINDS
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, file_name

ROOT = Path(__file__).resolve().parents[3]
NASTY = "::error::\x1b[2J\n##[group]|<b>\u202e"


def invoke(*words):
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="verify")


@pytest.fixture
def runs(tmp_path):
    """Recordings: a, equal to same; b, with a fault; cut, a killed run; other, in other forms."""
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "same")
    record_toy(tmp_path / "b", [(1, "forward", "blocks.0.mlp")])
    record_toy(tmp_path / "cut", close=False)
    record_toy(tmp_path / "other", dtypes={"head": "bfloat16"}, steps=4)
    return tmp_path


@pytest.mark.parametrize("verb", ["show", "diff", "export"])
def test_help_ends_with_examples_and_exit_codes(verb):
    shown = invoke("trace", verb, "--help")
    assert shown.exit_code == 0
    assert f"  verify trace {verb}" in shown.output.split("Examples:")[1]
    assert "Exit codes: 0 verified, 1 mismatch, 2 usage" in shown.output


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [("a", "same", 0), ("a", "b", 1), ("a", "cut", 3), ("a", "other", 1), ("a", "none", 2)],
)
def test_exit_codes_of_diff_and_its_document(runs, a, b, code):
    shown = invoke("trace", "diff", runs / a, runs / b)
    assert shown.exit_code == code
    written = invoke("trace", "diff", runs / a, runs / b, "--format", "json")
    assert written.exit_code == code
    if code == 2:
        assert (shown.stdout, written.stdout) == ("", "")
        assert str(runs / b) in shown.stderr
        return
    document = json.loads(written.stdout)
    jsonschema.validate(document, documents.schema())
    assert document["exit_code"] == code
    assert shown.stdout.startswith(f"verdict={document['verdict']} ")


def test_the_report_of_a_difference(runs):
    lines = invoke("trace", "diff", runs / "a", runs / "b").stdout.splitlines()
    assert lines[0] == (
        "verdict=MISMATCH 117 of 210 digests differ over 3 steps of 1 rank, first at step 1"
    )
    assert lines[1] == (
        "culprit: rank 0, step 1, forward: module blocks.0.mlp (MLP) has equal inputs, parameters "
        "and buffers, and its output differs (output of blocks.0.mlp)"
    )
    assert lines[2] == "  event 8 of its step: other bits"
    assert lines[3].startswith("  A float32[4,6]:")
    assert (
        "  0       3        210         117       step 1: output of blocks.0.mlp  forward" in lines
    )
    assert lines[-6:-4] == [
        "inherits: 116 events, the first:",
        "  rank 0, step 1: input 0 of blocks.0.drop",
    ]


def test_the_report_of_equal_runs_and_of_what_is_missing(runs):
    assert invoke("trace", "diff", runs / "a", runs / "same").stdout.startswith(
        "verdict=VERIFIED 0 of 210 digests differ over 3 steps of 1 rank\n"
    )
    shown = invoke("trace", "diff", runs / "a", runs / "cut").stdout
    assert "; 1 reason not to call it VERIFIED" in shown
    assert "\nunverified: B, rank 0 is incomplete: " in shown
    shown = invoke("trace", "diff", runs / "a", runs / "other").stdout
    assert "stored in another dtype: rank 0: input 0 of head: float32[4,6] in A, bfloat16" in shown
    assert "\nopen: only B has step 3\n" in shown


def test_sums_and_left_out_events_are_told(runs):
    for rank in range(2):
        record_toy(runs / "two", rank=rank, world=2, shards=2)
    shown = invoke("trace", "diff", runs / "a", runs / "two")
    assert shown.exit_code == 0, shown.output
    assert "over 3 steps, as sums over ranks" in shown.stdout
    assert "\nnot compared: " in shown.stdout


@pytest.mark.parametrize(
    ("steps", "code"),
    [("1:2", 1), ("1", 1), ("1:", 1), (":1", 0), ("-1", 0), ("0", 0), ("7:", 3)],
)
def test_ranges_of_steps(runs, steps, code):
    assert invoke("trace", "diff", runs / "a", runs / "b", "--steps", steps).exit_code == code


@pytest.mark.parametrize("steps", ["", ":", "a:b", "1:2:3", "3:3", "4:2", "1.5", "1" * 30, "--1"])
def test_ranges_that_are_none(runs, steps):
    shown = invoke("trace", "diff", runs / "a", runs / "b", f"--steps={steps}")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "--steps" in shown.stderr


@pytest.mark.parametrize("cause", Cause)
def test_the_schema_knows_every_cause_and_kind(cause):
    definitions = documents.schema()["$defs"]
    assert cause.value in definitions["cause"]["enum"]
    assert len(definitions["cause"]["enum"]) == len(Cause)
    assert tuple(definitions["kind"]["enum"]) == KINDS


@pytest.mark.parametrize(
    ("name", "value"),
    [("verdict", "FINE"), ("culprit", {}), ("ranks", None), ("differing", -1), ("steps", [1])],
)
def test_the_schema_refuses(runs, name, value):
    document = documents.to_json(diff(runs / "a", runs / "b"))
    jsonschema.validate(document, documents.schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, name: value}, documents.schema())
    del document[name]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, documents.schema())


def nasty(folder, mark, *, extra=""):
    """A recording in which everything that a text can hold is hostile, of every kind."""
    writer = TraceWriter(folder, header(environment={NASTY: mark}))
    entries = [(NASTY + kind, kind, NASTY, mark) for kind in KINDS]
    if extra:
        entries.append((NASTY + extra, "output", NASTY, mark))
    write_step(writer, 0, entries)
    writer.close(NASTY)
    return folder


def test_hostile_names_do_nothing(tmp_path):
    a, b = nasty(tmp_path / "a", "1", extra="x"), nasty(tmp_path / "b", "2")
    words = (["diff", a, b], ["show", a], ["show", a, "--steps", "0"])
    for command in words:
        shown = invoke("trace", *command)
        assert shown.stdout.isascii()
        assert "##[" not in shown.stdout
        assert "\x1b" not in shown.stdout
        assert not any(line.lstrip().startswith("::") for line in shown.stdout.splitlines())
    found = diff(a, b)
    for one in (found.culprit, *found.others):
        assert one is not None
    assert trace_text.text(found) == invoke("trace", "diff", a, b).stdout.rstrip("\n")
    document = invoke("trace", "diff", a, b, "--format", "json").stdout
    assert document.isascii()
    assert json.loads(document)["ranks"][0]["first"]["name"].startswith(NASTY)


def test_show(runs):
    shown = invoke("trace", "show", runs / "a")
    assert shown.exit_code == 0
    assert "start to step 2" in shown.stdout
    assert shown.stdout.endswith("whole: 1 of 1 rank\n")
    assert "72 grad" not in shown.stdout
    overview = json.loads(invoke("trace", "show", runs / "a", "--format", "json").stdout)
    (rank,) = overview["ranks"]
    assert (rank["steps"], rank["events"], rank["programs"]) == (4, 15 + 3 * 65, 2)
    assert sum(rank["kinds"].values()) == rank["events"]
    assert "events" not in overview
    cut = invoke("trace", "show", runs / "cut")
    assert (cut.exit_code, cut.stdout.splitlines()[-1]) == (
        3,
        "incomplete: 1 of 1 rank, 1 of which did not come to the end",
    )
    record_toy(runs / "half", rank=0, world=2)
    assert invoke("trace", "show", runs / "half").stdout.endswith("incomplete: 1 of 2 ranks\n")
    assert invoke("trace", "show", runs / "half" / file_name(0)).exit_code == 0
    assert invoke("trace", "show", runs / "cut" / file_name(0)).exit_code == 3


def test_a_recording_that_an_exception_ended_is_not_whole(runs):
    writer = TraceWriter(runs / "raised", header())
    write_step(writer, -1, [("w", "parameter", "", "0")])
    writer.close("KeyError: 'x'")
    shown = invoke("trace", "show", runs / "raised")
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (
        3,
        "incomplete: 1 of 1 rank, 1 of which did not come to the end",
    )
    assert "KeyError" in shown.stdout
    assert invoke("trace", "show", runs / "raised" / file_name(0)).exit_code == 3


def test_show_events_of_steps(runs):
    lines = invoke("trace", "show", runs / "a", "--steps", "1").stdout.splitlines()
    assert len(lines) == 65
    assert lines[0].startswith("rank 0, step 1, 0: input 0 of the model float32[4,6]:")
    listed = json.loads(
        invoke("trace", "show", runs / "a", "--steps", "-1:1", "--format", "json").stdout
    )["events"]
    assert [one["step"] for one in listed] == [-1] * 15 + [0] * 65
    assert listed[0]["kind"] == "parameter"


def test_export_counts_and_refuses_to_overwrite(runs):
    shown = invoke("trace", "export", runs / "a", runs / "out")
    assert (shown.exit_code, shown.stdout) == (0, "1 file, 210 lines\n")
    assert os.listdir(runs / "out") == ["rank_000000.jsonl"]
    before = (runs / "out" / "rank_000000.jsonl").read_bytes()
    again = invoke("trace", "export", runs / "b", runs / "out")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "exists already" in again.stderr
    assert (runs / "out" / "rank_000000.jsonl").read_bytes() == before
    assert invoke("trace", "export", runs / "cut", runs / "out2").exit_code == 3
    assert invoke("trace", "export", runs / "a", runs / "out3", "--steps", "9").exit_code == 3


def test_comparing_imports_no_torch(runs):
    code = (
        "import sys, os\nfrom verify.cli import main\n"
        "leave = os._exit\n"
        "os._exit = lambda code: leave(code or 9 * ('torch' in sys.modules))\n"
        "main()"
    )
    for words in (["diff", "a", "same"], ["show", "a"], ["export", "a", "out"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "trace", *words],
            cwd=runs,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
