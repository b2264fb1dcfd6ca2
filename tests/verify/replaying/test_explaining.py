"""`verify trace explain`: what is kept, what is said of it, and what when nothing came again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from replayed_toys import ordered
from torch import nn
from trace_toy import record_toy

import verify
from verify import UnsupportedError
from verify.cli import main
from verify.reasons import Verdict
from verify.replaying import explain_report, explaining
from verify.replaying.explaining import Told, Try, explain_runs
from verify.replaying.orders import Orders
from verify.replaying.processes import Run, Script
from verify.tracing import keeping
from verify.tracing.files import read_folder
from verify.tracing.states import _kind, _packed

SCRIPTS = (Script(("a",)), Script(("b",)))
Faults = dict[str, Any]


class Noisy(nn.Module):
    """Adds what another order of additions would."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.faults = faults

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        ulps = self.faults.get("ulps", 0)
        noise = torch.arange(y.numel()).view_as(y) % 3 * ulps
        return (y.detach().view(torch.int32) + noise).to(torch.int32).view(torch.float32) + 0 * y


def train(folder: Path, faults: Faults) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Noisy(faults))
    if "narrow" in faults:
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=faults.get("lr", 0.1), momentum=0.9)
    x = torch.linspace(-1, 1, 128).view(8, 16) + faults.get("data", 0)
    with verify.record(folder, model, optimizer, every=faults.get("every", 1)):
        for number in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.param_groups[0]["lr"] = faults.get("later", optimizer.param_groups[0]["lr"])
            if "grad" in faults and number >= faults.get("at", 0):
                model[0].weight.grad[2] += 1
            optimizer.step()
            with torch.no_grad():
                model[0].weight[3, 2] += faults.get("between", 0)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Orders]]:
    """Runs a training with faults in this process instead of scripts; gives the orders."""

    def plant(*faults: Faults) -> list[Orders]:
        waiting, seen = list(faults), []

        def recorded(script: Script, folder: Path, orders: Orders, **_: Any) -> Run:
            seen.append(orders)
            with ordered(folder, orders), suppress(IndexError):
                train(folder, waiting.pop(0))
            return read_folder(folder)

        monkeypatch.setattr(explaining, "recorded", recorded)
        return seen

    return plant


def recordings(folder: Path, a: Faults, b: Faults) -> tuple[Path, Path]:
    for name, faults in (("a", a), ("b", b)):
        train(folder / name, faults)
    return folder / "a", folder / "b"


def test_a_module_is_explained(tmp_path: Path, again: Callable[..., list[Orders]]) -> None:
    a, b = recordings(tmp_path, {}, {"ulps": 1})
    seen = again({}, {"ulps": 2})
    found = explain_runs(a, b, SCRIPTS, tmp_path / "new")
    shown = explain_report.text(found)
    lines = shown.splitlines()
    assert found.verdict is Verdict.MISMATCH
    assert explain_report.exit_code(found) == 1
    assert lines[0] == "verdict=MISMATCH they part at the same place again, in 1 try"
    assert lines[1].startswith("culprit: rank 0, step 0, forward: module 1 (Noisy) has equal")
    assert lines[2].startswith("equal again: input 0 of 1, parameter 1.linear.weight, ")
    assert "  | output of 1: 85 of 128 elements differ (66.4 %), at most 4 ulp" in lines
    assert any(line.startswith("  | first: output of 1[0,1] ") for line in lines)
    assert "  | tiles of 1 x 1 elements: . equal, # all differ, digits: tenths that differ" in lines
    assert lines.count("  |   .##.##.##.##.##.") >= 2
    assert "suggests: " in shown
    assert [orders.stop_after for orders in seen] == [1, 1]
    assert seen[0].keep == seen[1].keep
    assert (0, 0, "1", "output", "", 0) in seen[0].keep
    document = explain_report.to_json(found, "kept")
    json.dumps(document, allow_nan=False)
    assert document["explained"]
    (event,) = document["tries"][0]["events"]
    assert list(event["difference"]["first"]) == [0, 1]
    assert all(one["equal"] for one in document["tries"][0]["inputs"])
    assert document["tries"][0]["inputs_equal"] is True


def test_a_rare_difference_that_comes_at_the_second_try(
    tmp_path: Path, again: Callable[..., list[Orders]]
) -> None:
    a, b = recordings(tmp_path, {}, {"ulps": 1})
    again({}, {}, {}, {"ulps": 1})
    found = explain_runs(a, b, SCRIPTS, tmp_path / "new")
    assert explain_report.text(found).startswith(
        "verdict=MISMATCH they part at the same place again, in 2"
    )
    assert [one.parted for one in found.tries] == [False, True]


