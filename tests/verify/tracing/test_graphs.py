"""CUDA graphs in a recording, on graphs that a CPU captures: a replay gives what was captured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_graphs import FakeCaptures, FakeGraph, capture, use_fake_graphs
from torch import Tensor, nn
from traced_models import events, steps_of

import verify
from verify.hashing import digest_on_host
from verify.reasons import Verdict
from verify.tracing import graph_digests, graphs
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_graphs(monkeypatch)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.fault: Callable[[Tensor], Tensor] = lambda t: t

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.fault(self.up(x)).relu())


def inputs(count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 4) for _ in range(count)]


def captured(model: nn.Module, x: Tensor) -> FakeGraph:
    """Forward and backward."""
    graph = FakeGraph()
    with capture(graph):
        model(x).square().mean().backward()
    return graph


def skipped(folder: Path) -> dict[str, str]:
    (found,) = read_folder(folder).values()
    assert found.complete, found.problem
    return dict(found.skipped)


def eager_run(folder: Path, model: Small) -> Path:
    x = torch.zeros(2, 4)
    with verify.record(folder, model) as recording:
        for batch in inputs():
            x.copy_(batch)
            model.zero_grad()
            model(x).square().mean().backward()
            recording.step()
    return folder


def graph_run(folder: Path, model: Small) -> Path:
    x = torch.zeros(2, 4)
    with verify.record(folder, model) as recording:
        graph = captured(model, x)
        for batch in inputs():
            x.copy_(batch)
            graph.replay()
            recording.step()
    return folder


def test_replays_give_what_eager_steps_give(tmp_path: Path) -> None:
    a = eager_run(tmp_path / "a", Small())
    b = graph_run(tmp_path / "b", Small())
    found = diff(a, b)
    assert (found.verdict, found.differing, found.unmatched_count) == (Verdict.VERIFIED, 0, 0)
    first, second = (steps_of(folder)[1:] for folder in (a, b))
    assert [len(one) for one in first] == [len(one) for one in second]
    kinds = {one.definition.kind for one in second[0].events}
    assert {"input", "output", "grad_output", "grad_input", "grad"} <= kinds
    assert len({bytes(one.lanes) for one in second}) == 3
    assert not skipped(b)


def test_a_fault_inside_of_a_graph_is_located(tmp_path: Path) -> None:
    """Like an atomic sum: one replay of three gives another last bit between the two layers."""
    calls: list[int] = []

    def flips(t: Tensor) -> Tensor:
        calls.append(1)
        out = t.clone()
        FakeGraph.current.tape.append(lambda: flip(out))  # type: ignore[union-attr]
        return out

    def flip(out: Tensor) -> None:
        calls.append(1)
        if len(calls) == 3:  # the second replay
            with torch.no_grad():
                out.view(torch.int32)[0, :] ^= 1

    def recorded(side: str, fault: Callable[[Tensor], Tensor]) -> Path:
        model = Small()
        model.fault = fault
        return graph_run(tmp_path / side, model)

    faulty = recorded("faulty", flips)
    clean, again = recorded("clean", torch.clone), recorded("again", torch.clone)
    assert diff(clean, again).verdict is Verdict.VERIFIED
    found = diff(clean, faulty)
    assert found.verdict is Verdict.MISMATCH
    assert found.culprit is not None
    place = found.culprit.place
    assert (place.step, place.name, place.kind) == (1, "down", "input")


def test_a_capture_alone_gives_no_events(tmp_path: Path) -> None:
    model, x = Small(), torch.zeros(2, 4)
    with verify.record(tmp_path, model):
        graph = captured(model, x)
        verify.probe("x", x)
    _, step = steps_of(tmp_path)
    assert not events(step, "output")
    assert not events(step, "grad_input")
    assert len(events(step, "probe")) == 1
    assert graph.ended


def test_several_replays_of_a_step_are_calls_in_a_row(tmp_path: Path) -> None:
    model, x, kept = Small(), torch.zeros(2, 4), []
    with verify.record(tmp_path, model), torch.no_grad():
        model(x)  # warm-up
        graph = FakeGraph()
        with capture(graph):
            y = model(x)
        for batch in inputs(2):
            x.copy_(batch)
            graph.replay()
            kept.append(y.clone())
            verify.probe("y", y)
        model(x)
    _, step = steps_of(tmp_path)
    outputs = events(step, "output", "(root)")
    assert [one.occurrence for one in outputs] == [0, 1, 2, 3]
    assert [one.digest for one in outputs[1:3]] == [digest_on_host(one) for one in kept]
    assert outputs[2].digest == outputs[3].digest != outputs[0].digest
    order = [
        one.definition.name for one in step.events if one.definition.kind in ("output", "probe")
    ]
    assert order == ["up", "down", "(root)"] + ["up", "down", "(root)", "y"] * 2 + [
        "up",
        "down",
        "(root)",
    ]


def test_a_graph_from_before_is_told_and_not_verified(tmp_path: Path) -> None:
    sides = []
    for side in "ab":
        model, x = Small(), torch.zeros(2, 4)
        graph = captured(model, x)
        with verify.record(tmp_path / side, model) as recording:
            recording.step()
            graph.replay()
        sides.append(tmp_path / side)
        told = skipped(tmp_path / side)
        assert list(told) == ["what a CUDA graph computes"]
        assert "first replayed in step 0: nothing inside of it is seen" in next(iter(told.values()))
    found = diff(*sides)
    assert found.verdict is Verdict.UNVERIFIED
    assert found.differing == 0
    assert (
        "has no digest, such as what a CUDA graph computes: it was not captured" in found.reasons[0]
    )


def test_graphs_of_a_compiler_are_not_told(tmp_path: Path) -> None:
    """A compiled module's borders are events, whether it replays a graph inside or not."""
    model, x = Small(), torch.zeros(2, 4)
    graph = captured(model, x)
    scope = {"__name__": "torch._inductor.cudagraph_trees"}
    exec("def run(graph):\n    graph.replay()", scope)
    run: Callable[[FakeGraph], None] = scope["run"]  # type: ignore[assignment]
    with verify.record(tmp_path, model):
        run(graph)
    assert not skipped(tmp_path)


