"""Captures that fail, overlap or outlast a recording, and what is put back behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeCaptures, FakeGraph, capture, use_fake_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from traced_models import events, steps_of

import verify
from verify.errors import VerifyError
from verify.tracing import graph_digests, graphs
from verify.tracing.files import read_folder
from verify.tracing.keeping import Keeper
from verify.tracing.states import Held


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_graphs(monkeypatch)


def skipped(folder: Path) -> dict[str, str]:
    (found,) = read_folder(folder).values()
    return dict(found.skipped)


def methods() -> dict[str, Any]:
    return {name: vars(FakeGraph)[name] for name in ("capture_begin", "capture_end", "replay")}


def test_methods_are_put_back_exactly(tmp_path: Path) -> None:
    before = methods()
    with verify.record(tmp_path / "a", nn.Linear(2, 2)):
        assert all(methods()[name] is not one for name, one in before.items())
    assert methods() == before
    with pytest.raises(KeyError), verify.record(tmp_path / "b", nn.Linear(2, 2)):
        raise KeyError("x")
    assert methods() == before


def test_what_somebody_put_around_ours_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(FakeGraph, "replay", FakeGraph.replay)  # put back behind this test
    graph = FakeGraph()
    with capture(graph):
        pass
    with verify.record(tmp_path, nn.Linear(2, 2)):
        ours = FakeGraph.replay

        def theirs(graph: FakeGraph) -> None:
            calls.append(graph)
            ours(graph)

        FakeGraph.replay = theirs  # type: ignore[method-assign]
    graph.replay()
    assert FakeGraph.replay is theirs
    assert calls == [graph]


def test_a_method_that_is_inherited_is_inherited_again() -> None:
    class Derived(FakeGraph):
        pass

    undo = graphs._wrapped(Derived, "replay", lambda _, run: run())
    assert "replay" in vars(Derived)
    undo()
    assert "replay" not in vars(Derived)


def test_a_capture_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    before = methods()
    with verify.record(tmp_path, model), torch.no_grad():
        with monkeypatch.context() as inside:
            inside.setattr(FakeGraph, "fails", True)
            bad = FakeGraph()
            with pytest.raises(RuntimeError, match="invalidated"), capture(bad):
                model(x)
        with pytest.raises(RuntimeError, match="nothing to replay"):
            bad.replay()
        good = FakeGraph()
        with capture(good):
            model(x)
        good.replay()
        with pytest.raises(RuntimeError, match="captured already"):
            good.capture_begin()
        good.replay()
    assert methods() == before
    _, step = steps_of(tmp_path)
    assert len(events(step, "output")) == 2


def test_an_error_inside_of_a_capture_passes_through(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with verify.record(tmp_path, model), torch.no_grad():
        graph = FakeGraph()
        with pytest.raises(RuntimeError, match="shapes cannot"), capture(graph):
            model(torch.cat([model(x), x], 1))
        graph.replay()  # torch ends a capture then, too
    _, step = steps_of(tmp_path)
    assert len(events(step, "output")) == 1


def test_a_replay_that_fails_gives_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with verify.record(tmp_path, model), torch.no_grad():
        graph = FakeGraph()
        with capture(graph):
            model(x)
        monkeypatch.setattr(graph, "ended", False)
        with pytest.raises(RuntimeError, match="nothing to replay"):
            graph.replay()
        graph.ended = True
        graph.replay()
    _, step = steps_of(tmp_path)
    assert len(events(step, "output")) == 1


def test_tables_that_do_not_arrive_end_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise MemoryError("no pinned memory")

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with verify.record(tmp_path, model), torch.no_grad():
        monkeypatch.setattr(graph_digests.GraphDigests, "finish", fails)
        graph = FakeGraph()
        with pytest.raises(MemoryError), capture(graph):
            model(x)
    with pytest.raises(RuntimeError, match="nothing to replay"):
        graph.replay()


def test_a_capture_that_outlasts_the_recording_gets_its_tables(tmp_path: Path) -> None:
    """Otherwise its replays would read memory that nobody wrote."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    before, graph = methods(), FakeGraph()
    watch = graphs.GraphWatch(_Quiet(), model, "module")
    with watch.attached():
        graph.capture_begin()
        watch.take("", [Held("x", "probe", "", x)])
    assert methods() != before
    graph.capture_end()
    assert methods() == before
    found = graphs._known[graph]
    assert found.digests is not None
    found.digests.clear()
    graph.replay()
    assert found.digests.lanes()[1:].any()


def test_of_operations_only_those_of_the_program_are_recorded(tmp_path: Path) -> None:
    """Not those that make room for digests: tables hold addresses, which differ between runs."""
    x, graph = torch.ones(2), FakeGraph()
    with verify.record(tmp_path, nn.Linear(2, 2), level="op"), torch.no_grad():
        with capture(graph):
            verify.probe("x", x)
        graph.replay()
        x.add_(1)
    names = [one.definition.name for one in steps_of(tmp_path)[1].events]
    assert [name for name in names if "aten" in name] == ["(root)/aten.add_.Tensor"]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_kernel_that_does_not_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """All lanes would be zero, and all recordings equal. Nor is the file one that is whole."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    graph = FakeGraph()

    def recorded() -> None:
        with verify.record(tmp_path, model) as recording, torch.no_grad():
            with capture(graph):
                model(x)
            monkeypatch.setattr(FakeGraph, "run", lambda _: None)
            for _ in range(steps):
                graph.replay()
                recording.step()

    with pytest.raises(VerifyError, match="gives other lanes on cuda:0 than the host does"):
        recorded()
    (found,) = read_folder(tmp_path).values()
    assert "VerifyError" in (found.reason or "")


def test_a_graph_in_a_graph_keeps_its_chunks(tmp_path: Path) -> None:
    """Its digests run in the replays of the other, also when it is gone itself."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with verify.record(tmp_path, model), torch.no_grad():
        inner, outer, next_one = FakeGraph(), FakeGraph(), FakeGraph()
        with capture(inner):
            model(x)
        digests = graphs._known[inner].digests
        assert isinstance(digests, graph_digests.GraphDigests)
        (chunk,) = digests._taken
        del digests
        with capture(outer):
            inner.replay()
        del inner
        with capture(next_one):
            model(x)
        digests = graphs._known[next_one].digests
        assert isinstance(digests, graph_digests.GraphDigests)
        assert all(one is not chunk for one in digests._taken)
        del outer
        assert any(one is chunk for one in graph_digests._spare[0])


