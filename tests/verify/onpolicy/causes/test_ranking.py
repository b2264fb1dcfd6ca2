"""The order of causes, the table they come from, and what is said when there is nothing to say."""

from __future__ import annotations

from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.table import CAUSES, Cause, Evidence, cause
from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump


def causes(pairs: Pairs, evidence: Evidence | None = None) -> tuple[Cause, ...]:
    return diagnose(pairs, measure(pairs), evidence or Evidence())


def first(found: tuple[Cause, ...]) -> str | None:
    return next((one.name for one in found if one.claimed), None)


def test_equal_values_have_no_cause() -> None:
    assert causes(toy.drifting(0.0).pairs) == ()


def test_nothing_compared_has_no_cause() -> None:
    assert causes(pair(Dump("plain", (), ()), Dump("plain", (), ()))) == ()
    empty = toy.pairs([np.empty(0)], [np.empty(0)], [np.empty(0, np.int64)])
    assert causes(empty) == ()


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_but_drift_is_claimed_on_noise(size: float, seed: int) -> None:
    found = causes(toy.drifting(size, seed=seed).pairs)
    assert {one.name for one in found if one.claimed} <= {"numeric-drift"}


def test_what_carries_more_comes_first() -> None:
    def both(tail: int) -> tuple[Cause, ...]:
        given = toy.logits(41, samples=24)
        rollout = toy.log_softmax(given / 0.8)
        tokens = toy.drawn(rollout)
        values = toy.chosen(rollout, tokens).copy()
        values[:6, -tail:] = 0.0
        return causes(toy.pairs(toy.chosen(toy.log_softmax(given), tokens), values, tokens))

    few, many = both(1), both(20)
    assert first(few) == "temperature"
    assert first(many) == "sentinel"
    assert {one.name for one in many if one.claimed} >= {"sentinel", "temperature"}
    for found in (few, many):
        weights = [one.weight for one in found if one.claimed]
        assert weights == sorted(weights, reverse=True)


def test_other_tokens_come_before_what_can_be_scored() -> None:
    given = toy.logits(42, samples=24)
    rollout = toy.log_softmax(given / 0.8)
    tokens = toy.drawn(rollout)
    own = tokens.copy()
    own[3, 5] += 1
    trainer = toy.samples(TRAINER, toy.chosen(toy.log_softmax(given), tokens), own)
    found = causes(pair(trainer, toy.samples(ROLLOUT, toy.chosen(rollout, tokens), tokens)))
    assert [one.name for one in found if one.claimed][:2] == ["other-tokens", "temperature"]
    assert found[0].where == "samples s3"


def test_infinities_outweigh_what_is_finite() -> None:
    given = toy.logits(43)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    rollout = toy.chosen(values, tokens).copy()
    rollout.ravel()[::50] = -np.inf
    trainer = toy.chosen(toy.log_softmax(given + toy.noise(0.02, given.shape)), tokens)
    found = causes(toy.pairs(trainer, rollout, tokens))
    assert first(found) == "sentinel"
    assert found[0].weight > 0.9


def test_a_wrong_prompt_says_more_than_its_rank() -> None:
    given = toy.logits(44, samples=24)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    trainer = toy.chosen(toy.log_softmax(given + toy.noise(1e-3, given.shape)), tokens)
    moved = trainer.copy()
    moved[8:12] = trainer[[9, 10, 11, 8]]
    found = causes(
        toy.pairs(moved, toy.chosen(values, tokens), tokens, meta=lambda at: {"rank": at // 4})
    )
    assert first(found) == "wrong-prompt"


def test_every_cause_has_meaning_and_remedy() -> None:
    assert set(CAUSES) == {
        *("other-tokens", "temperature", "truncated-support", "penalties", "shift"),
        *("padded-vocabulary", "low-precision-head", "stale-weights", "dropout"),
        *("routing-flips", "numeric-drift", "outlier-place", "sentinel", "wrong-prompt"),
        *("mask", "positions", "cannot-tell"),
    }
    for name, known in CAUSES.items():
        assert known.name == name
        assert known.meaning
        assert known.remedy
    made = cause("shift", weight=3.0, claimed=True)
    assert made.weight == 1.0
    assert made.remedy == CAUSES["shift"].remedy


def test_a_cause_is_json() -> None:
    import json

    for one in causes(toy.drifting(0.05).pairs):
        read: dict[str, Any] = json.loads(json.dumps(one.to_json(), allow_nan=False))
        assert read["name"] in CAUSES
        assert set(read) == {
            *("name", "weight", "structural", "claimed", "where"),
            *("fitted", "for", "against", "remedy"),
        }
