"""The parts of ci/gpu.sh that time layers: how much of the time each takes, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from bench_instruments import FakeDevice, fake_contender
from gpu_scripts import gpu_scripts

from mok.bench import layer as bench
from mok.bench.layer_command import layer
from mok.bench.ranks import Together
from mok.bench.runs import Options
from mok.bench.shapes import Shape


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


@pytest.mark.parametrize(("left", "limit"), [(400.0, 230.0), (215.0, 200.0), (20.0, 30.0)])
def test_the_benchmark_of_peers_takes_the_time_that_is_left(
    scripts: dict[str, ModuleType], tmp_path: Path, left: float, limit: float
) -> None:
    commands = scripts["commands"]
    bench = next(
        part
        for part in commands.parts(commands.Place("python", tmp_path, left=left))
        if part.name == "bench"
    )
    given = {}
    for step in bench.steps:
        if step.name == "warm":  # compiles only
            continue
        words = list(step.command[step.command.index("layer") + 1 :])
        given[step.name] = layer.make_context("layer", words).params
    assert given["layer"]["limit"] == limit
    assert given["layer"]["shapes"] == ()  # all six
    assert (given["layer"]["rounds"], given["layer"]["seconds"]) == (25, 2.0)
    assert [name for name, one in given.items() if one["accuracy"]] == ["accuracy"]
    assert (given["accuracy"]["rounds"], given["accuracy"]["seconds"]) == (0, 0.0)
    assert given["layer"]["direction"] is None  # forward only of whose backward is a stand-in
    assert given["accuracy"]["contenders"] == given["layer"]["contenders"]


@pytest.mark.parametrize(("left", "limit"), [(470.0, 190.0), (250.0, 98.0), (20.0, 30.0)])
def test_the_forward_alone_leaves_time_for_the_benchmark_of_peers(
    scripts: dict[str, ModuleType], tmp_path: Path, left: float, limit: float
) -> None:
    commands = scripts["commands"]
    for ranks, starting in ((1, 0), (2, 10), (4, 20), (8, 30)):
        place = commands.Place("python", tmp_path, ranks, left=left)
        parts = {part.name: part for part in commands.parts(place)}
        (step,) = parts["forward"].steps
        words = list(step.command[step.command.index("layer") + 1 :])
        given = layer.make_context("layer", words).params
        assert given["limit"] == pytest.approx(
            max(30, min(limit, 0.45 * left - 15 - starting)), abs=0.5
        )
        assert given["direction"] == "forward"
        assert given["shapes"] == ()  # all six
        assert (given["rounds"], given["seconds"], given["ranks"]) == (25, 2.0, ranks)
        assert not given["accuracy"]
        # on several ranks every one that knows them, of which ours is the first
        wanted = ("mok", "sonicmoe", "torch") if ranks == 1 else ()
        assert given["contenders"] == wanted
    assert list(parts).index("forward") < list(parts).index("bench")


@pytest.mark.parametrize(("left", "limit"), [(300.0, 265.0), (900.0, 865.0), (20.0, 30.0)])
def test_the_forward_takes_all_that_is_left_where_no_benchmark_of_peers_follows(
    scripts: dict[str, ModuleType], tmp_path: Path, left: float, limit: float
) -> None:
    commands = scripts["commands"]
    place = commands.Place("python", tmp_path, left=left, chosen=("tests", "forward"))
    part = next(one for one in commands.parts(place) if one.name == "forward")
    (step,) = part.steps
    given = layer.make_context("layer", list(step.command[step.command.index("layer") + 1 :]))
    assert given.params["limit"] == limit
    assert given.params["by_shape"]
    assert part.seconds >= left
    beside = commands.Place("python", tmp_path, left=left)
    assert next(p for p in commands.parts(beside) if p.name == "forward").seconds == 210


@pytest.mark.parametrize(
    ("ranks", "left", "limit"),
    [(2, 470, 270), (4, 470, 360), (8, 900, 450), (8, 470, 425), (8, 300, 255), (2, 20, 30)],
)
def test_the_benchmark_of_ranks_takes_more_time_the_more_they_are(
    scripts: dict[str, ModuleType], tmp_path: Path, ranks: int, left: float, limit: float
) -> None:
    """As much as is left, less what ranks take to meet."""
    commands = scripts["commands"]
    place = commands.Place("python", tmp_path, ranks, left=left)
    part = next(one for one in commands.parts(place) if one.name == "bench")
    (step,) = part.steps
    given = layer.make_context("layer", list(step.command[step.command.index("layer") + 1 :]))
    assert (given.params["limit"], given.params["ranks"]) == (limit, ranks)
    assert part.seconds > limit


def test_a_forward_that_is_cut_short_has_both_protocols_of_the_first_shapes() -> None:
    shapes = tuple(Shape(name, 16, 4, 16, 8, 2) for name in ("one", "two"))
    for by_shape, order in (
        (True, [("one", "rotation"), ("one", "alone"), ("two", "rotation"), ("two", "alone")]),
        (False, [("one", "rotation"), ("two", "rotation"), ("one", "alone"), ("two", "alone")]),
    ):
        device = FakeDevice()
        options = Options(
            shapes, device="cpu", rounds=2, seconds=0.1, accuracy=False, by_shape=by_shape
        )
        listing = [fake_contender(device, "mok", 0.01, 0.02)]
        rows = bench.measure(options, device.instruments(), Together(), listing)["rows"]
        assert list(dict.fromkeys((row["shape"], row["protocol"]) for row in rows)) == order
