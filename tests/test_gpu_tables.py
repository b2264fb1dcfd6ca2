"""README's short tables: none says more than the whole ones, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from gpu_scripts import gpu_scripts

from mok.bench.shapes import PEER_SHAPES

Json = dict[str, Any]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines][2:]


# ---- verified -----------------------------------------------------------------------------------


def _case(name: str, *claims: str, ranks: int = 1, verdict: str = "VERIFIED") -> Json:
    """A case of which each claim ran three times; a verdict other than VERIFIED is the first's."""
    verdicts = [verdict, *["VERIFIED"] * (len(claims) - 1)]
    return {
        "case": name,
        "ranks": ranks,
        "verdict": verdict,
        "claims": [
            {"claim": c, "verdict": v, "executions": 3, "differing": int(v == "MISMATCH")}
            for c, v in zip(claims, verdicts, strict=True)
        ],
    }


def _evidence(*cases: Json, visible: int = 1) -> Json:
    return {"environment": {"cuda": {"visible": visible}}, "results": {"moe": {"cases": cases}}}


def test_cases_with_a_name_s_beginning_and_claims_in_common_are_one_row(
    scripts: dict[str, ModuleType],
) -> None:
    text = scripts["verdict_tables"].verified(
        [
            _evidence(
                _case("moe/exact-balanced", "repeat", "exact"),
                _case("moe", "repeat", "exact"),
                _case("moe/exact-top-1", "repeat", "exact"),
                _case("moe/exact-balanced", "ep", "exact", ranks=4),
                _case("hopper/exact-tiled-skewed", "repeat"),
                _case("hopper/exact-tiled-top-1", "repeat"),
                _case("hopper/degrees", "repeat"),
                _case("hopper/degrees-more", "repeat"),
            ),
            _evidence(_case("moe/exact-balanced", "ep", "exact", ranks=2), visible=2),
        ]
    )
    assert _rows(text) == [
        ["moe/exact-*", "1", "repeat, exact", "2", "12", "0", "VERIFIED"],
        ["moe", "1", "repeat, exact", "1", "6", "0", "VERIFIED"],
        ["moe/exact-balanced", "4 on one GPU; 2", "ep, exact", "2", "12", "0", "VERIFIED"],
        ["hopper/exact-tiled-*", "1", "repeat", "2", "6", "0", "VERIFIED"],
        ["hopper/degrees, hopper/degrees-more", "1", "repeat", "2", "6", "0", "VERIFIED"],
    ]


@pytest.mark.parametrize("verdict", ["MISMATCH", "UNVERIFIED"])
def test_a_row_is_verified_only_if_every_case_and_claim_in_it_is(
    scripts: dict[str, ModuleType], verdict: str
) -> None:
    drawn = scripts["verdict_tables"].verified
    good = _case("moe/exact-a", "exact", "ep")
    bad = _case("moe/exact-b", "exact", "ep", verdict=verdict)
    hidden = {**bad, "verdict": "VERIFIED"}  # a claim of it is not
    for other in (bad, hidden):
        [row] = _rows(drawn([_evidence(good, other, good)]))
        assert row[-1] == f"{verdict}: 1 of 3"
        assert row[-2] == str(int(verdict == "MISMATCH"))
    [row] = _rows(drawn([_evidence(good, good)]))
    assert row[-1] == "VERIFIED"


def test_every_case_of_the_evidence_is_counted(scripts: dict[str, ModuleType]) -> None:
    own = [one for one in scripts["evidence"].read().values() if one["part"] == "verify"]
    if not own:
        pytest.skip("nothing was measured on a GPU yet, as README says")
    whole = _rows(scripts["verdict_tables"].layer(own))
    short = _rows(scripts["verdict_tables"].verified(own))
    assert sum(int(row[3]) for row in short) == len(whole)
    for at in (4, 5):  # executions, differing
        assert sum(int(row[at]) for row in short) == sum(int(row[at - 1]) for row in whole)
    assert len(short) < len(whole) / 2


# ---- speed --------------------------------------------------------------------------------------

SETTING = {"routing": "gaussian", "ranks": 1, "direction": "forward"}


def _timed(contender: str, gib: float, *, comparable: bool | None = True) -> Json:
    row = {"shape": PEER_SHAPES[0], "contender": contender, "protocol": "rotation", **SETTING}
    row |= {"median_ms": 1.0, "tflops": 612.345, "memory_bytes": gib * 2**30, "apart": False}
    return {**row, "comparable": comparable}


def _ratio(peer: str, protocol: str, time: float, *, why: str = "") -> Json:
    row = {"shape": PEER_SHAPES[0], "peer": peer, "protocol": protocol, **SETTING}
    return {**row, "time": time, "counts": not why, "why": why}


