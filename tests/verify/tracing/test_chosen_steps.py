"""Recordings of chosen steps: what is in them, and which events begin and end a step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import moe_block
import pytest
import torch
from chosen_runs import run
from click.testing import CliRunner
from fake_graphs import FakeGraph, capture, use_fake_graphs
from replayed_toys import ordered
from torch import nn
from traced_models import Block, events, stack, steps_of

import mok
import verify
from verify.cli import main
from verify.replaying.orders import Orders
from verify.tracing.choices import STATE
from verify.tracing.definitions import LANES_BYTES, Step
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder


def state_of(step: Step) -> dict[Any, bytes]:
    return {
        key: step.lanes[at * LANES_BYTES : (at + 1) * LANES_BYTES]
        for at, key in enumerate(step.program.keys)
        if key[1] in STATE
    }


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("choice", "full", "bare"),
    [
        ({"every": 3}, [0, 3, 6], [2, 5, 7]),
        ({"every": 7}, [0, 7], [6]),
        ({"every": 100}, [0], [7]),
        ({"steps": range(2, 4)}, [2, 3], [1, 7]),
        ({"steps": range(50, 60)}, [], [7]),
        ({"steps": range(8, 60)}, [], [7]),
    ],
)
def test_chosen_steps_are_in_full_and_others_leave_their_state(
    tmp_path: Path, level: str, choice: dict[str, Any], full: list[int], bare: list[int]
) -> None:
    whole = {one.number: one for one in steps_of(run(tmp_path / "whole", level=level))}
    found = {one.number: one for one in steps_of(run(tmp_path / "some", level=level, **choice))}
    assert sorted(found) == sorted([-1, *full, *bare])
    for number in (-1, *full):
        assert found[number].program.keys == whole[number].program.keys
        assert found[number].lanes == whole[number].lanes
    for number in bare:
        assert state_of(found[number]) == state_of(whole[number])
        assert {one.kind for one in found[number].program.definitions} <= {*STATE, "grad"}


def test_a_choice_changes_no_bit_and_is_written(tmp_path: Path) -> None:
    found = []
    for choice in (None, {"every": 3}, {"steps": range(2, 5, 2)}):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        recording: Any = contextlib.nullcontext()
        if choice is not None:
            recording = verify.record(tmp_path, model, overwrite=True, **choice)
        with recording:
            for _ in range(6):
                model(torch.randn(2, 5, 8)).square().mean().backward()
                optimizer.step()
        found.append((str(verify.digest(model.state_dict())), torch.rand(1).item()))
    assert found[0] == found[1] == found[2]
    (one,) = read_folder(tmp_path).values()
    assert one.header.steps == range(2, 5, 2)
    shown = CliRunner().invoke(main, ["trace", "show", str(tmp_path)]).stdout
    assert "steps 2 to 4, each 2nd" in shown


def test_nothing_of_another_step_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of chosen steps only: a step that was not chosen costs no reading."""
    from verify.tracing.queues import DigestQueue

    put, taken = DigestQueue.put, []
    monkeypatch.setattr(
        DigestQueue, "put", lambda queue, *a, **k: (taken.append(len(seen)), put(queue, *a, **k))[1]
    )
    seen: list[int] = []
    run(tmp_path, lambda _, number: seen.append(number), every=3)
    # Steps are counted from 1 here. 8: the state at the end is that of a step not chosen.
    assert set(taken) == {0, 1, 3, 4, 6, 7, 8}
    full, bare = [taken.count(number) for number in (1, 4, 7)], [taken.count(n) for n in (3, 6)]
    assert len(set(full)) == len(set(bare)) == 1
    assert full[0] > bare[0] > taken.count(8)  # without gradients, which are gone


def test_steps_by_hand_are_counted_though_nothing_of_them_is_taken(tmp_path: Path) -> None:
    model = Block()
    with verify.record(tmp_path, model, steps=range(2, 3)) as recording:
        for _ in range(4):
            model(torch.randn(2, 5, 8))
            recording.step()
            recording.step()  # directly behind the end of a step: nothing
        assert recording.number == 4
    assert [one.number for one in steps_of(tmp_path)] == [-1, 1, 2, 3]
    assert events(steps_of(tmp_path)[2], "output")


