"""CUDA graphs in a recording on a GPU: digests in the graph, equal to those of eager calls."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sync_debug import synchronising_raises
from torch import Tensor, nn
from traced_models import events, steps_of

import verify
from verify.hashing import digest_on_host
from verify.reasons import Verdict
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder

pytestmark = [
    pytest.mark.gpu,
    # of torch, where a graph keeps the nodes of a capture's stream
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

ROWS, WIDTH, SLOTS = 65536, 8, 4


class AtomicSum(nn.Module):
    """Adds rows up by atomics, in whatever order they come."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", torch.arange(ROWS) % SLOTS)

    def forward(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(SLOTS, WIDTH).index_add_(0, self.slots, rows)


class OrderedSum(nn.Module):
    """Its twin: the same sums in one order."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.view(-1, SLOTS, WIDTH).sum(0)


class Layer(nn.Module):
    def __init__(self, combine: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.combine = nn.Linear(WIDTH, WIDTH), combine
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.combine(self.up(x).relu())))


def layer(combine: type[nn.Module] = OrderedSum, dropout: float = 0.0) -> Layer:
    return Layer(combine(), dropout).cuda()


def batches(count: int) -> Iterator[Tensor]:
    made = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(ROWS, WIDTH, generator=made).cuda()


def warm(run: Callable[[], object]) -> None:
    """Libraries set themselves up at their first calls, which a capture cannot hold."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)


def train(model: Layer, x: Tensor) -> None:
    model(x).square().mean().backward()


def skipped(folder: Path) -> dict[str, str]:
    (found,) = read_folder(folder).values()
    assert found.complete, found.problem
    return dict(found.skipped)


def run(folder: Path, model: Layer, *, eager: bool = False, steps: int = 6) -> Path:
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    warm(lambda: train(model, x))
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with verify.record(folder, model) as recording:
        if not eager:
            with torch.cuda.graph(graph):
                train(model, x)
        for batch in batches(steps):
            x.copy_(batch)
            if eager:
                model.zero_grad()
                train(model, x)
            else:
                graph.replay()
            recording.step()
    return folder


def test_forward_and_backward_give_the_digests_of_eager_steps(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", layer(), eager=True), run(tmp_path / "b", layer())
    found = diff(a, b)
    assert (found.verdict, found.unmatched_count) == (Verdict.VERIFIED, 0), found.reasons
    step = steps_of(b)[1]
    kinds = {one.definition.kind for one in step.events}
    assert {"input", "output", "grad_output", "grad_input", "grad", "parameter"} <= kinds
    assert len({one.lanes for one in steps_of(b)[1:]}) == 6


def test_an_atomic_sum_in_a_graph_is_located(tmp_path: Path) -> None:
    found = diff(run(tmp_path / "a", layer(AtomicSum)), run(tmp_path / "b", layer(AtomicSum)))
    assert found.verdict is Verdict.MISMATCH
    assert found.culprit is not None
    assert (found.culprit.names, found.culprit.place.kind) == (("combine",), "output")


def test_its_twin_is_verified(tmp_path: Path) -> None:
    found = diff(run(tmp_path / "a", layer()), run(tmp_path / "b", layer()))
    assert found.verdict is Verdict.VERIFIED, found.reasons


def test_several_replays_without_waiting(tmp_path: Path) -> None:
    """On two streams in turn, with the tensors overwritten at once."""
    model, kept = layer(), []
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    given = list(batches(4))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    with verify.record(tmp_path, model) as recording, torch.no_grad():
        warm(lambda: model(x))
        recording.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        with synchronising_raises():
            for number, batch in enumerate(given):
                here, other = streams[number % 2], streams[1 - number % 2]
                here.wait_stream(other)
                with torch.cuda.stream(here):
                    x.copy_(batch)
                    graph.replay()
                    kept.append((x.clone(), y.clone()))
                    y.zero_()
        streams[0].wait_stream(streams[1])
    step = steps_of(tmp_path)[2]
    for kind, at in (("input", 0), ("output", 1)):
        found = events(step, kind, "(root)")
        assert [one.digest for one in found] == [digest_on_host(one[at]) for one in kept]


def test_recording_changes_no_bit_and_the_generator_moves(tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        model, x = layer(dropout=0.3), next(batches(1))
        warm(lambda model=model, x=x: train(model, x))
        model.zero_grad()
        torch.cuda.manual_seed(3)
        graph = torch.cuda.CUDAGraph()

        def steps(model: Layer = model, x: Tensor = x, graph: torch.cuda.CUDAGraph = graph) -> None:
            with torch.cuda.graph(graph):
                train(model, x)
            for _ in range(3):
                graph.replay()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad

        if on:
            with verify.record(tmp_path, model):
                steps()
        else:
            steps()
        found.append((str(verify.digest(model.state_dict())), torch.cuda.get_rng_state().tolist()))
    assert found[0] == found[1]
    start, step = steps_of(tmp_path)
    outputs = events(step, "output", "drop")
    assert len({str(one.digest) for one in outputs}) == 3
    assert events(start, "rng", "cuda:0")[0].digest != events(step, "rng", "cuda:0")[0].digest


def test_an_optimizer_in_the_graph_ends_the_steps(tmp_path: Path) -> None:
    folders = []
    for side in "ab":
        model, x = layer(), next(batches(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)

        def step(model: Layer = model, x: Tensor = x, optimizer: object = optimizer) -> None:
            optimizer.zero_grad()  # type: ignore[attr-defined]
            train(model, x)
            optimizer.step()  # type: ignore[attr-defined]

        warm(step)
        with verify.record(tmp_path / side, model, optimizer):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(3):
                graph.replay()
        folders.append(tmp_path / side)
    steps = steps_of(folders[0])
    assert [one.number for one in steps] == [-1, 0, 1, 2]
    assert all(events(one, "output", "down") and events(one, "optimizer") for one in steps[1:])
    weights = {str(events(one, "parameter", "down.weight")[0].digest) for one in steps}
    assert len(weights) == 4
    assert diff(*folders).verdict is Verdict.VERIFIED


def test_a_graph_from_before_is_not_verified(tmp_path: Path) -> None:
    folders = []
    for side in "ab":
        model, x = layer(), next(batches(1))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            warm(lambda model=model, x=x: model(x))
            with torch.cuda.graph(graph):
                model(x)
        with verify.record(tmp_path / side, model):
            graph.replay()
        assert "nothing inside of it is seen" in skipped(tmp_path / side).popitem()[1]
        folders.append(tmp_path / side)
    assert diff(*folders).verdict is Verdict.UNVERIFIED


class Unused(nn.Module):
    """Is given a tensor that its graph does not read."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + 1


def test_what_a_graph_was_given_stays_for_its_digests(tmp_path: Path) -> None:
    """Freed and returned to the driver, its memory could not be read by a replay; memory of the
    graph's own pool is not held."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).cuda()
    model.add_module("unused", unused := Unused())
    x = next(batches(1))
    with verify.record(tmp_path, model) as recording, torch.no_grad():
        warm(lambda: model[0](x))
        recording.step()
        mask = torch.ones(1 << 24, device="cuda")
        kept = str(digest_on_host(mask))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.cuda.graph(graph):
            y = unused(model[1](model[0](x)), mask)
        assert torch.cuda.memory_allocated() - before < 6 * x.nbytes + (8 << 20)
        del mask
        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(2):
            graph.replay()
            model[1](y)  # takes what memory there is
        torch.cuda.synchronize()
    found = events(steps_of(tmp_path)[2], "input", "unused")
    masks = [str(one.digest) for one in found if one.definition.path == "1"]
    assert masks == [kept, kept]


def test_graphs_of_one_pool_do_not_write_over_each_other(tmp_path: Path) -> None:
    """Tables and lanes are not of the pool, whose memory both graphs use in turn."""
    model, x = layer(), next(batches(1))
    with verify.record(tmp_path, model) as recording, torch.no_grad():
        warm(lambda: model(x))
        recording.step()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            model(x)
        with torch.cuda.graph(second, pool=first.pool()):
            model(x)
        for graph in (first, second, first, second):
            graph.replay()
        model(x)
    step = steps_of(tmp_path)[2]
    for name in ("up", "combine", "down"):
        found = [str(one.digest) for one in events(step, "output", name)]
        assert len(found) == 5
        assert len(set(found)) == 1


def test_streams_that_a_capture_forks_into(tmp_path: Path) -> None:
    one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleList([one, two]).cuda()
    x, kept = next(batches(1)), []
    with verify.record(tmp_path, model) as recording, torch.no_grad():
        warm(lambda: [part(x) for part in model])
        recording.step()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                kept.append(two(x))
            kept.append(one(x))
            here.wait_stream(side)
        for batch in batches(2):
            x.copy_(batch)
            graph.replay()
    step = steps_of(tmp_path)[2]
    for name, y in zip(("1", "0"), kept, strict=True):
        assert events(step, "output", name)[-1].digest == digest_on_host(y)


class Around(nn.Module):
    """Without hooks of its own, as torch.cuda.make_graphed_callables wants it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_graphed_callables(tmp_path: Path) -> None:
    model, x = layer(), next(batches(1))
    with verify.record(tmp_path, model) as recording:
        graphed = torch.cuda.make_graphed_callables(Around(model), (x.clone(),))
        recording.step()
        for batch in batches(2):
            graphed(batch).square().mean().backward()
            recording.step()
            model.zero_grad()
        for batch in batches(2):
            train(model, batch)
            recording.step()
            model.zero_grad()
    _, _, *steps = steps_of(tmp_path)
    for graph, eager in zip(steps[:2], steps[2:], strict=True):
        for kind in ("output", "grad_output", "grad_input", "grad"):
            one, other = events(graph, kind), events(eager, kind)
            assert one
            assert {(e.key, e.digest) for e in one} == {(e.key, e.digest) for e in other}


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="inductor needs one")
@pytest.mark.filterwarnings("ignore")  # inductor's advice
def test_what_a_compiler_captures_is_inside_of_its_module(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).cuda()
    model = torch.compile(inner, mode="reduce-overhead")
    x = next(batches(1))
    with torch.no_grad():
        for _ in range(4):  # captured before the recording
            model(x)
        with verify.record(tmp_path, model):
            for _ in range(2):
                torch.compiler.cudagraph_mark_step_begin()
                y = model(x).clone()
    assert not skipped(tmp_path)
    found = events(steps_of(tmp_path)[1], "output", "(root)")
    assert [one.digest for one in found] == [digest_on_host(y)] * 2


@pytest.mark.parametrize("level", ["module", "op"])
def test_another_default_device_does_not_matter(tmp_path: Path, level: str) -> None:
    """Nor do operations of ours count as the program's."""
    model, x = layer(), next(batches(1))
    warm(lambda: model(x))
    with torch.device("cuda"), verify.record(tmp_path, model, level=level), torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
    step = steps_of(tmp_path)[1]
    assert [one.digest for one in events(step, "output", "(root)")] == [digest_on_host(y)]
    names = [one.definition.name for one in step.events]
    assert not [name for name in names if "aten.copy_" in name or "aten.arange" in name]