def _layers(*, why: str = "") -> Json:
    """A forward of one shape; `why`: SonicMoE's rotation may not be compared."""
    return {
        "part": "forward",
        "ranks": 1,
        "results": {
            "forward": {
                "document": {
                    "ours": "mok",
                    "rows": [_timed("mok", 1.0), _timed("sonicmoe", 3.0, comparable=not why)],
                    "ratios": [
                        _ratio("sonicmoe", "rotation", 0.9499, why=why),
                        _ratio("sonicmoe", "alone", 1.0508),
                        _ratio("torch", "rotation", 1.29999),
                    ],
                }
            }
        },
    }


def test_each_shape_has_the_figures_of_its_goals(scripts: dict[str, ModuleType]) -> None:
    """Rounded to the worse side, as the goals are, so that what misses one never looks like it."""
    rows = _rows(scripts["speed_tables"].short_speed([_layers()]))
    assert rows[0] == ["forward", PEER_SHAPES[0], "612.3", "0.949", "1.050", "1.299", "0.334"]
    assert rows[1:] == [["forward", shape, *["-"] * 5] for shape in list(PEER_SHAPES)[1:]]


def test_a_peer_that_may_not_be_compared_stays_marked(scripts: dict[str, ModuleType]) -> None:
    why = "not comparable: peer at 92 % of its known rate (of a rotation of both directions)"
    row = _rows(scripts["speed_tables"].short_speed([_layers(why=why)]))[0]
    assert row[3] == "not comparable: peer at 92 % of its known rate"
    assert row[4:] == ["1.050", "1.299", "not comparable"]


def test_the_digest_s_row_and_its_host_time(scripts: dict[str, ModuleType]) -> None:
    row = {"dtype": "int8", "verify digest": 4.125, "of the read": 0.91999, "of hash_tensor": None}
    document = {"unit": "TB/s", "protocol": "2 GB", "rows": [row], "plan_replay_us": 10.42}
    text = scripts["speed_tables"].short_digest([{"results": {"digest": {"document": document}}}])
    assert _rows(text) == [["int8", "4.125", "0.919", "-"]]
    assert "digest, TB/s" in text
    assert "replay a plan of 64 tensors: 10.5 us; " in text
    assert text.endswith("build a plan of 64 tensors: -.")


# ---- goals --------------------------------------------------------------------------------------


def test_what_missed_its_goal_is_listed_and_what_met_it_only_counted(
    scripts: dict[str, ModuleType],
) -> None:
    goals = scripts["goals"]
    rows = [
        {"shape": name, "distinct": n, "ms_alone": 0.5, "under_load": 10_000}
        for name, n in (("small", 1), ("large", 2))
    ]
    own = [{"part": "endurance", "ranks": 1, "results": {"e": {"document": {"rows": rows}}}}]
    found = goals.of_part("endurance", own)
    assert len(found) == 4
    text = scripts["speed_tables"].missed([*own, _layers()])
    counted = [goal for goal in goals.of_part("forward", [_layers()]) if goal.met == "yes"]
    assert text.startswith(f"Goals met: endurance 2 of 4, forward {len(counted)} of 20.")
    listed = _rows(text)
    assert listed[0] == ["endurance", "large: digests of all forwards", "1", "2", "NO"]
    assert [goals.Judged(*row[1:]) for row in listed[:2]] == [g for g in found if g.met != "yes"]
    assert len(listed) == 2 + 20 - len(counted)
    slow = {"shape": "kimi-shard", "distinct": 1, "ms_alone": 9.0, "under_load": 300}
    met = [{**own[0], "results": {"e": {"document": {"rows": [rows[0], slow]}}}}]
    assert scripts["speed_tables"].missed(met) == "Goals met: endurance 4 of 4."


def test_a_part_that_has_no_goals_has_none(scripts: dict[str, ModuleType]) -> None:
    goals = scripts["goals"]
    assert [part for part in scripts["evidence"].PARTS if goals.of_part(part, [])] == []
    verify = {"part": "verify", "ranks": 1, "results": {"moe": {}}}
    assert goals.of_part("verify", [verify]) == []
    digest = {"part": "digest", "ranks": 1, "results": {"digest": {}}}
    assert {one.met for one in goals.of_part("digest", [digest])} == {"not measured"}


def test_ranks_count_beside_one_and_a_figure_without_a_goal_is_not_missed(
    scripts: dict[str, ModuleType],
) -> None:
    goals = scripts["goals"]
    many = _layers()
    [step] = many["results"].values()
    rows = [{**row, "ranks": 3, "median_ms": 2.0} for row in step["document"]["rows"]]
    many = {**many, "ranks": 3}
    many["results"] = {"forward": {"document": {**step["document"], "rows": rows}}}
    alone = goals.of_part("forward", [_layers()])
    both = goals.of_part("forward", [_layers(), many])
    assert both[: len(alone)] == alone
    assert both[len(alone)].measured == "0.500"
    assert {one.met for one in both[len(alone) :]} == {"-"}
    drawn = scripts["speed_tables"].missed
    assert drawn([_layers(), many]) == drawn([_layers()])
    assert goals.of_part("forward", [many]) == []  # nothing to hold them against
