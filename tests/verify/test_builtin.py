"""The bundled cases: VERIFIED at every degree, and MISMATCH for a layer that is slightly wrong.

The tiny ones in float64: test_builtin_float64.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verify import builtin  # cases by their module: the plugin would collect them from here
from verify.builtin import exact
from verify.builtin import moe as bundled
from verify.builtin.layer import uneven
from verify.builtin.moe import E, K, T, routing
from verify.running import RunOptions, run

MUTANTS = """
from dataclasses import replace

import torch, verify
from verify.builtin import exact, moe
from verify.explanation import hypotheses

hypotheses.SECONDS = 0.0  # likely causes among the inputs are not what this asks for
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")

def dropped_route(execute):
    def wrapped(topk_experts, **given):
        topk = topk_experts.clone()
        rows, slots = (topk >= 0).nonzero(as_tuple=True)
        topk[rows[17], slots[17]] = -1
        return execute(topk_experts=topk, **given)
    return wrapped

def swapped(execute):
    def wrapped(w_gate, w_up, **given):
        return execute(w_gate=w_up, w_up=w_gate, **given)
    return wrapped

def early_rounding(execute):
    # the output of expert 0 is rounded to bf16 before it is added to the others
    def wrapped(x, topk_experts, **given):
        alone = torch.where(topk_experts == 0, topk_experts, -1)
        rest = torch.where(topk_experts == 0, -1, topk_experts)
        none = {n: torch.zeros_like(given[n]) for n in SHARED}
        first = execute(x=x, topk_experts=alone, **{**given, **none})
        return first + execute(x=x, topk_experts=rest, **given)
    return wrapped

def same(execute):
    return lambda **given: execute(**given)

MUTATIONS = {"same": same, "route": dropped_route, "swap": swapped, "early": early_rounding}
CASES = [
    replace(moe.MOE, name=f"reference-{name}", execute=change(moe.execute), claims=("reference",))
    for name, change in MUTATIONS.items()
] + [
    replace(
        exact.EXACT_CASES[0], name=f"exact-{name}", execute=change(exact.execute), claims=("exact",)
    )
    for name, change in MUTATIONS.items()
    if name != "early"  # exact sums hide it: that is what `reference` is for
]
"""


def claims_of(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["case"], k["claim"]): k for c in result["cases"] for k in c["claims"]}


@pytest.mark.slow
def test_every_promise_on_four_ranks() -> None:
    result = run(["moe"], RunOptions(ranks=4, runs=2, processes=1))
    claims = claims_of(result)
    checked = [case for case in builtin.CASES if case is not builtin.MOE_1024]
    promised = {(case.name, claim) for case in checked for claim in case.claims}
    assert claims.keys() == promised
    for name, claim in claims.items():
        assert (claim["verdict"], claim["findings"]) == ("VERIFIED", []), name
        assert claim["executions"] >= 1
        assert [rank["rank"] for rank in claim["ranks"]] == [0, 1, 2, 3]
        assert all(rank["executions"] >= 1 for rank in claim["ranks"]), name
        assert claim["compared"]
        assert claim["bound"] == pytest.approx(1 - 0.05 ** (1 / claim["executions"]))
    ep = claims["moe", "ep"]
    assert {effect["ep"] for effect in ep["effective"]} == {1, 2}
    everything = {"out", *(f"grad.{n}" for n in bundled.MOE.inputs)}
    assert set(ep["compared"]) == everything, "partial sums are compared with a rank's own tokens"
    assert set(claims["moe", "reference"]["compared"]) == everything
    batch = claims["moe", "batch"]
    assert set(batch["compared"]) == {"out", "grad.x", "grad.router_weights"}
    forward_and_gradients = {"out", "d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down"}
    for case in exact.EXACT_CASES:
        assert set(claims[case.name, "exact"]["compared"]) >= forward_and_gradients
    assert (result["verdict"], result["exit_code"]) == ("VERIFIED", 0)


@pytest.mark.slow
def test_a_layer_that_is_slightly_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mutants.py"
    path.write_text(MUTANTS)
    claims = claims_of(run([str(path)], RunOptions(ranks=1)))
    found = {case: {f["reason"] for f in claim["findings"]} for (case, _), claim in claims.items()}
    assert found["reference-same"] == set()
    assert found["exact-same"] == set()
    assert "over-budget" in found["reference-route"]
    assert "over-budget" in found["reference-swap"]
    assert found["reference-early"] == {"wrong-rounding"}, "inside the budget, at the wrong place"
    assert found["exact-route"] == {"bits-differ"}
    assert found["exact-swap"] == {"bits-differ"}
    for (case, _), claim in claims.items():
        assert claim["verdict"] == ("VERIFIED" if case.endswith("same") else "MISMATCH"), case
    early = claims["reference-early", "reference"]["findings"]
    assert {f["tensor"] for f in early} >= {"out"}


def test_the_routing_is_distinct_and_leaves_slots_unused() -> None:
    topk = routing()["topk_experts"]
    assert topk.shape == (T, K)
    unused = topk == -1
    assert int(unused.sum()) == T * K // 16
    for row in topk.tolist():
        used = [e for e in row if e >= 0]
        assert len(set(used)) == len(used)
        assert all(0 <= e < E for e in used)
    assert torch.equal(topk, routing()["topk_experts"])


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 384])
def test_tokens_are_split_unevenly_with_an_empty_rank(total: int, parts: int) -> None:
    sizes = uneven(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert min(sizes) >= 0
    if parts > 1:
        assert sizes[0] == 0
        assert total < 8 or len(set(sizes)) > 1
