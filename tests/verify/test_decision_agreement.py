"""Digests that must agree: own base, sums of shards, measured references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.captures import Layout, digest_at
from verify.decision.agreement import differences, kind_of, runs_that_differ, total
from verify.evidence import Execution, Plan
from verify.inputs import generate
from verify.verdicts import Finding

WHOLE = generate("whole", (6, 5), torch.bfloat16)


def execution(**fields: Any) -> Execution:
    given_ = {"case": "c", "claim": "ep", "variant": "ep=2", "rank": 0, "run": 0}
    return Execution(**{**given_, **fields})


def plan(ranks: int, **placement: str) -> Plan:
    return Plan("c", "c", ["ep"], ranks, {"ep": 1}, placement=placement)


def parts(sizes: list[int], tensor: torch.Tensor = WHOLE) -> list[str]:
    found, start = [], 0
    for size in sizes:
        piece = tensor.narrow(0, start, size)
        found.append(str(digest_at(piece, Layout(0, start, tuple(tensor.shape)))))
        start += size
    return found


cuts = st.lists(st.integers(0, 6), min_size=3, max_size=3).map(
    lambda points: [b - a for a, b in zip([0, *sorted(points)], [*sorted(points), 6], strict=True)]
)


@given(cuts, cuts)
def test_shards_add_up_to_the_whole_however_they_are_cut(a: list[int], b: list[int]) -> None:
    assert total(parts(a), replicated=False) == total(parts(b), replicated=False)
    assert total(parts(a), replicated=False) == str(digest_at(WHOLE, None))


@given(cuts, st.integers(0, 29))
def test_one_changed_element_changes_the_sum(sizes: list[int], at: int) -> None:
    other = WHOLE.clone()
    other.view(torch.int16).view(-1)[at] ^= 1
    assert total(parts(sizes), replicated=False) != total(parts(sizes, other), replicated=False)


def test_total_needs_every_part_of_one_tensor() -> None:
    two = parts([2, 4])
    assert total([two[0], None], replicated=False) is None
    assert total([], replicated=False) is None
    assert total([two[0], "float32[2]:" + "0" * 64], replicated=False) is None
    assert total([two[1], two[1]], replicated=False) is None, "covers more than there is"
    assert total([two[0], two[0]], replicated=True) == two[0]
    assert total(two, replicated=True) is None


def sums(names: dict[str, tuple[list[str], list[str]]], group: list[list[int]]) -> list[Execution]:
    ranks = len(group)
    return [
        execution(
            rank=rank,
            compare="sum",
            group=group[rank],
            outputs={name: got[rank] for name, (_, got) in names.items()},
            expected={name: want[rank] for name, (want, _) in names.items()},
        )
        for rank in range(ranks)
    ]


def test_subgroups_each_hold_the_whole() -> None:
    want, halves = parts([1, 2, 0, 3]), parts([3, 3])
    found, compared = differences(
        plan(4, out="sharded(0)"),
        "ep",
        {},
        sums({"out": (want, halves * 2)}, [[0, 1]] * 2 + [[2, 3]] * 2),
    )
    assert (found, compared) == ([], {"out"})


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_the_subgroup_that_is_wrong_is_found(broken: int) -> None:
    other = WHOLE.clone()
    other[0 if broken % 2 == 0 else 5, 2] += 1
    got = parts([3, 3]) * 2
    got[broken] = (parts([3, 3], other) * 2)[broken]
    found, _ = differences(
        plan(4, out="sharded(0)"),
        "ep",
        {},
        sums({"out": (parts([1, 2, 0, 3]), got)}, [[0, 1]] * 2 + [[2, 3]] * 2),
    )
    assert [f.reason for f in found] == ["bits-differ"]
    assert found[0].rank in ([0, 1] if broken < 2 else [2, 3])


def test_a_rank_without_its_half_of_a_sum_is_missing() -> None:
    both = sums({"out": (parts([2, 4]), parts([2, 4]))}, [[0, 1], [0, 1]])
    found, compared = differences(plan(2, out="sharded(0)"), "ep", {}, both[:1])
    assert [f.reason for f in found] == ["missing-rank"]
    assert compared == set()
    assert runs_that_differ(found) == 0


def test_a_tensor_that_is_gone_at_another_degree() -> None:
    records = sums({"out": (parts([2, 4]), parts([2, 4]))}, [[0, 1], [0, 1]])
    lost = execution(rank=1, compare="sum", group=[0, 1], outputs={}, expected=records[1].expected)
    found, _ = differences(plan(2, out="sharded(0)"), "ep", {}, [records[0], lost])
    assert [f.reason for f in found] == ["outputs-differ"]


def test_exact_expectation_covers_only_what_it_names() -> None:
    e = execution(claim="exact", compare="exact", outputs={"a": "x", "b": "y"}, expected={"a": "x"})
    assert differences(plan(1), "exact", {}, [e]) == ([], {"a"})
    lost = execution(claim="exact", compare="exact", outputs={"b": "y"}, expected={"a": "x"})
    found, _ = differences(plan(1), "exact", {}, [lost])
    assert [f.reason for f in found] == ["outputs-differ"]


@pytest.mark.parametrize(
    ("measured", "reasons"),
    [
        ({"nonfinite": 0, "over_budget": 0, "forbidden": 0}, []),
        ({"nonfinite": 2, "over_budget": 2, "forbidden": 0}, ["non-finite"]),
        ({"nonfinite": 2, "over_budget": 3, "forbidden": 0}, ["non-finite", "over-budget"]),
        ({"nonfinite": 0, "over_budget": 0, "forbidden": 9}, ["wrong-rounding"]),
        ({"nonfinite": 0, "over_budget": 1, "forbidden": 1}, ["over-budget", "wrong-rounding"]),
    ],
)
def test_measurements(measured: dict[str, Any], reasons: list[str]) -> None:
    more = {
        "numel": 12,
        "worst_ratio": 3.5,
        "worst_rows": [{"row": 4, "ratio": 3.5}],
        "first_over_budget": {"index": [4, 1], "actual": 1.0, "reference": 2.0},
    }
    e = execution(claim="reference", compare="measured", measurements={"out": {**measured, **more}})
    found, compared = differences(plan(1), "reference", {}, [e])
    assert [f.reason for f in found] == reasons
    assert compared == {"out"}
    for finding in found:
        if finding.reason == "over-budget":
            lines = "\n".join((finding.difference or {})["lines"])
            assert "[4, 1]" in lines
            assert "row 4" in lines


def test_kind_of_gradients() -> None:
    one = plan(2, x="sharded(0)", w="replicated", **{"grad.v": "local", "b*": "sharded(1)"})
    assert kind_of(one, "grad.x") == "sharded"
    assert kind_of(one, "grad.w") is None, "it may be a partial sum, or already reduced"
    assert kind_of(one, "grad.v") == "local"
    assert kind_of(one, "grad.bias") == "sharded"
    assert kind_of(one, "nothing") is None


def test_runs_are_counted_once() -> None:
    def at(run: int | None, **more: Any) -> Finding:
        return Finding("bits-differ", "", run=run, **{"variant": "a", **more})

    found = [at(0, rank=0), at(0, rank=1), at(0, variant="b"), at(1), at(0, process=2), at(None)]
    assert runs_that_differ(found) == 4


def test_an_explanation_is_said_once_for_a_tensor() -> None:
    counts = {"nonfinite": 0, "over_budget": 2, "forbidden": 3, "numel": 9}
    e = execution(
        claim="reference",
        compare="measured",
        measurements={"out": counts, "more": counts},
        differences={"out": {"lines": ["where"], "suggests": ["why"]}},
    )
    found, _ = differences(plan(1), "reference", {}, [e])
    said = {(f.tensor, f.reason): f.difference for f in found}
    assert said["out", "over-budget"]["suggests"] == ["why"]
    assert said["out", "over-budget"]["lines"][-1] == "where"
    assert said["out", "wrong-rounding"]["suggests"] == []
    assert "where" not in said["out", "wrong-rounding"]["lines"]
    assert said["more", "over-budget"]["suggests"] == []


def test_a_lost_output_does_not_excuse_one_outside_its_budget() -> None:
    """One record tells both: what is gone by its expected digest, the other by its error."""
    gone = {"b": "float32[2]:" + "0" * 64}
    for wrong, reasons in ((3, ["outputs-differ", "over-budget"]), (0, ["outputs-differ"])):
        record = execution(
            claim="golden",
            variant="float64",
            compare="exact",
            expected=gone,
            measurements={"a": {"numel": 8, "over_budget": wrong, "permissive": 0}},
        )
        found, compared = differences(plan(1), "golden", {}, [record])
        assert [f.reason for f in found] == reasons
        assert "a" in compared
