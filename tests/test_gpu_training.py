"""ci/gpu/training.py: it trains, one rank and two alike, and names bits that are not the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gpu_scripts import FOLDER, gpu_scripts

from mok.hopper import passes


@pytest.fixture(scope="module")
def training() -> Iterator[ModuleType]:
    with gpu_scripts() as loaded:
        yield loaded["training"]


@pytest.mark.slow
def test_one_rank_and_two_train_alike_on_a_cpu(tmp_path: Path, training: ModuleType) -> None:
    found = tmp_path / "training.json"
    words = ["--device", "cpu", "--steps", "3", "--ranks", "2", "--at-once", "2"]
    words += ["--json", str(found)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER / "training.py"), *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(found.read_text())
    assert (document["problems"], document["at_once"]) == ([], 2)
    assert "training: the same bits in every setting" in done.stdout
    rows = document["rows"]
    assert [(row["ranks"], row["shared"], row["recompute"]) for row in rows] == [
        *((1, False, recompute) for recompute in (True, False)),
        *((2, shared, recompute) for shared in (True, False) for recompute in (True, False)),
    ]
    assert [row["times"] for row in rows] == [1, 1, 2, 2, 2, 2]
    assert all(row["equal"] and row["last"] < row["first"] for row in rows)
    # Without a shared expert all are one; with it two ranks add its sums in another order.
    assert len({row["weights"] for row in rows if not row["shared"]}) == 1
    assert len({row["weights"] for row in rows}) == 2


def test_settings_in_processes_of_their_own_train_as_in_this_one(
    tmp_path: Path, training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    asked = []

    def here(commands: list[list[str]], at_once: int) -> None:
        asked.append((len(commands), at_once))
        for command in commands:
            assert command[:2] == [sys.executable, training.__file__]
            done = CliRunner().invoke(training.main, command[2:])
            assert done.exit_code == 0, done.output

    monkeypatch.setattr(training, "run_side_by_side", here)
    documents = []
    for at_once in (1, 4):
        path = tmp_path / f"{at_once}.json"
        words = ["--device", "cpu", "--steps", "1", "--at-once", str(at_once)]
        done = CliRunner().invoke(training.main, [*words, "--json", str(path)])
        assert done.exit_code == 0, done.output
        documents.append(json.loads(path.read_text()))
    assert asked == [(4, 4)]
    first, second = ([{**row, "seconds": 0} for row in one["rows"]] for one in documents)
    assert first == second
    assert len(first) == 4
    assert all(row["times"] == 2 and row["equal"] for row in first)


def test_a_gpu_gets_every_setting_at_once_and_a_cpu_none(training: ModuleType) -> None:
    assert training.AT_ONCE["cuda"] == len(training.settings(1)) == 4
    assert training.AT_ONCE["cpu"] == 1


def _rows(training: ModuleType) -> list[dict[str, Any]]:
    run = training.Trained("a", "b", 400, 5.0, 1.0, 2.0)
    chosen = [*training.settings(1), *training.settings(2)]
    return [training.row_of(setting, 200, [run, run], True) for setting in chosen]


def test_all_that_is_wrong_is_named_and_nothing_else(training: ModuleType) -> None:
    assert training.problems(_rows(training)) == []
    for change, words in (
        ({"equal": False}, ["not the same bits in 2 trainings"]),
        ({"kernels": 399}, ["kernels ran 399 of 400 backwards"]),
        ({"last": 4.5}, ["losses went from 5.000 to 4.500"]),
        ({"last": float("nan")}, ["losses went from 5.000 to nan"]),
        (
            {"losses": "c"},
            [
                "ranks 1, shared False: recomputed and kept activations give 2 different",
                "shared False: numbers of ranks give 2 different results",
            ],
        ),
    ):
        rows = _rows(training)
        assert not rows[2]["shared"]
        rows[2] = {**rows[2], **change}
        told = training.problems(rows)
        assert len(told) == len(words), told
        for one, word in zip(told, words, strict=True):
            assert word in one
    rows = _rows(training)
    rows[5] = {**rows[5], "weights": "c"}  # with a shared expert ranks may differ, recomputing not
    (told,) = training.problems(rows)
    assert "ranks 2, shared True" in told
    rows[4] = {**rows[4], "weights": "c"}
    assert training.problems(rows) == []


def test_other_bits_of_a_training_are_seen(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, cpu = training.Setting(1, False, False), torch.device("cpu")
    first = training.train(setting, 2, cpu, None)
    again = training.train(setting, 2, cpu, None)
    assert (first.losses, first.weights) == (again.losses, again.weights)
    assert first.kernels == 0
    plain = training.losses_and_gradients

    def nudged(*given: Any) -> Any:
        losses, rows, layers = plain(*given)
        layers[1][2][3, 5, 7] += 2.0**-9
        return losses, rows, layers

    monkeypatch.setattr(training, "losses_and_gradients", nudged)
    other = training.train(setting, 2, cpu, None)
    assert other.weights != first.weights
    row = training.row_of(setting, 2, [first, replace(again, losses="x"), other], False)
    assert not row["equal"]
    assert training.row_of(setting, 2, [first, again], False)["equal"]


def test_launches_of_the_kernels_are_counted_and_put_back(training: ModuleType) -> None:
    launch = passes.launch_backward
    with pytest.raises(TypeError), training._counted() as seen:
        passes.launch_backward()
    assert len(seen) == 1
    assert passes.launch_backward is launch


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_sequence_has_one_rank_and_shares_differ_where_there_is_room(
    training: ModuleType, ranks: int
) -> None:
    counts = training.shares(ranks)
    assert len(counts) == ranks
    assert sum(counts) == training.B
    assert min(counts) >= 1
    assert (len(set(counts)) > 1) == (ranks not in (1, 8))


def test_shares_of_evidence_that_is_there_stay(training: ModuleType) -> None:
    wanted = {1: [8], 2: [3, 5], 4: [1, 2, 2, 3], 8: [1] * 8}
    assert {ranks: training.shares(ranks) for ranks in wanted} == wanted


@pytest.mark.parametrize("ranks", [0, 3, 6, 9, 16])
def test_ranks_without_a_sequence_or_equal_experts_are_refused(
    training: ModuleType, ranks: int
) -> None:
    done = CliRunner().invoke(training.main, ["--device", "cpu", "--ranks", str(ranks)])
    assert done.exit_code == 2
    assert f"{ranks} ranks for 8 sequences and 8 experts; allowed are 1, 2, 4, 8" in done.stderr


@pytest.mark.parametrize(("ranks", "patience"), [(2, 450.0), (4, 600.0), (8, 750.0)])
def test_more_ranks_have_more_time(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, ranks: int, patience: float
) -> None:
    asked = []

    def run(commands: list[list[str]], at_once: int, patience: float) -> None:
        asked.append((len(commands), at_once, patience))
        row = training.row_of(training.Setting(ranks, True, True), 1, [one], False)
        folder = Path(commands[0][commands[0].index("--folder") + 1])
        for command in commands:
            training._write(folder, "rank", int(command[-1]), [row])

    one = training.Trained("a", "b", 0, 5.0, 1.0, 2.0)
    monkeypatch.setattr(training, "run_side_by_side", run)
    (row,) = training._several(ranks, 1, "cpu")
    assert row["equal"]
    assert asked == [(ranks, ranks, patience)]


def test_multicast_is_off_unless_the_environment_says_otherwise(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in training.UNLESS_GIVEN:
        monkeypatch.delenv(name, raising=False)
    both = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert training.variables() == {**training.VARIABLES, **both}
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    del both["NCCL_NVLS_ENABLE"]
    assert training.variables() == {**training.VARIABLES, **both}