def test_what_a_step_begins_with_is_the_same_for_all_choices(tmp_path: Path) -> None:
    """Values without a digest begin no step, as they have no event."""
    ends = []
    for name, choice in (("whole", {}), ("some", {"every": 3})):
        torch.manual_seed(0)
        model = Block()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with verify.record(tmp_path / name, model, **choice) as recording:  # type: ignore[arg-type]
            for _ in range(4):
                model(torch.ones(2, 5, 8)).sum().backward()
                optimizer.step()
                verify.probe("lr", 0.1)
                verify.probe("nowhere", torch.ones(1, device="meta"))
                recording.step()
            verify.probe("final", 0.5)
        ends.append(recording.number)
    assert ends == [4, 4]
    found = diff(tmp_path / "whole", tmp_path / "some")
    assert (found.differing, found.unmatched) == (0, ())
    assert all("has no digest, such as probe of nowhere" in one for one in found.reasons)


def test_a_graph_of_another_step_is_recorded_where_it_is_replayed_in_a_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_graphs(monkeypatch)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with verify.record(tmp_path, model, steps=range(2, 4)) as recording:
        graph = FakeGraph()
        with capture(graph):
            out = model(x)
        values = []
        for number in range(5):
            x.fill_(number)
            graph.replay()
            values.append(out.detach().clone())
            recording.step()
    found = {one.number: one for one in steps_of(tmp_path)}
    assert sorted(found) == [-1, 1, 2, 3, 4]
    for number in (2, 3):
        (event,) = events(found[number], "output")
        assert event.digest == verify.digest(values[number])
    for number in (1, 4):
        assert not events(found[number], "output")


@pytest.mark.parametrize(
    ("orders", "full"),
    [
        (Orders(""), [0, 3, 6]),
        (Orders("", states=True), [*range(8)]),  # of `verify replay`, which compares all state
        (Orders("", steps=(2, 5)), [2, 3, 4]),
        (Orders("", states=True, steps=(2, 5)), [2, 3, 4]),
    ],
)
def test_a_tool_that_runs_the_script_again_may_choose_otherwise(
    tmp_path: Path, orders: Orders, full: list[int]
) -> None:
    with ordered(tmp_path / "run", orders):
        run(tmp_path / "unused", every=3)
    found = steps_of(tmp_path / "run")
    assert [one.number for one in found if events(one, "output")] == full


def test_operations_begin_steps_as_they_do_in_full(tmp_path: Path) -> None:
    """Also those that write to what they were given by name."""
    ends = []
    for name, every in (("whole", 1), ("some", 3)):
        ones, out = torch.ones(2), torch.zeros(2)
        with verify.record(tmp_path / name, nn.Identity(), level="op", every=every) as recording:
            for number in range(6):
                torch.add(ones, ones, out=out) if number % 2 else out.mul_(2)
                recording.step()
                torch.empty(3)
                recording.step()  # that wrote nothing
        ends.append(recording.number)
    assert ends == [6, 6]


def test_stages_of_the_layer_are_in_chosen_steps_and_begin_the_others(tmp_path: Path) -> None:
    found, ends = [], []
    for name, every in (("whole", 1), ("some", 3)):
        model = moe_block.Block()
        given = [tensor.detach() for tensor in routed(model)]
        with verify.record(tmp_path / name, model, every=every) as recording:
            for _ in range(4):
                model(moe_block.batch(8)).sum().backward()
                recording.step()
            for _ in range(2):
                with torch.no_grad():
                    mok.moe(*given)  # no module's
                recording.step()
        ends.append(recording.number)
        found.append({one.number: one for one in steps_of(tmp_path / name)})
    assert ends == [6, 6]
    for number in (0, 3):
        stages = [one for one in events(found[1][number], "probe") if "/mok." in str(one.key)]
        assert stages
        assert found[0][number].program.keys == found[1][number].program.keys
        assert found[0][number].lanes == found[1][number].lanes


def routed(model: moe_block.Block) -> list[torch.Tensor]:
    """Arguments of mok.moe."""
    x, layer = moe_block.batch(8), model.moe
    experts, weights = model.route(x)
    return [x, experts, weights, layer.w_gate, layer.w_up, layer.w_down]


def test_a_call_that_ends_in_another_step_is_over(tmp_path: Path) -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.inner(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    model = Trains()
    with verify.record(tmp_path, model, every=2) as recording:
        for _ in range(3):
            model(torch.randn(2, 4))
            assert recording.hooks.idle()
