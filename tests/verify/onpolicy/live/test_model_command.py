"""`verify onpolicy --model` on a user's file: verdicts as exit codes, and errors with advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from verify.cli import main
from verify.errors import CaseError, InputFileError, UnsupportedError
from verify.onpolicy.live import models

FILE = """
import sys
import torch
import live_models

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]

def clean():
    print("a greeting of the model")
    return live_models.Model(), PROMPTS

def faulty():
    model = live_models.planted(live_models.Model(), live_models.SingleToken)
    return model, torch.tensor(PROMPTS[:1])

def drifting():
    return live_models.planted(live_models.Model(), live_models.ByCount)

def leaves(): sys.exit(0)
def raises(): raise ValueError("no weights here")
def number(): return 7
def texts(): return live_models.Model(), ["a prompt"]
def foreign(): return live_models.Model(), [[1, 5000]]
def empty(): return live_models.Model(), [[]]
held = 3
"""
FEW = ("--samples", "2", "--tokens", "2")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "model_file.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["onpolicy", *map(str, arguments)])


def test_a_clean_model_exits_with_0_and_its_pair_can_be_read_again(file, tmp_path):
    pair = tmp_path / "pair.jsonl"
    found = verify("--model", f"{file}::clean", *FEW, "--save", pair)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("verdict=VERIFIED 0 of 4 tokens differ in 2 samples\n")
    assert "model: equal bits in every module: decode, batch, padded-left" in found.stdout
    assert "greeting" not in found.stdout
    again = verify(pair, "--format", "json")
    document = json.loads(again.stdout)
    assert (again.exit_code, document["verdict"]) == (0, "VERIFIED")
    assert document["numbers"]["compared_tokens"] == 4
    assert document["routing"]["samples"] == 2
    assert [json.loads(line).get("prompt_ids") for line in pair.read_text().splitlines()[1:]] == [
        [1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_a_faulty_one_with_1_and_names_the_module(file):
    found = verify("--model", f"{file}::faulty", *FEW, "--layout", "batch", "--format", "json")
    assert found.exit_code == 1, found.output
    document = json.loads(found.stdout)
    decode, batch = document["model"]["conditions"]
    assert (decode["name"], decode["verdict"]) == ("decode", "MISMATCH")
    assert decode["first"]["module"] == "layers.1.mlp"
    assert (batch["name"], batch["verdict"]) == ("batch", "VERIFIED")
    assert document["findings"][0]["reason"] == "structural-cause"


def test_drift_with_3_and_a_bound_decides(file):
    target = ("--model", f"{file}::drifting", *FEW, "--layout", "chunked")
    assert verify(*target).exit_code == 3
    assert verify(*target, "--fail-on", "abs_max>0.1").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tokens", "3"], "--tokens belongs to --model"),
        (["--layout", "batch"], "--layout belongs to --model"),
        (["a.jsonl", "--model", "m"], "--model samples by itself"),
        (["--model", "m", "--run-config", "c.json"], "--model samples by itself"),
        (["--model", "m", "--weights", "w.json"], "--model samples by itself"),
        (["--model", "m", "--version", "4=d.jsonl"], "--model samples by itself"),
        (["--model", "m", "--layout", "sideways"], "'sideways' is not one of"),
        (["--model", "nothing/here"], "no such folder; give a folder of save_pretrained"),
        (["--model", "a.py"], "a.py::function"),
        (["--model", "nothing.py::build"], "no such file: nothing.py"),
        (["--model", "nothing", "--save", "no/folder/x"], "there is no folder no/folder"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_to_do(arguments, why):
    found = verify(*arguments)
    assert found.exit_code == 2
    assert why in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("leaves", CaseError, "raised SystemExit: 0"),
        ("raises", CaseError, "raised ValueError: no weights here"),
        ("number", InputFileError, "returned a int"),
        ("texts", InputFileError, "lists of token ids"),
        ("foreign", InputFileError, "prompt 0 has token 5000; allowed are ids from 0 to 28"),
        ("empty", InputFileError, "prompt 0 has no token"),
        ("held", InputFileError, "has no function 'held'; it has clean"),
        ("absent", InputFileError, "has no function 'absent'"),
    ],
)
def test_functions_that_give_no_model_are_refused(file, name, error, why):
    with pytest.raises(error, match=why):
        models.load(f"{file}::{name}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cupboard"}, "--device 'cupboard' is unknown"),
        ({"attention": "sdpa"}, "has no set_attn_implementation"),
        ({"experts": "eager"}, "has no set_experts_implementation"),
    ],
)
def test_options_that_a_model_cannot_take_are_refused(file, options, why):
    with pytest.raises(UnsupportedError, match=why):
        models.load(f"{file}::clean", **options)


def test_a_dtype_is_that_of_the_parameters(file):
    live = models.load(f"{file}::clean", dtype="bfloat16")
    assert live.facts()["dtype"] == "bfloat16"
    assert not live.model.training


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, "no such file"),
        ("[]", "holds no JSON object"),
        ('{"auto_map": {"AutoModelForCausalLM": "evil.Model"}}', "code of its own"),
        ("{", "not a configuration"),
    ],
)
def test_folders_that_are_no_model_are_refused_before_transformers_is_asked(tmp_path, config, why):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(InputFileError, match=why):
        models.load(str(tmp_path))
