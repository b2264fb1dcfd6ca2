"""Evidence of degrees and of many forwards: what counts them, its shape, tables and goals.

Goals of the forward's speed as well, which rest on the benchmark's documents.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_documents import bench_document
from gpu_scripts import check_contradicted, check_needed, gpu_scripts, load_script
from hypothesis import given
from hypothesis import strategies as st

from mok.bench.document import ratios
from mok.bench.shapes import PEER_SHAPES, SHAPES, Shape
from mok.errors import InputError
from verify.conditions.cuda_contention import Variant, variants


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def endurance(scripts: dict[str, ModuleType]) -> Iterator[ModuleType]:
    yield load_script("endurance")
    del sys.modules["endurance"]


def endured(endurance: ModuleType, shape: str, wanted: int, ms: float, **more: Any) -> Any:
    """A row of endurance.json: one digest, all forwards under load."""
    tally = endurance.Tally(Counter({(1, 2, 3, -1): wanted + 20}))
    half = wanted // 2
    tally.batches += [endurance.Batch("hold=66", half, True, 0.5)]
    tally.batches += [endurance.Batch("busy memory", wanted - half, True, 1.0)]
    row = endurance.row_of(shape, wanted, ms / 1000, tally, 2.0)
    return {**row, **more}


def degree(number: int, ctas: int, segments: str = "1 to 1", **more: Any) -> dict[str, Any]:
    """A row of degrees.json: the same bits, everything occurred, no rule broken."""
    row = {"degree": number, "segments": segments, "ctas": ctas, "equal": True, "tokens": [0, 9]}
    row |= {"blocks": 9, "wraps_x": 4, "wraps_h": 2, "tails": 3, "empty_experts": 1, "crossing": 1}
    return {**row, "lacking": [], "records": 70, "findings": [], "broken": 0, **more}


# ---- batches and digests ------------------------------------------------------------------------


@given(
    forwards=st.integers(1, 3000),
    loads=st.integers(1, 6),
    alone=st.floats(1e-5, 0.1),
    multiprocessors=st.sampled_from([2, 8, 132]),
)
def test_every_forward_is_beside_one_load_and_loads_get_equal_shares(
    endurance: ModuleType, forwards: int, loads: int, alone: float, multiprocessors: int
) -> None:
    chosen = variants(132)[:loads]
    done: Counter[str] = Counter()
    for load, count in endurance.batches(forwards, chosen, multiprocessors, alone):
        assert count > 0
        if count > 1:
            longest = count * alone * endurance.slowed(load, multiprocessors)
            assert longest <= endurance.BATCH_SECONDS * 1.001
        done[load.name] += count
    assert done.total() == forwards
    counts = [done[load.name] for load in chosen]
    assert max(counts) - min(counts) <= 1


def test_a_load_leaves_a_forward_what_it_does_not_take(endurance: ModuleType) -> None:
    assert endurance.slowed(Variant("hold=66", 66), 132) == 2.0
    assert endurance.slowed(Variant("hold=128", 128), 132) == 33.0
    assert endurance.slowed(Variant("busy memory", work="memory"), 132) == 4.0
    assert endurance.slowed(Variant("hold=132", 132), 132) == 132.0


def test_digests_are_counted(endurance: ModuleType) -> None:
    rows = torch.tensor([[1, 2, 3, -4]] * 5 + [[1, 2, 3, -5]])
    assert endurance.distinct(rows) == {(1, 2, 3, -4): 5, (1, 2, 3, -5): 1}
    assert endurance.distinct(rows[:0]) == {}


def test_a_row_passes_with_one_digest_and_enough_forwards_under_load(
    endurance: ModuleType,
) -> None:
    good = endured(endurance, "small", 100, 0.1)
    assert endurance.passed(good)
    assert (good["forwards"], good["under_load"], good["distinct"]) == (120, 100, 1)
    assert [one["forwards"] for one in good["loads"]] == [50, 50]
    assert good["digest"].endswith("f" * 16)
    assert good["per_second"] == pytest.approx(100 / 1.5)
    tally = endurance.Tally(Counter({(1,): 119, (2,): 1}), [endurance.Batch("b", 99, True, 1.0)])
    other = endurance.row_of("small", 100, 1e-4, tally, 2.0)
    assert (other["distinct"], other["differing"], other["under_load"]) == (2, 1, 99)
    assert not endurance.passed(other)
    assert not endurance.passed({**good, "under_load": 99})
    tally.batches[0] = endurance.Batch("b", 99, False, 1.0)
    assert endurance.row_of("small", 100, 1e-4, tally, 2.0)["under_load"] == 0


def test_shapes_are_chosen_by_name(endurance: ModuleType) -> None:
    whole = endurance.chosen((), None, endurance.FORWARDS)
    assert sum(count for shape, count in whole if shape.name != "kimi-shard") >= 10_000
    assert (SHAPES["kimi-shard"], 300) in whole
    assert endurance.chosen(("small",), 7, endurance.FORWARDS) == [(SHAPES["small"], 7)]
    with pytest.raises(InputError):
        endurance.chosen(("nothing",), None, endurance.FORWARDS)


class FakeForward:
    """As endurance.Forward; every `odd`-th forward has another digest."""

    odd = 0
    names = ("out",)

    def __init__(self, shape: Shape, device: object, room: int) -> None:
        self.left, self.done, self.room = 1, 0, room

    def launch(self, count: int) -> None:
        self.left += count
        assert self.left <= self.room

    def collect(self) -> Counter[tuple[int, ...]]:
        numbers = range(self.done, self.done + self.left)
        self.done, self.left = self.done + self.left, 0
        return Counter((int(bool(self.odd) and n % self.odd == 1), 2, 3, 4) for n in numbers)


@dataclass
class FakeLoad:
    """As a load of verify, which is there throughout every `every`-th time."""

    every: int
    asked: list[str]

    @contextmanager
    def opened(self, device: object, *, held: int, work: str, timeout: float) -> Iterator[Any]:
        self.asked.append(f"{held} {work}")
        yield self

    def start(self) -> None:
        self.asked[-1] += " started"

    def begin(self) -> None:
        self.asked[-1] += " begun"

    def overlap(self) -> SimpleNamespace:
        return SimpleNamespace(complete=len(self.asked) % self.every == 0)

    def release(self) -> None:
        self.asked[-1] += " released"


@pytest.mark.parametrize(("every", "shown"), [(1, True), (2, True), (9, False)])
def test_what_had_no_load_throughout_is_run_again(
    endurance: ModuleType, monkeypatch: pytest.MonkeyPatch, every: int, shown: bool
) -> None:
    load = FakeLoad(every, [])
    monkeypatch.setattr(endurance, "Forward", FakeForward)
    monkeypatch.setattr(endurance, "opened", load.opened)
    count = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(endurance.torch.cuda, "get_device_properties", lambda _: count)
    nothing = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(endurance.torch.cuda, "current_stream", lambda: nothing)
    row = endurance.measure(SHAPES["small"], 600, torch.device("cpu"), print)
    assert endurance.passed(row) == shown
    assert row["forwards"] == 21 + sum(one["forwards"] for one in row["loads"])
    assert row["under_load"] == (600 if shown else row["under_load"]) <= 600
    assert len(row["loads"]) == 6
    assert len(load.asked) == {1: 6, 2: 12}.get(every, len(load.asked))
    assert all(one.endswith("started begun released") for one in load.asked)
    monkeypatch.setattr(FakeForward, "odd", 100)
    other = endurance.measure(SHAPES["small"], 600, torch.device("cpu"), print)
    assert (other["distinct"], endurance.passed(other)) == (2, False)
    assert (row["outputs"], other["outputs"]) == ({"out": 1}, {"out": 2})


@pytest.mark.gpu
def test_forwards_have_one_digest_until_something_changes(endurance: ModuleType) -> None:
    from mok.hopper.support import device_problem

    device = torch.device("cuda", torch.cuda.current_device())
    problem = device_problem(device)
    if problem is not None:
        pytest.skip(problem)
    forward = endurance.Forward(SHAPES["small"], device, 100)
    forward.launch(40)
    found = forward.collect()
    assert list(found.values()) == [41]
    forward.x[3, 5] += 1.0
    forward.launch(20)
    changed = forward.collect()
    assert list(changed.values()) == [20]
    assert changed.keys() != found.keys()


# ---- evidence, tables ---------------------------------------------------------------------------


def test_shapes_of_both_documents(scripts: dict[str, ModuleType], endurance: ModuleType) -> None:
    shapes = scripts["shapes"]
    check_needed(shapes.DOCUMENTS["degrees"], degree(4, 132), ())
    many = endured(endurance, "small", 100, 0.1)
    check_needed(shapes.DOCUMENTS["endurance"], many, ("digest", "seconds"))


def test_a_part_that_passed_holds_no_row_that_failed(
    scripts: dict[str, ModuleType], endurance: ModuleType
) -> None:
    evidence = scripts["evidence"]
    good = endured(endurance, "small", 100, 0.1)
    for part, row, wrong in (
        ("degrees", degree(4, 132), {"equal": False}),
        ("degrees", degree(4, 132), {"lacking": ["a tail"]}),
        ("degrees", degree(4, 132), {"broken": 1}),
        ("endurance", good, {"distinct": 2}),
        ("endurance", good, {"under_load": 99}),
    ):
        check_contradicted(evidence, part, row, wrong)


def test_a_line_of_degrees_holds_all_its_grids(scripts: dict[str, ModuleType]) -> None:
    rows = [degree(0, 1), degree(0, 132, tokens=[9, 9]), degree(8, 132, "2 to 3", equal=False)]
    step = {"status": "passed", "document": {"rows": rows}}
    text = scripts["forward_tables"].degrees([{"results": {"degrees": step}}])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert lines[2][:4] == ["one rank", "1 to 1", "1, 132", "0 to 9"]
    assert lines[2][-3:] == ["2 of 2", "140", "0"]
    assert lines[3][:3] == ["8", "2 to 3", "132"]
    assert lines[3][-3] == "0 of 1"


def test_many_forwards_are_drawn_with_their_goals(
    scripts: dict[str, ModuleType], endurance: ModuleType
) -> None:
    rows = [
        endured(endurance, "small", 5000, 0.1),
        endured(endurance, "medium", 4999, 0.9),
        endured(endurance, "slow", 5000, 1.1),
        endured(endurance, "kimi-shard", 300, 8.0, distinct=2),
    ]
    step = {"status": "passed", "document": {"rows": rows}}
    text = scripts["forward_tables"].endurance([{"results": {"endurance": step}}])
    assert "hold=66 2500 (0.20 ms); busy memory 2500 (0.40 ms)" in text
    found = scripts["goals"].judged_endurance({"rows": rows})
    assert [(one.measured, one.met) for one in found] == [
        *[("1", "yes")] * 3,
        ("2", "NO"),
        ("9999", "NO"),
        ("300", "yes"),
    ]
    assert scripts["goals"].summary(found) in text
    assert {one.met for one in scripts["goals"].judged_endurance({})} == {"NO"}


# ---- goals of the forward -----------------------------------------------------------------------


def timed(shape: str, contender: str, protocol: str, ms: float, **more: Any) -> dict[str, Any]:
    """A row of `mok bench layer`, with what goals and ratios read."""
    row = {"shape": shape, "contender": contender, "protocol": protocol, "median_ms": ms}
    row |= {"routing": "gaussian", "ranks": 1, "direction": "forward", "partner": None}
    row |= {"apart": False, "comparable": None if contender == "mok" else True, "joules": 1.0}
    row |= {"memory_bytes": 100 if contender == "mok" else 96, "joules_kind": "counter"}
    return {**row, "comparability": "", **more}


def documents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"ours": "mok", "rows": rows, "ratios": ratios(rows, "mok")}]


def judged(scripts: dict[str, ModuleType], rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = scripts["goals"].judged_direction(documents(rows))
    assert len({one.what for one in found}) == len(found) == 6 + 2 + 6 + 6
    return {one.what: one for one in found}


def everything(sonic: float = 10.0, torch_ms: float = 14.0, **more: Any) -> list[dict[str, Any]]:
    """All shapes in both protocols; ours takes 10 ms."""
    return [
        timed(shape, name, protocol, ms, **(more if name != "mok" else {}))
        for shape in PEER_SHAPES
        for protocol in ("rotation", "alone")
        for name, ms in (("mok", 10.0), ("sonicmoe", sonic), ("torch", torch_ms))
    ]


def test_goals_of_the_forward_are_met_or_not(scripts: dict[str, ModuleType]) -> None:
    good = judged(scripts, everything(sonic=10.5))
    assert {one.met for one in good.values()} == {"yes"}
    assert good["kimi-shard: speed / SonicMoE's, rotation"].measured == "1.050"
    assert good["kimi-shard: memory / SonicMoE's"].measured == "1.042"
    level = judged(scripts, everything(sonic=10.0, torch_ms=12.9995))
    missed = {what for what, one in level.items() if one.met == "NO"}
    assert missed == {
        "shapes with 1.05 x SonicMoE's speed or more, alone",
        *(f"{shape}: speed / torch pipeline's, rotation" for shape in PEER_SHAPES),
    }
    assert level["kimi-shard: speed / torch pipeline's, rotation"].measured == "1.299"
    slow = judged(scripts, everything(sonic=9.49))
    assert slow["kimi-shard: speed / SonicMoE's, rotation"].cells()[1:] == (
        "0.95 or more",
        "0.949",
        "NO",
    )
    large = judged(scripts, [{**row, "memory_bytes": 95} for row in everything()])
    assert large["kimi-shard: memory / SonicMoE's"].met == "yes"
    more = judged(
        scripts,
        [{**r, "memory_bytes": 106 if r["contender"] == "mok" else 100} for r in everything()],
    )
    assert more["kimi-shard: memory / SonicMoE's"].cells()[2:] == ("1.060", "NO")


@pytest.mark.parametrize("left_out", [{"comparable": False}, {"apart": True}])
def test_what_does_not_count_meets_no_goal(
    scripts: dict[str, ModuleType], left_out: dict[str, Any]
) -> None:
    found = judged(scripts, everything(sonic=20.0, torch_ms=20.0, **left_out))
    assert {one.met for one in found.values()} == {"NO"}
    told = {one.measured for one in found.values()}
    assert told == {"nothing that counts", "0 of 0 that count"}
    assert {one.met for one in judged(scripts, []).values()} == {"NO"}


def test_four_shapes_are_enough_and_three_are_not(scripts: dict[str, ModuleType]) -> None:
    for fast, met in ((4, "yes"), (3, "NO")):
        rows = [
            {**row, "median_ms": 9.6 if row["contender"] == "sonicmoe" else row["median_ms"]}
            if row["shape"] in PEER_SHAPES[fast:]
            else row
            for row in everything(sonic=10.5)
        ]
        found = judged(scripts, rows)
        one = found["shapes with 1 x SonicMoE's speed or more, rotation"]
        assert (one.measured, one.met) == (f"{fast} of 6 that count", met)
        assert found["shapes with 1.05 x SonicMoE's speed or more, alone"].met == met
        assert found["sonic-120b: speed / SonicMoE's, rotation"].met == "yes"


def test_other_settings_are_no_measurement_of_the_goals(scripts: dict[str, ModuleType]) -> None:
    for change in ({"routing": "skewed"}, {"ranks": 2}, {"direction": "backward"}):
        rows = [{**row, **change} for row in everything(sonic=20.0)]
        assert {one.met for one in judged(scripts, rows).values()} == {"NO"}
    assert judged(scripts, everything())["kimi-shard: speed / SonicMoE's, rotation"].met == "yes"


def test_the_goals_stand_under_the_benchmark_s_own_tables(scripts: dict[str, ModuleType]) -> None:
    kimi = Shape("kimi-shard", 16, 4, 16, 8, 2)
    document = bench_document(shapes=(kimi,))
    own = [{"ranks": 1, "results": {"forward": {"status": "passed", "document": document}}}]
    text = scripts["speed_tables"].forward(own)
    assert text.startswith(scripts["speed_tables"].bench(own))
    assert scripts["goals"].summary(scripts["goals"].judged_direction([document])) in text
    two = [{**own[0], "ranks": 2}]
    assert scripts["speed_tables"].forward(two) == scripts["speed_tables"].bench(two)
