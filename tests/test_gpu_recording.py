"""ci/gpu/recording.py: it measures every contender in one run, and says what is too dear."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gpu_scripts import gpu_scripts

NAMES = ["alone", "module", "op", "debug"]


@pytest.fixture(scope="module")
def recording() -> Iterator[ModuleType]:
    with gpu_scripts() as loaded:
        yield loaded["recording"]


def test_a_small_model_is_measured_on_a_cpu(
    tmp_path: Path, recording: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "LAYERS", 1)
    small = recording.Size(32, 16, 32, 16, 4, 2, 64, 2)
    monkeypatch.setitem(recording.SIZES, "cpu", small)
    path = tmp_path / "recording.json"
    words = ["--device", "cpu", "--rounds", "1", "--steps", "2", "--json", str(path)]
    done = CliRunner().invoke(recording.main, words)
    assert done.exit_code in (0, 1), done.output  # a step this small is all overhead
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == NAMES
    assert all(row["same"] for row in rows.values())
    assert rows["alone"]["ratio"] == 1.0
    assert rows["op"]["events"] > rows["module"]["events"] > 50
    assert rows["module"]["recorded_steps"] == 3
    assert rows["module"]["bytes"] > 3 * 34 * rows["module"]["events"] * 0.9
    assert not [one for one in document["problems"] if "otherwise" in one]


def rows(**ratios: float) -> list[dict[str, Any]]:
    given = {"alone": 1.0, "module": 1.02, "op": 1.1, "debug": 1.6, **ratios}
    return [{"name": name, "ratio": ratio, "same": True} for name, ratio in given.items()]


def test_what_is_as_promised_is_no_problem(recording: ModuleType) -> None:
    assert recording.problems(rows(), "cuda") == []
    assert recording.problems(rows(op=3.0, debug=3.1), "cpu") == []


@pytest.mark.parametrize(
    ("device", "ratios", "said"),
    [
        ("cuda", {"module": 1.04}, "module takes 1.040 x, at most 1.03 is allowed"),
        ("cuda", {"op": 1.16, "debug": 2.0}, "op takes 1.160 x, at most 1.15 is allowed"),
        ("cuda", {"debug": 1.4}, "DebugMode costs 4.0 x of op, not 5.0 x"),
        ("cpu", {"module": 1.2}, "module takes 1.200 x, at most 1.15 is allowed"),
    ],
)
def test_what_is_too_dear_is_named(
    recording: ModuleType, device: str, ratios: dict[str, float], said: str
) -> None:
    assert recording.problems(rows(**ratios), device) == [said]


def test_another_training_is_named(recording: ModuleType) -> None:
    found = rows()
    found[2]["same"] = False
    assert recording.problems(found, "cpu") == ["op trained otherwise than alone"]


def test_another_training_in_an_early_round_is_named(
    tmp_path: Path, recording: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([1.0, 1.0, 1.0, 2.0, *[1.0] * 4])  # of two contenders in two rounds

    class Trained:
        device = torch.device("cpu")

        def start(self) -> None: ...

        def step(self) -> torch.Tensor:
            return torch.tensor(next(losses))

    both = {"alone": contextlib.nullcontext, "op": contextlib.nullcontext}
    monkeypatch.setattr(recording, "contenders", lambda *_: both)
    measured = recording.measure(Trained(), 2, 1, tmp_path)
    assert [row["same"] for row in recording.rows_of(measured, tmp_path)] == [True, False]
