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
from gpu_scripts import check_contradicted, check_needed, gpu_scripts
from torch.utils import deterministic

NAMES = ["alone", "module", "op", "module-10", "op-10", "debug"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def recording(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["recording"]


def test_a_small_model_is_measured_on_a_cpu(
    tmp_path: Path, recording: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "LAYERS", 1)
    small = recording.Size(32, 16, 32, 16, 4, 2, 64, 2)
    monkeypatch.setitem(recording.SIZES, "cpu", small)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen, step = [], recording.Training.step

    def looked(training: Any) -> torch.Tensor:
        flags = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool(deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        )
        seen.append((training, flags))
        return step(training)  # type: ignore[no-any-return]

    monkeypatch.setattr(recording.Training, "step", looked)
    path = tmp_path / "recording.json"
    words = ["--device", "cpu", "--rounds", "1", "--steps", "2", "--json", str(path)]
    done = CliRunner().invoke(recording.main, words)
    assert done.exit_code == 0, done.output
    assert not torch.are_deterministic_algorithms_enabled()  # put back
    assert deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == NAMES
    assert all(row["same"] for row in rows.values())
    assert rows["alone"]["ratio"] == 1.0
    assert {row["rounds"] for row in rows.values()} == {1}
    assert [flags for _, flags in seen] == [(True, False, False)] * (3 * 11 + 3 * 3)
    assert rows["op"]["events"] > rows["module"]["events"] > 50
    assert rows["module"]["recorded_steps"] == 3
    assert rows["module-10"]["recorded_steps"] == 11
    assert rows["module-10"]["events"] == rows["module"]["events"]
    assert rows["op-10"]["bytes"] < rows["op"]["bytes"]
    assert rows["module"]["bytes"] > 3 * 34 * rows["module"]["events"] * 0.9
    assert not [one for one in document["problems"] if "otherwise" in one]


def rows(**ratios: float) -> list[dict[str, Any]]:
    """As recording.json has them."""
    given = {"alone": 1.0, "module": 1.02, "op": 1.1, "module-10": 1.01, "op-10": 1.02}
    given |= {"debug": 1.6, **ratios}
    made = [
        {"name": name, "rounds": 5, "ms": 200.0 * ratio, "ratio": ratio, "spread": 0.01}
        for name, ratio in given.items()
    ]
    recorded = {"events": 1148, "bytes": 400_000, "recorded_steps": 4}
    return [
        {**row, "same": True, **(recorded if row["name"] not in ("alone", "debug") else {})}
        for row in made
    ]


def test_what_is_as_promised_is_not_told(recording: ModuleType) -> None:
    assert recording.too_dear(rows(), "cuda") == []
    assert recording.too_dear(rows(op=3.0, debug=3.1), "cpu") == []
    assert recording.too_dear(rows(op=0.99, debug=1.006), "cuda") == []


@pytest.mark.parametrize(
    ("device", "ratios", "said"),
    [
        ("cuda", {"module": 1.0301}, "a step at module level / alone is 1.031, not 1.03 or less"),
        ("cuda", {"op": 1.16, "debug": 2.0}, "a step at op level / alone is 1.160, not 1.15 or"),
        ("cuda", {"debug": 1.4999}, "cost of DebugMode / of op level is 4.999, not 5 or more"),
        ("cpu", {"module": 1.2}, "a step at module level / alone is 1.200, not 1.15 or less"),
        (
            "cuda",
            {"module-10": 1.031},
            "a step at module level, every 10th in full, / alone is 1.031, not 1.03 or less",
        ),
    ],
)
def test_what_is_too_dear_is_named(
    recording: ModuleType, device: str, ratios: dict[str, float], said: str
) -> None:
    (told,) = recording.too_dear(rows(**ratios), device)
    assert told.startswith(said)


def test_what_was_not_measured_met_no_goal(recording: ModuleType) -> None:
    found = recording.goals.judged_recording({})
    assert [(one.measured, one.met) for one in found] == [("-", "not measured")] * 5


@pytest.mark.parametrize(
    ("same", "module", "strict", "code"),
    [(True, 1.2, False, 0), (True, 1.2, True, 1), (True, 1.1, True, 0), (False, 1.0, False, 1)],
)
def test_only_another_training_fails_unless_strict(
    recording: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    same: bool,
    module: float,
    strict: bool,
    code: int,
) -> None:
    found = [{**row, "same": same} for row in rows(module=module)]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(recording, "measure", lambda *_: {})
    monkeypatch.setattr(recording, "rows_of", lambda *_: found)
    words = ["--device", "cpu", *(["--strict"] if strict else [])]
    done = CliRunner().invoke(recording.main, words)
    assert done.exit_code == code, done.output
    dear = "a step at module level / alone is 1.200, not 1.15 or less" in done.output
    assert dear == (module > 1.15)


def test_another_training_is_named(recording: ModuleType) -> None:
    found = rows()
    assert found[2]["name"] == "op"
    found[2]["same"] = False
    assert recording.otherwise(found) == ["op trained otherwise than alone"]
    assert recording.otherwise(rows()) == []


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
    monkeypatch.setattr(recording, "EVERY", 1)
    measured = recording.measure(Trained(), 2, 1, tmp_path)
    assert [row["same"] for row in recording.rows_of(measured, tmp_path)] == [True, False]


@pytest.mark.parametrize(("limit", "rounds"), [(1e9, 3), (1.0, 1), (2.5, 2)])
def test_no_round_is_begun_that_would_end_too_late(
    tmp_path: Path,
    recording: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    rounds: int,
) -> None:
    clock = [0.0]

    class Trained:
        device = torch.device("cpu")

        def start(self) -> None: ...

        def step(self) -> torch.Tensor:
            clock[0] += 0.5  # seconds: a round of one contender is one second
            return torch.tensor(1.0)

    monkeypatch.setattr(recording.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(recording, "contenders", lambda *_: {"alone": contextlib.nullcontext})
    monkeypatch.setattr(recording, "EVERY", 1)
    measured = recording.measure(Trained(), 3, 1, tmp_path, limit)
    assert measured["seconds"] == {"alone": [0.5] * rounds}


# ---- evidence -----------------------------------------------------------------------------------


def test_evidence_holds_every_contender_and_none_that_trained_otherwise(
    scripts: dict[str, ModuleType],
) -> None:
    for row in rows():
        check_needed(
            scripts["shapes"].DOCUMENTS["recording"], row, ("events", "bytes", "recorded_steps")
        )
        check_contradicted(scripts["evidence"], "recording", row, {"same": False})
    told = scripts["shapes"].DOCUMENTS["recording"]({"rows": rows(), "device": "cpu"}, "it")
    assert told == "it.device is 'cpu'; it must be 'cuda'"


def test_the_table_holds_every_row_and_every_goal(scripts: dict[str, ModuleType]) -> None:
    document = {"device": "cuda", "rows": rows(module=1.04), "steps": 3}
    own = [{"results": {"recording": {"status": "passed", "document": document}}}]
    text = scripts["speed_tables"].recording(own)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert lines[2] == ["alone", "200.0", "1.000", "1.0 % of 5", "yes", "-", "-"]
    assert lines[3][0] == "recorded, module level"
    assert lines[3][-2:] == ["1148", "100.0"]
    assert ["a step at module level / alone", "1.03 or less", "1.040", "NO"] in lines
    assert "4 of 5 goals met; not met: a step at module level / alone." in text
    assert "NO" in scripts["speed_tables"].recording(
        [{"results": {"r": {"document": {"rows": [{**rows()[0], "same": False}]}}}}]
    )
