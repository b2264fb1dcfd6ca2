"""A real pair, explained: a tiny mixture of experts sampled in bf16 with a cache, scored in fp32.

The files were written by `ci/onpolicy_real_pair.py` with transformers 5.24.0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.table import CAUSES, Cause, Evidence
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.routing import check
from verify.onpolicy.samples import ROLLOUT, TRAINER
from verify.onpolicy.verdicts import judge

DATA = Path(__file__).resolve().parents[2] / "data" / "onpolicy"


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    trainer = read_dump(DATA / "qwen3_moe_trainer.jsonl", TRAINER)
    rollout = read_dump(DATA / "qwen3_moe_sampler.jsonl", ROLLOUT)
    return pair(trainer, rollout)


@pytest.fixture(scope="module")
def causes(pairs: Pairs) -> tuple[Cause, ...]:
    return diagnose(pairs, measure(pairs), Evidence())


def test_all_of_it_is_compared(pairs: Pairs) -> None:
    assert not pairs.misalignments
    assert not pairs.problems
    assert len(pairs.samples) == 12
    assert pairs.finite.sum() == 576
    assert np.count_nonzero(pairs.difference) > 500


def test_flips_of_the_router_come_first_with_their_share(
    pairs: Pairs, causes: tuple[Cause, ...]
) -> None:
    first = next(one for one in causes if one.claimed)
    assert first.name == "routing-flips"
    assert first.fitted["share"] == pytest.approx(0.467, abs=0.01)
    routing = check(pairs)
    assert routing is not None
    assert not routing.faults
    assert [one.flipped for one in routing.layers] == [5, 16, 12, 11]
    for layer in routing.layers:
        assert layer.margin_flipped is not None
        assert layer.margin_kept is not None
        assert layer.margin_flipped < 0.1 * layer.margin_kept


def test_nothing_structural_is_claimed(pairs: Pairs, causes: tuple[Cause, ...]) -> None:
    explained = {"routing-flips", "numeric-drift", "low-precision-head"}
    assert {one.name for one in causes if one.claimed} <= explained
    assert not any(CAUSES[name].structural for name in explained)
    verdict = judge(pairs, measure(pairs), causes)
    assert str(verdict.verdict) == "UNVERIFIED"
    assert [finding.reason for finding in verdict.findings] == ["no-bound"]


def test_without_the_flipped_tokens_unbiased_drift_is_left(pairs: Pairs) -> None:
    routing = check(pairs)
    assert routing is not None
    calm = replace(pairs, counted=pairs.counted & (routing.flips == 0))
    assert calm.finite.sum() == 548
    error = calm.difference[calm.finite]
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error))
    causes = diagnose(calm, measure(calm), Evidence())
    assert {one.name for one in causes if one.claimed} <= {"numeric-drift"}