def test_a_graph_in_a_graph_is_told(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with verify.record(tmp_path, model), torch.no_grad():
        inner, outer, plain = FakeGraph(), FakeGraph(), FakeGraph()
        with capture(plain):
            x.add_(1)
        with capture(inner):
            model(x)
        with capture(outer):
            plain.replay()
        outer.replay()
        assert not verify.tracing.recording._active[0]._skipped
        holds = FakeGraph()
        with capture(holds):
            inner.replay()
        holds.replay()
    assert "while another was captured" in skipped(tmp_path)["what a CUDA graph computes"]


@pytest.mark.parametrize("told", [True, False])
def test_captures_at_once(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """The second has no digests; where the driver does not tell them apart neither gets more."""
    monkeypatch.setattr(FakeCaptures, "told", told)
    quiet = _Quiet()
    watch = graphs.GraphWatch(quiet, nn.Linear(2, 2), "module")
    one, two, x = FakeGraph(), FakeGraph(), torch.ones(3)
    with watch.attached():
        one.capture_begin()
        first, FakeGraph.current = FakeGraph.current, None
        number = FakeGraph.number
        two.capture_begin()
        watch.take("", [Held("y", "probe", "", x)])
        two.capture_end()
        FakeGraph.current, FakeGraph.number = first, number
        watch.take("", [Held("x", "probe", "", x)])
        one.capture_end()
        two.replay()
        assert [event.name for event in graphs._known[one].events] == ["x"]
        assert not graphs._known[two].events
        if told:
            assert "another capture was under way" in quiet.told["what a CUDA graph computes"]
        else:
            assert "the beginning of its capture" in quiet.told["what a CUDA graph computes"]


class _Quiet:
    """A recorder that takes nothing."""

    listening, number = True, 0

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def skip(self, what: str, why: str) -> None:
        self.told.setdefault(what, why)

    def replay(self, captured: graphs.Captured, run: Any) -> Any:
        return run()


def test_without_the_kernel_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.device_kernel import Loaded

    reason = "kernels need the extra"
    monkeypatch.setattr(graph_digests, "loaded", lambda _: Loaded(None, reason=reason))
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with verify.record(tmp_path, model), torch.no_grad():
        graph = FakeGraph()
        with capture(graph):
            model(x)
        graph.replay()
    assert skipped(tmp_path) == {"what a CUDA graph computes": f"no digest on the device: {reason}"}


def test_a_call_in_a_capture_from_elsewhere_is_told(tmp_path: Path) -> None:
    """Such as one that another library began by the driver."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    graph = FakeGraph()
    with verify.record(tmp_path, model), torch.no_grad():
        FakeGraph.current = graph
        try:
            model(x)
        finally:
            FakeGraph.current = None
    assert "the beginning of its capture was not seen" in skipped(tmp_path).popitem()[1]


def test_a_tool_that_keeps_tensors_counts_those_of_graphs(tmp_path: Path) -> None:
    from verify.replaying.orders import Orders

    keep = ((None, 0, "m", "output", "", 1),)
    keeper = Keeper(Orders(folder=str(tmp_path), keep=keep), 0)
    place = ("m", "output", "")
    for _ in range(3):
        keeper.pass_over(0, place, "inside")
    keeper.pass_over(0, ("n", "output", ""), "inside")
    keeper.close(0)
    left = (tmp_path / "rank-00000.step-0.left.json").read_text()
    assert left.count("inside") == 1
    assert '\\"output\\", \\"\\", 1]' in left


ACTS = st.lists(st.sampled_from(["call", "capture", "replay", "last", "step"]), max_size=14)


@settings(max_examples=40, deadline=None)
@given(ACTS)
def test_any_order_of_calls_captures_and_replays(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str]
) -> None:
    """Against a list: a step holds what ran in it, with the values of then."""
    folder = tmp_path_factory.mktemp("run")
    model = nn.Linear(2, 2)
    made: list[tuple[FakeGraph, torch.Tensor]] = []
    expected: list[list[str]] = [[]]
    with verify.record(folder, model) as recording, torch.no_grad():
        for number, act in enumerate(acts):
            if act == "call":
                out = model(torch.full((1, 2), float(number)))
                expected[-1].append(str(verify.hashing.digest_on_host(out)))
            elif act == "capture":
                x = torch.full((1, 2), float(number))
                graph = FakeGraph()
                with capture(graph):
                    model(x)
                made.append((graph, x))
            elif act == "step":
                recording.step()
                expected += [[]] if expected[-1] else []
            elif made:
                graph, x = made[0 if act == "replay" else -1]
                x += 1
                graph.replay()
                expected[-1].append(str(verify.hashing.digest_on_host(model.forward(x))))
    steps = steps_of(folder)[1:]
    found = [[str(one.digest) for one in events(step, "output")] for step in steps]
    assert [one for one in found if one] == [one for one in expected if one]
