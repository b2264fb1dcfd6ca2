"""Speed of the backward, and of several ranks beside one: goals, and README's tables of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from gpu_scripts import gpu_scripts

from mok.bench.document import ratios
from mok.bench.shapes import PEER_SHAPES


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


def _timed(shape: str, contender: str, protocol: str, ms: float, **more: Any) -> dict[str, Any]:
    row = {"shape": shape, "contender": contender, "protocol": protocol, "median_ms": ms}
    row |= {"routing": "gaussian", "ranks": 1, "direction": "backward", "partner": None}
    row |= {"apart": False, "comparable": None if contender == "mok" else True, "joules": 1.0}
    row |= {"memory_bytes": 100, "joules_kind": "counter", "comparability": ""}
    return {**row, **more}


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ours": "mok", "rows": rows, "ratios": ratios(rows, "mok")}


def test_goals_of_the_backward_look_at_backwards(scripts: dict[str, ModuleType]) -> None:
    goals = scripts["goals"]
    peers = {"mok": 10.0, "sonicmoe": 11.0, "torch": 14.0}
    rows = [
        _timed(shape, name, protocol, ms)
        for shape in PEER_SHAPES
        for protocol in ("rotation", "alone")
        for name, ms in peers.items()
    ]
    found = goals.judged_direction([_document(rows)], "backward")
    assert {one.met for one in found} == {"yes"}
    other = goals.judged_direction([_document(rows)], "forward")
    assert {one.met for one in other} == {"NO"}


SHARES = {
    ("forward", 2): {
        **dict.fromkeys(("kimi-shard", "v4pro-shard", "glm-shard"), 0.93),
        "qwen35-shard": 0.88,
    },
    ("backward", 2): dict.fromkeys(PEER_SHAPES, 0.93),
    **{
        (direction, ranks): dict.fromkeys(("kimi-shard", "v4pro-shard"), 0.9)
        for direction in ("forward", "backward")
        for ranks in (4, 8)
    },
}
"""By direction and ranks, the least share of one rank's speed."""


def _ours(direction: str, ranks: int, ms: dict[str, float]) -> dict[str, Any]:
    """A benchmark's document of the rotation of ours alone, milliseconds by shape."""
    rows = [
        _timed(shape, "mok", "rotation", one, ranks=ranks, direction=direction)
        for shape, one in ms.items()
    ]
    return _document(rows)


@pytest.mark.parametrize(("direction", "ranks"), SHARES)
def test_ranks_are_held_against_one_where_there_is_a_goal(
    scripts: dict[str, ModuleType], direction: str, ranks: int
) -> None:
    goals, least = scripts["goals"], SHARES[direction, ranks]
    one = _ours(direction, 1, dict.fromkeys(PEER_SHAPES, 1.0))
    for nudge, met in ((1.0001, "yes"), (0.9999, "NO")):
        many = _ours(direction, ranks, {s: 1 / (nudge * least.get(s, 0.5)) for s in PEER_SHAPES})
        found = goals.judged_degrees([one], [many], direction, ranks)
        assert [judged.what.partition(":")[0] for judged in found] == list(PEER_SHAPES)
        assert all(f"speed of {ranks} ranks / of one" in judged.what for judged in found)
        for shape, judged in zip(PEER_SHAPES, found, strict=True):
            wanted = f"{least[shape]:g} or more" if shape in least else "-"
            assert (judged.goal, judged.met) == (wanted, met if shape in least else "-")
            assert shape in least or judged.measured in ("0.500", "0.499")  # told all the same
        counted = len(least) if met == "yes" else 0
        assert goals.summary(found).startswith(f"{counted} of {len(least)} goals met")
    other = {"forward": "backward", "backward": "forward"}[direction]
    for documents in ([one], [_ours(other, ranks, dict.fromkeys(PEER_SHAPES, 1.0))]):
        found = goals.judged_degrees([one], documents, direction, ranks)
        assert {judged.measured for judged in found} == {"nothing that counts"}
        assert {judged.met for judged in found} == ({"NO"} if len(least) == 6 else {"NO", "-"})


def test_a_number_of_ranks_without_goals_is_told_without_any(
    scripts: dict[str, ModuleType],
) -> None:
    goals = scripts["goals"]
    ms = dict.fromkeys(PEER_SHAPES, 1.0)
    found = goals.judged_degrees([_ours("forward", 1, ms)], [_ours("forward", 3, ms)], "forward", 3)
    assert {(one.goal, one.measured, one.met) for one in found} == {("-", "1.000", "-")}
    assert goals.summary(found) == "No goals."


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_number_of_ranks_has_its_table(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    tables, goals = scripts["speed_tables"], scripts["goals"]
    monkeypatch.setattr(tables, "bench", lambda own: "rows")  # has tests of its own

    def own(*counts: int) -> list[dict[str, Any]]:
        return [
            {"ranks": n, "results": {"step": {"status": "passed", "document": made[n]}}}
            for n in counts
        ]

    made = {
        n: _ours(direction, n, dict.fromkeys(PEER_SHAPES, 1.0 + 0.01 * n)) for n in (1, 2, 4, 8)
    }
    draw = getattr(tables, direction)
    text = draw(own(1, 2, 4, 8))
    for ranks in (2, 4, 8):
        found = goals.judged_degrees([made[1]], [made[ranks]], direction, ranks)
        cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
        assert all(list(one.cells()) in cells for one in found)
    assert text.count("goals met") == 4
    assert text.index("of 2 ranks") < text.index("of 4 ranks") < text.index("of 8 ranks")
    assert "speed of 4 ranks" not in draw(own(1, 2))
    assert "ranks / of one" not in draw(own(1))
    assert draw(own(2, 8)) == "rows"  # nothing to hold them against
