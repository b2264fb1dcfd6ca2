"""`moe/float64-*`: VERIFIED on one rank and on four; each catches a rounding at the wrong place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from verify import running
from verify.builtin import float64  # cases by their module: the plugin would collect them from here
from verify.running import RunOptions, run

TINY_MUTANTS = """
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch
from mok import engine, portable, tiles
from verify.builtin.layer import execute, execute_clamped
from verify.builtin import float64  # not the cases themselves, which would be run too
from verify.explanation import hypotheses

hypotheses.SECONDS = 0.0  # likely causes among the inputs are not what this asks for

swiglu, expert_forward, combine = portable.swiglu, engine.expert_forward, engine.combine

def early_rounding(gate, up, limit):
    return swiglu(gate.bfloat16().float(), up.bfloat16().float(), limit)

def truncated(gate, up, limit):
    # the right h in fp32, cut to bf16 instead of rounded
    wide = gate if limit is None else gate.clamp(max=limit)
    wide = wide / (torch.exp(-wide) + 1.0) * (up if limit is None else up.clamp(-limit, limit))
    return (wide.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()

def unrounded(x, rows_E, weights, limit, minibatch, tell=None):
    y, saved = expert_forward(x, rows_E, weights, limit, minibatch)
    if len(rows_E) == 1:  # the shared expert has no router weight
        return y, saved
    wide, start = y.float(), 0
    for expert, rows in enumerate(rows_E):
        both = tiles.stacked(weights.gate[expert], weights.up[expert]).t()
        both = tiles.multiply(tiles.padded(x[start:start + rows]), both)
        width = both.shape[1] // 2
        hidden = swiglu(both[:, :width], both[:, width:], limit).float()
        down = tiles.widened(weights.down[expert]).t()
        wide[start:start + rows] = tiles.multiply(hidden, down)[:rows]
        start += rows
    return wide, saved

def weight_first(start, y, schedule, router):
    weight = router.reshape(-1)[schedule.token_S * router.shape[1] + schedule.slot_S]
    return combine(start, (y * weight[:, None]).bfloat16(), schedule, torch.ones_like(router))

MUTATIONS = {
    "same": (),
    "early-rounding": ((portable, "swiglu", early_rounding),),
    "truncated": ((portable, "swiglu", truncated),),
    "weight-first": ((engine, "expert_forward", unrounded), (engine, "combine", weight_first)),
}

def mutated(execute, patches):
    def wrapped(**given):
        with ExitStack() as stack:
            for where, name, function in patches:
                stack.enter_context(patch.object(where, name, function))
            return execute(**given)
    return wrapped

CASES = [
    replace(
        case,
        name=f"{mutation} {case.name}",
        execute=mutated(case.execute, patches),
        claims=("reference",),
    )
    for mutation, patches in MUTATIONS.items()
    for case in float64.FLOAT64_CASES
] + [
    replace(case, name=f"unclamped {case.name}", execute=execute, claims=("reference",))
    for case in float64.FLOAT64_CASES
    if case.execute is execute_clamped
]
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each rank: on shared cores threads wait longer for each other than such tensors take."""
    monkeypatch.setattr(running, "threads_per_rank", lambda ranks: 1)


def claims_of(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(c["case"], k["claim"]): k for c in result["cases"] for k in c["claims"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_tiny_cases_hold_on_one_rank_and_on_four(ranks: int) -> None:
    result = run(["moe/float64-*"], RunOptions(ranks=ranks, runs=2))
    claims = claims_of(result)
    promised = ("repeat", "reference") if ranks == 1 else ("repeat", "rank", "reference")
    assert claims.keys() == {(c.name, k) for c in float64.FLOAT64_CASES for k in promised}
    for case in float64.FLOAT64_CASES:
        everything = {"out", *(f"grad.{name}" for name in case.inputs)}
        for promise in promised:
            claim = claims[case.name, promise]
            assert (claim["verdict"], claim["findings"]) == ("VERIFIED", []), case.name
            assert set(claim["compared"]) == everything
            assert [rank["rank"] for rank in claim["ranks"]] == list(range(ranks))


@pytest.mark.slow
def test_every_tiny_case_catches_a_rounding_at_the_wrong_place(tmp_path: Path) -> None:
    path = tmp_path / "tiny_mutants.py"
    path.write_text(TINY_MUTANTS)
    claims = claims_of(run([str(path)], RunOptions(ranks=1)))
    assert len(claims) == 4 * len(float64.FLOAT64_CASES) + 1
    for (case, _), claim in claims.items():
        if case.startswith("same "):
            assert (claim["verdict"], claim["findings"]) == ("VERIFIED", []), case
            continue
        assert claim["verdict"] == "MISMATCH", case
        assert ("wrong-rounding", "out") in {(f["reason"], f["tensor"]) for f in claim["findings"]}


def test_the_tiny_cases_are_what_their_names_say() -> None:
    tokens = {}
    for case in float64.FLOAT64_CASES:
        assert case.setup is not None
        topk = case.setup()["topk_experts"]
        assert topk.shape == case.inputs["router_weights"].shape
        counts = torch.bincount(topk[topk >= 0], minlength=float64.E).tolist()
        tokens[case.name.removeprefix("moe/float64-")] = counts
        sizes = {name: math.prod(spec.shape) for name, spec in case.inputs.items()}
        kept = sum(sizes.values()) + sizes["x"]  # all gradients, and the output
        assert kept * 8 <= 300_000, "float64 values of a case, in bytes"
    assert set(tokens["balanced"]) == {float64.T * float64.K // float64.E}
    assert max(tokens["skewed"]) > 3 * min(tokens["skewed"])
    assert sum(count > 0 for count in tokens["one-expert"]) == 1
    assert tokens["empty-experts"][1::2] == [0] * (float64.E // 2)
    assert sum(tokens["top-1"]) == float64.T
    assert 0 < sum(tokens["unused-slots"]) < 4 * float64.T
    assert set(tokens["every-expert"]) == {12}
    assert sum(tokens["one-token"]) == float64.K