def test_graphs_of_other_things_are_not_told(tmp_path: Path) -> None:
    model, x = Small(), torch.zeros(2, 4)
    with verify.record(tmp_path, model):
        graph = FakeGraph()
        with capture(graph):
            x.add_(1)
        graph.replay()
    assert not skipped(tmp_path)
    assert x.sum() == 16  # the fake computes during the capture, too


def test_a_graph_gives_its_events_to_a_later_recording(tmp_path: Path) -> None:
    model, x = Small(), inputs(1)[0]
    with verify.record(tmp_path / "a", model):
        graph = captured(model, x)
        graph.replay()
    graph.replay()  # of no recording
    with verify.record(tmp_path / "b", model):
        graph.replay()
    assert steps_of(tmp_path / "a")[1].lanes == steps_of(tmp_path / "b")[1].lanes
    assert not skipped(tmp_path / "b")
    other = Small()
    for folder, others, level in (("c", other, "module"), ("d", model, "op")):
        with verify.record(tmp_path / folder, others, level=level):
            graph.replay()
        assert "one of the same model and level" in skipped(tmp_path / folder).popitem()[1]


def test_a_graph_that_is_reset_is_another_one(tmp_path: Path) -> None:
    """Captured again where nobody looked, it would seem to compute zeros."""
    model, x = Small(), inputs(1)[0]
    with verify.record(tmp_path / "a", model):
        graph = captured(model, x)
    assert "reset" in vars(graph)
    graph.reset()
    assert "reset" not in vars(graph)
    with capture(graph):
        model(x)
    with verify.record(tmp_path / "b", model):
        graph.replay()
    assert skipped(tmp_path / "b")
    assert not events(steps_of(tmp_path / "b")[1], "output")


