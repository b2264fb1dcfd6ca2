"""`verify replay` as a command: exit codes, output, and a real script with a broken resume."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from replayed_scripts import FAULT, RECORDS, WHOLE

from verify.cli import main
from verify.replaying import replay_report
from verify.replaying.processes import command_of

TRAINS = """
import sys, torch, verify
path, *resume = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
first = 0
if resume:
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    first = saved["step"]
with verify.record("run", model) as recording:
    for step in range(first, 6):
        model(torch.ones(3, 4) + step).sum().backward()
        with torch.no_grad():  # no optimizer: torch imports its compiler for one
            for one in model.parameters():
                one -= 0.1 * one.grad
        model.zero_grad()
        recording.step()
        torch.save({"model": model.state_dict(), "step": step + 1}, path)
"""


def invoke(*words: object) -> object:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="verify")


def toy(folder: Path, text: str) -> Path:
    path = folder / "toy.py"
    path.write_text(RECORDS + text)
    return path


@pytest.mark.slow
def test_a_real_script_whose_resume_forgets_its_generator(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    kept = tmp_path / "kept"
    shown = invoke(
        *("replay", script, "{run}/last.pt", "--resume-args", "--resume"),
        *("--stop-after", 3, "--keep", kept, "--format", "json"),
    )
    assert shown.exit_code == 1, shown.output
    document = json.loads(shown.stdout)
    jsonschema.validate(document, replay_report.schema())
    assert document["verdict"] == "MISMATCH"
    assert document["command"] == [*command_of((str(script),)), "{run}/last.pt"]
    assert (document["steps"], document["stop_after"], document["resumed_at"]) == (6, 3, 3)
    assert [one["verdict"] for one in document["pairs"]] == ["VERIFIED", "VERIFIED", "MISMATCH"]
    (finding,) = document["pairs"][2]["findings"]
    assert finding["kind"] == "generators"
    assert finding["names"] == ["generator torch"]
    assert sorted(one.name for one in kept.iterdir()) == [
        *("again", "resumed", "resumed-from-step-3", "stopped", "whole", "whole-from-step-3"),
    ]
    assert (kept / "stopped" / "files" / "last.pt").is_file()
    other = invoke("trace", "diff", kept / "whole-from-step-3", kept / "resumed-from-step-3")
    assert other.exit_code == 1
    assert "generator torch" in other.output


def test_exit_codes(tmp_path: Path) -> None:
    script = toy(tmp_path, WHOLE)
    shown = invoke("replay", script, "--no-resume", "--mine", "-x", "1")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("verdict=VERIFIED 1 pair of runs equal; 3 steps\n")
    toy(tmp_path, FAULT)
    shown = invoke("replay", "--no-resume", "--", script, "--format", "mine")
    assert shown.exit_code == 1
    assert shown.stdout.startswith("verdict=MISMATCH parted: repeat (whole, again); 3 steps\n")
    assert (
        "repeat: culprit: rank 0, step 1, forward: module head (Linear) has equal" in shown.stdout
    )
    assert "further: --keep FOLDER" in shown.stdout
    toy(tmp_path, WHOLE.replace(")\n", ", close='whole' in orders.folder)\n"))
    shown = invoke("replay", script, "--no-resume")
    assert shown.exit_code == 2  # a run that does not come to its end
    assert "again: its recording did not come to its end" in shown.stderr
    toy(tmp_path, "")
    shown = invoke("replay", script)
    assert shown.exit_code == 2
    assert "with verify.record" in shown.stderr
    assert not shown.stdout


def test_arguments_of_the_second_run_only(tmp_path: Path) -> None:
    text = (
        "record_toy(Path(orders.folder), seed='1' if '--seed 1' in ' '.join(sys.argv) else '0')\n"
    )
    script = toy(tmp_path, text)
    shown = invoke("replay", script, "--no-resume", "--again-args", "--seed 1")
    assert shown.exit_code == 1
    assert "before the first step generator cpu differs already" in shown.stdout
    assert "it is not seeded, or something drew from it before" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stop-after", "3"), "give --stop-after 1 to 2, or --no-resume"),
        (("--no-resume", "--stop-after", "1"), "without a run"),
        (("--resume-args", "'"), "cannot be split into words"),
        (("--keep", "{full}", "--no-resume"), "give a folder that is new or empty"),
        ((), "it could not be stopped after 1 steps"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    script = toy(tmp_path, WHOLE)
    shown = invoke("replay", script, *(word.replace("{full}", str(tmp_path)) for word in words))
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert not shown.stdout


def test_a_single_step_cannot_be_resumed(tmp_path: Path) -> None:
    script = toy(tmp_path, WHOLE.replace(")\n", ", steps=1)\n"))
    shown = invoke("replay", script)
    assert shown.exit_code == 2
    assert "makes a single step" in shown.stderr
    assert invoke("replay", script, "--no-resume").exit_code == 0