def test_a_setting_that_was_changed_is_hinted_at(
    tmp_path: Path, again: Callable[..., list[Orders]]
) -> None:
    a, b = recordings(tmp_path, {}, {"later": 0.2})
    again({}, {"later": 0.2})
    shown = explain_report.text(explain_runs(a, b, SCRIPTS, tmp_path / "new")).splitlines()
    assert ", optimizer: optimizer lr of (group 0) differs after it" in shown[1]
    assert shown[2] == "  hint: settings of the optimizer differ: lr of (group 0)"


def test_what_could_not_be_kept_is_not_called_unseen(
    tmp_path: Path, again: Callable[..., list[Orders]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MOST_BYTES", 16)
    a, b = recordings(tmp_path, {}, {"ulps": 1})
    again({}, {"ulps": 1})
    shown = explain_report.text(explain_runs(a, b, SCRIPTS, tmp_path / "new", tries=1)).splitlines()
    assert shown[0] == "verdict=UNVERIFIED not explained: no tensors to compare in 1 try"
    assert shown[2].startswith("try 1: nothing to compare at output of 1: more than")


def test_what_came_in_between_two_steps(tmp_path: Path, again: Callable[..., list[Orders]]) -> None:
    """`verify replay` records the state that a step finds, too."""
    for name, faults in (("a", {}), ("b", {"between": 1.0})):
        with ordered(tmp_path / name, Orders("", states=True)):
            train(tmp_path / "unused", faults)
    again({}, {"between": 1.0})
    found = explain_runs(tmp_path / "a", tmp_path / "b", SCRIPTS, tmp_path / "new", tries=1)
    assert found.verdict is Verdict.MISMATCH, explain_report.text(found)
    assert "probe parameter 0.weight before the first event: 1 of 256" in explain_report.text(found)


def test_steps_that_were_left_out_are_recorded_in_full_first(
    tmp_path: Path, again: Callable[..., list[Orders]]
) -> None:
    some, faulty = {"every": 3}, {"every": 3, "grad": 1, "at": 1}
    a, b = recordings(tmp_path, some, faulty)
    seen = again(some, some, some, faulty, some, faulty)
    found = explain_runs(a, b, SCRIPTS, tmp_path / "new")
    lines = explain_report.text(found).splitlines()
    assert found.verdict is Verdict.MISMATCH, lines
    assert lines[1].startswith(
        "recorded in full, since rank 0, step 2: gradient of 0.weight differs here, "
    )
    assert "steps 1 to 2 were not recorded in full" in lines[1]
    assert lines[2].startswith("culprit: rank 0, step 1, backward: gradient of 0.weight differs, ")
    assert any(one.startswith("  | gradient of 0.weight: 16 of 256 elements dif") for one in lines)
    assert [one.steps for one in seen] == [(1, 3)] * 4 + [(1, 2)] * 2
    document = explain_report.to_json(found)
    json.dumps(document, allow_nan=False)
    assert document["first_diff"]["culprit"]["unrecorded"] == [1, 2]
    assert document["diff"]["culprit"]["place"]["step"] == 1


def test_steps_that_were_left_out_and_do_not_part_again_are_not_explained(
    tmp_path: Path, again: Callable[..., list[Orders]]
) -> None:
    some, faulty = {"every": 3}, {"every": 3, "grad": 1, "at": 1}
    a, b = recordings(tmp_path, some, faulty)
    again(some, some, some, some)
    found = explain_runs(a, b, SCRIPTS, tmp_path / "new", tries=2)
    lines = explain_report.text(found).splitlines()
    assert found.verdict is Verdict.UNVERIFIED
    assert lines[0].startswith("verdict=UNVERIFIED not explained: not seen again")
    assert lines[2:4] == [f"try {number}: with steps 1 to 2 in full: equal" for number in (1, 2)]
    document = explain_report.to_json(found)
    assert [one["events"] for one in document["tries"]] == [[], []]


def test_what_does_not_come_again_is_not_explained(
    tmp_path: Path, again: Callable[..., list[Orders]]
) -> None:
    a, b = recordings(tmp_path, {}, {"ulps": 1})
    again({}, {}, {}, {"data": 0.5}, {}, {"ulps": 0})
    found = explain_runs(a, b, SCRIPTS, tmp_path / "new")
    assert found.verdict is Verdict.UNVERIFIED
    assert explain_report.exit_code(found) == 3
    lines = explain_report.text(found).splitlines()
    assert (
        lines[0] == "verdict=UNVERIFIED not explained: not seen again at the same place in 3 tries"
    )
    assert lines[2] == "try 1: equal at output of 1, and as far as that step"
    assert lines[3] == (
        "try 2: parted again at output of 1, and so did what it was made of; this time they part "
        "at step 0, input 0 of the model"
    )
    assert lines[4] == lines[2].replace("1:", "3:")
    assert not explain_report.to_json(found)["explained"]


def test_inputs_that_were_not_compared_are_not_called_equal() -> None:
    key = ("1", "input", "0", 0)
    equal, lost = Told(0, key, None), Told(0, key, None, "more than 2 GiB would be kept")
    other = Told(0, key, {"lines": []})

    def said(*given: Told) -> bool | None:
        clean = all(one.difference is None for one in given)
        return Try(True, clean, "", (other,), given).inputs_equal

    assert (said(equal), said(equal, lost), said(), said(lost, other)) == (True, None, None, False)


@pytest.mark.parametrize(
    ("faults", "at", "says"),
    [
        ({"narrow": True}, (-1, "0.weight", "parameter", "", 0), "B is A rounded to bfloat16"),
        ({"data": 0.5}, (0, "(root)", "input", "0", 0), "gradient"),
        ({"grad": True}, (0, "0.weight", "grad", "", 0), "16 of 256 elements differ"),
        (
            {"lr": 0.2},
            (-1, "(group 0)", "optimizer", "lr", 0),
            "optimizer lr of (group 0): 0.1 in A, 0.2 in B",
        ),
    ],
)
def test_other_culprits(
    tmp_path: Path,
    again: Callable[..., list[Orders]],
    faults: Faults,
    at: tuple[Any, ...],
    says: str,
) -> None:
    a, b = recordings(tmp_path, {}, faults)
    seen = again({}, faults)
    found = explain_runs(a, b, SCRIPTS, tmp_path / "new")
    assert found.verdict is Verdict.MISMATCH, explain_report.text(found)
    assert (0, *at) in seen[0].keep
    shown = explain_report.text(found)
    if says != "gradient":
        assert says in shown
    assert seen[0].stop_after == at[0] + 1


def test_equal_runs_have_nothing_to_explain(tmp_path: Path) -> None:
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "b")
    found = explain_runs(tmp_path / "a", tmp_path / "b", SCRIPTS, tmp_path)
    assert explain_report.exit_code(found) == 0
    assert explain_report.text(found).startswith("verdict=VERIFIED 0 of")


def test_a_sum_over_ranks_is_nobodys_tensor(tmp_path: Path) -> None:
    record_toy(tmp_path / "a")
    for rank in (0, 1):
        faults = [(1, "optimizer", "head")]
        record_toy(tmp_path / "b", faults, rank=rank, world=2, shards=2)
    with pytest.raises(UnsupportedError, match="a sum over ranks, which no rank has in memory"):
        explain_runs(tmp_path / "a", tmp_path / "b", SCRIPTS, tmp_path)


@pytest.mark.parametrize("value", [0.1, float("inf"), 0, -3, 300, True, False, "a\ud800", "", None])
def test_python_values_come_back(value: Any) -> None:
    stored = torch.frombuffer(bytearray(_packed(value) + b"x"), dtype=torch.uint8)[:-1]
    found = explaining.python_value(stored, _kind(value))
    assert (found, type(found)) == (value, type(value))


def test_tiles() -> None:
    difference = {
        "tiles": {"shape": [3, 3], "tile": [2, 2], "counts": [[8, 1], [0, 2]]},
        "numel": 18,
    }
    assert explain_report.tile_lines(difference)[1:] == ["  #2", "  .#"]
    assert explain_report.tile_lines({}) == []


@pytest.mark.parametrize("words", [(), ("--a", "x"), ("--b", "x"), ("--a", "x", "--b", "y", "z")])
def test_commands_that_are_missing_or_too_many(tmp_path: Path, words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, ["trace", "explain", "a", "b", *words])
    assert shown.exit_code == 2
    assert "give what made both recordings behind --" in shown.output


def test_help_ends_with_examples_and_exit_codes() -> None:
    shown = CliRunner().invoke(main, ["trace", "explain", "--help"], prog_name="verify")
    assert shown.exit_code == 0
    assert "  verify trace explain" in shown.output.split("Examples:")[1]
    assert "Exit codes: 0 verified, 1 mismatch, 2 usage" in shown.output


def test_the_command(tmp_path: Path, again: Callable[..., list[Orders]]) -> None:
    a, b = recordings(tmp_path, {}, {"ulps": 1})
    again({}, {"ulps": 1})
    words = ["--keep", str(tmp_path / "kept"), "--tries", "1", "--", "train.py", "--format", "x"]
    shown = CliRunner().invoke(main, ["trace", "explain", str(a), str(b), *words])
    assert shown.exit_code == 1, shown.output
    assert f"further: tensors of both runs: {tmp_path}/kept/try-1/" in shown.output
    assert (tmp_path / "kept" / "try-1" / "a" / "rank-00000.step-0.safetensors").is_file()
