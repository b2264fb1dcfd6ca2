"""`verify onpolicy` from the command line: exit codes, options, messages, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jsonschema
import pytest
from click.testing import CliRunner
from onpolicy_analyses import dumps

from verify.cli import main
from verify.onpolicy import documents, report_page, report_text
from verify.onpolicy.formats.table import NAMES
from verify.onpolicy.recorder import Recorder


def invoke(*words):
    return CliRunner().invoke(main, ["onpolicy", *map(str, words)], prog_name="verify")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """trainer.jsonl with a rollout of the same values, one with noise, one of another temperature,
    one of other tokens; a copy, ids that are moved by one, and two that declare temperatures."""
    monkeypatch.chdir(tmp_path)
    for name, side, cause, at in (
        ("trainer", "trainer", "", 0),
        ("rollout", "sampler", "", 1),
        ("noisy", "trainer", "numeric-drift", 0),
        ("heated", "trainer", "temperature", 0),
        ("others", "trainer", "other-tokens", 0),
        ("copy", "sampler", "", 1),
        ("moved", "trainer", "", 0),
        ("hot", "sampler", "temperature", 0),
        ("declared", "trainer", "", 1),
    ):
        config = {"hot": {"temperature": 0.7}, "declared": {"temperature": 1.0}}.get(name, {})
        recorder = Recorder(f"{name}.jsonl", side, **config)
        for number, one in enumerate(dumps(cause)[at].samples):
            (series,) = one.series.values()
            key = f"s{number + 1}" if name == "moved" else one.key
            recorder.add(key, one.tokens, series.values, prompt_ids=one.prompt)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("trainer.jsonl", "rollout.jsonl"), 0, "verdict=VERIFIED 0 of 600 tokens differ"),
        (("noisy.jsonl", "rollout.jsonl"), 3, "verdict=UNVERIFIED 600 of 600 tokens differ"),
        (("heated.jsonl", "rollout.jsonl"), 1, "first cause: temperature"),
        (("others.jsonl", "rollout.jsonl"), 1, "misaligned (other-tokens): 12 samples, first s0"),
        (("trainer.jsonl",), 3, "the trainer's log-probabilities alone: no rollout's file"),
        (("rollout.jsonl",), 3, "to do: give the other side's file too"),
        (("rollout.jsonl", "trainer.jsonl"), 3, "(exchanged-files): 12 samples, first s0: the"),
        (("rollout.jsonl", "trainer.jsonl"), 3, "to do: exchange the two files: the trainer's"),
        (("rollout.jsonl", "hot.jsonl"), 1, "note: both files hold the sampler's values; the fir"),
        (("noisy.jsonl", "trainer.jsonl"), 3, "note: both files hold the trainer's values; the s"),
        (("copy.jsonl", "rollout.jsonl"), 0, "are equal byte for byte: a copy of one side's dump"),
        (("declared.jsonl", "hot.jsonl"), 1, "  for: the record says temperature 0.7 of the sam"),
        (("moved.jsonl", "rollout.jsonl"), 1, "under the id s0 (1 record further up, as 11 resp"),
        (("noisy.jsonl", "rollout.jsonl", "--fail-on", "abs_max>1"), 0, "abs_max>1: "),
        (("noisy.jsonl", "rollout.jsonl", "--fail-on", "differing_tokens>0"), 1, "bound-exceeded"),
        (("noisy.jsonl", "rollout.jsonl", "--fail-on=abs_max>1", "--fail-on=k3<1"), 1, "k3<1"),
        (("trainer.jsonl", "rollout.jsonl", "--metrics"), 0, "rollout_corr/k3_kl"),
        (("trainer.jsonl", "rollout.jsonl", "--read-as", "plain"), 0, "verdict=VERIFIED"),
        (("noisy.jsonl", "rollout.jsonl", "--trainer-again", "noisy.jsonl"), 3, "verdict="),
        (("noisy.jsonl", "rollout.jsonl", "--version", "a=trainer.jsonl"), None, "verdict="),
    ],
)
def test_verdicts_and_exit_codes(files, words, code, said):
    shown = invoke(*words)
    assert code in (None, shown.exit_code), shown.output
    assert shown.exit_code in (0, 1, 3)
    assert said in shown.stdout
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give TRAINER and ROLLOUT, or one file that holds both sides"),
        (("nowhere.jsonl", "rollout.jsonl"), "nowhere.jsonl: no such file"),
        (("empty.jsonl", "rollout.jsonl"), "empty.jsonl"),
        (("words.jsonl", "rollout.jsonl"), "words.jsonl"),
        (("trainer.jsonl", "rollout.jsonl", "--fail-on", "abs_mx>1"), "did you mean abs_max"),
        (("trainer.jsonl", "rollout.jsonl", "--fail-on", "abs_max"), "a number, such as"),
        (("trainer.jsonl", "rollout.jsonl", "--read-as", "xyz"), "known are plain"),
        (("trainer.jsonl", "rollout.jsonl", "--read-as", "slime"), "trainer.jsonl"),
        (("trainer.jsonl", "rollout.jsonl", "--version", "a"), "give VERSION=FILE"),
        (("trainer.jsonl", "--version=a=x", "--version=a=y"), "version 'a' is given twice"),
        (("trainer.jsonl", "--version", "a=nowhere"), "nowhere: no such file"),
        (("trainer.jsonl", "--trainer-again", "nowhere"), "nowhere: no such file"),
        (("trainer.jsonl", "--run-config", "nowhere"), "nowhere: no such file"),
        (("trainer.jsonl", "--run-config", "words.jsonl"), "words.jsonl: not a JSON object"),
        (("trainer.jsonl", "--run-config", "list.json"), "holds a list; a JSON object is needed"),
        (("trainer.jsonl", "--run-config", "other.json"), "holds 'lr', and no setting of sampling"),
        (("trainer.jsonl", "--generation-config", "twice.json"), "'top_p' occurs twice"),
        (("trainer.jsonl", "--weights", "list.json"), "list.json: holds a list"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(files, words, said):
    (files / "empty.jsonl").write_text("")
    (files / "words.jsonl").write_text("no JSON here\n")
    (files / "list.json").write_text("[1]")
    (files / "other.json").write_text('{"lr": 1}')
    (files / "twice.json").write_text('{"top_p": 1, "top_p": 0.9}')
    shown = invoke(*words)
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert said in shown.stderr
    assert "unexpected" not in shown.stderr


def test_settings_are_evidence(files):
    (files / "run.json").write_text('{"top_p": 0.9, "lr": 1}')
    shown = invoke("noisy.jsonl", "rollout.jsonl", "--run-config", "run.json", "--format=json")
    assert shown.exit_code in (1, 3)
    assert json.loads(shown.stdout)["numbers"]["tokens"] == 600


def test_json_stands_alone_and_fits_its_schema(files):
    for first, code in (("trainer", 0), ("heated", 1), ("noisy", 3)):
        shown = invoke(f"{first}.jsonl", "rollout.jsonl", "--format", "json")
        held = json.loads(shown.stdout)
        jsonschema.validate(held, documents.schema())
        assert (shown.exit_code, held["exit_code"], shown.stderr) == (code, code, "")
        assert held["rollout"] == {"path": "rollout.jsonl", "format": "plain"}


def test_formats_are_listed_without_a_file():
    shown = invoke("--formats")
    assert (shown.exit_code, shown.stdout) == (0, report_text.formats_text() + "\n")
    head, *rows = json.loads(invoke("--formats", "--format", "json").stdout)
    assert head[:2] == ["format", "tokens"]
    assert tuple(row[0] for row in rows) == NAMES


def test_the_page_is_written_and_changes_nothing_else(files):
    plain = invoke("heated.jsonl", "rollout.jsonl")
    page = files / "deep" / "report.html"
    shown = invoke("heated.jsonl", "rollout.jsonl", "--html", page)
    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, plain.stdout, "")
    first = page.read_bytes()
    assert first.startswith(b"<!doctype html>")
    shown = invoke("heated.jsonl", "rollout.jsonl", "--html", page, "--format", "json")
    assert json.loads(shown.stdout)["exit_code"] == shown.exit_code == 1
    assert page.read_bytes() == first
    assert os.listdir(files / "deep") == ["report.html"]


def test_a_page_replaces_no_input_and_is_put_into_no_folder(files):
    before = {file.name: file.read_bytes() for file in files.iterdir()}
    (files / "dumps").mkdir()
    (files / "dumps" / "a.jsonl").write_bytes(before["trainer.jsonl"])
    (files / "alias.html").hardlink_to(files / "rollout.jsonl")
    (files / "run.json").write_text('{"top_p": 1}')
    other = "is another file of this command"
    for words, page, said in (
        (("trainer.jsonl", "rollout.jsonl"), "rollout.jsonl", other),
        (("trainer.jsonl", "rollout.jsonl"), "alias.html", other),
        (("trainer.jsonl", "--run-config=run.json"), "run.json", other),
        (("trainer.jsonl", "--version=a=noisy.jsonl"), "noisy.jsonl", other),
        (("--model=m.py::build", "--save=new.html"), "new.html", other),
        (("--model=m.py::build",), "m.py", other),
        (("trainer.jsonl", "rollout.jsonl"), "dumps", "is a folder"),
        (("dumps", "rollout.jsonl"), "dumps/report.html", "all files of which are read"),
    ):
        shown = invoke(*words, "--html", page)
        assert (shown.exit_code, shown.stdout) == (2, "")
        assert said in shown.stderr
    assert all((files / name).read_bytes() == held for name, held in before.items())
    assert os.listdir(files / "dumps") == ["a.jsonl"]
    assert invoke("dumps", "rollout.jsonl", "--html", "dumps.html").exit_code == 0


def test_a_page_that_cannot_be_written_is_an_error_and_the_verdict_was_said(files):
    shown = invoke("trainer.jsonl", "rollout.jsonl", "--html", files / "trainer.jsonl" / "page")
    assert shown.exit_code == 2
    assert shown.stdout.startswith("verdict=VERIFIED ")
    assert "cannot write" in shown.stderr


def test_under_torchrun_only_rank_0_writes(files, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    shown = invoke("trainer.jsonl", "rollout.jsonl", "--html", "page.html")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert not (files / "page.html").exists()


def test_jsonl_is_analysed_and_drawn_without_torch(files):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from verify.cli import main\n"
        "words = ['onpolicy', 'noisy.jsonl', 'rollout.jsonl', '--html', 'page.html', '--metrics']\n"
        "main.main(words, standalone_mode=False)\n"
        "print([name for name in ('torch', 'pyarrow', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[]"
    assert (files / "page.html").stat().st_size < report_page.LIMIT