def test_an_optimizer_in_the_graph_ends_the_step(tmp_path: Path) -> None:
    found = {}
    for way in ("eager", "graph"):
        model, x = Small(), torch.zeros(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        start = [p.detach().clone() for p in model.parameters()]

        def step(model: Small = model, x: Tensor = x, optimizer: object = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()  # type: ignore[attr-defined]

        with verify.record(tmp_path / way, model, optimizer):
            graph = FakeGraph()
            if way == "graph":
                with capture(graph):
                    step()
                with torch.no_grad():  # CUDA computes nothing during a capture
                    for p, value in zip(model.parameters(), start, strict=True):
                        p.copy_(value)
            for batch in inputs():
                x.copy_(batch)
                if way == "graph":
                    graph.replay()
                else:
                    optimizer.zero_grad()
                    step()
        found[way] = tmp_path / way
    assert [one.number for one in steps_of(found["graph"])] == [-1, 0, 1, 2]
    compared = diff(found["eager"], found["graph"])
    assert (compared.verdict, compared.unmatched_count) == (Verdict.VERIFIED, 0)


def test_a_step_that_is_ended_during_a_capture_ends_with_each_replay(tmp_path: Path) -> None:
    model, x = Small(), torch.zeros(2, 4)
    with verify.record(tmp_path, model) as recording, torch.no_grad():
        graph = FakeGraph()
        model(x)
        with capture(graph):
            model(x)
            recording.step()
        graph.replay()
        graph.replay()
    steps = steps_of(tmp_path)
    assert [one.number for one in steps] == [-1, 0, 1]
    assert [len(events(one, "output", "up")) for one in steps] == [0, 2, 1]
    assert all(events(one, "output", "up") and events(one, "parameter") for one in steps[1:])


def test_values_of_the_host_are_as_captured_and_pinned_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Small(), inputs(1)[0]
    for pinned in (False, True):
        monkeypatch.setattr(FakeCaptures, "host", (x,))
        monkeypatch.setattr(Tensor, "is_pinned", lambda *_, pinned=pinned: pinned)
        with verify.record(tmp_path / str(pinned), model), torch.no_grad():
            graph = FakeGraph()
            with capture(graph):
                model(x)
            graph.replay()
        step = steps_of(tmp_path / str(pinned))[1]
        found = events(step, "input", "(root)")
        if pinned:
            assert not found
            assert "input of (root) 0 in a CUDA graph" in skipped(tmp_path / str(pinned))
        else:
            assert found[0].digest == digest_on_host(x)
        assert events(step, "output", "up")[0].digest == digest_on_host(model.up(x))


def test_more_digests_than_there_is_room_for_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_ROWS", {"module": 5})
    monkeypatch.setattr(graph_digests, "ROWS", 5)
    model, x = Small(), torch.zeros(2, 4)
    with verify.record(tmp_path / "silent", model):
        captured(model, x)
    assert not skipped(tmp_path / "silent")  # without a replay nothing is lost
    with verify.record(tmp_path / "told", model):
        captured(model, x).replay()
    told = skipped(tmp_path / "told")
    assert "has room for 4 digests" in told["output of down in a CUDA graph"]
    assert (
        len(
            [
                one
                for one in steps_of(tmp_path / "told")[1].events
                if one.definition.kind in ("input", "output")
            ]
        )
        == 4
    )


def test_graphs_that_die_give_their_memory_to_the_next(tmp_path: Path) -> None:
    model, x = Small(), torch.zeros(2, 4)
    with verify.record(tmp_path, model):
        for _ in range(3):
            captured(model, x).replay()
            gc.collect()
    assert len(graph_digests._spare[0]) == graphs._ROWS["module"] // graph_digests.ROWS
    _, step = steps_of(tmp_path)
    outputs = events(step, "output", "up")
    assert len(outputs) == 3
    assert len({str(one.digest) for one in outputs}) == 1


def test_a_recording_cannot_begin_inside_of_a_capture(tmp_path: Path) -> None:
    model = Small()
    with (
        capture(FakeGraph()),
        pytest.raises(verify.UnsupportedError, match="begin it before"),
        verify.record(tmp_path, model),
    ):
        pass
    with verify.record(tmp_path / "next", model):
        model(torch.zeros(2, 4))
