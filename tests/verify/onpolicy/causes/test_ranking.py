"""The order of causes, the table they come from, and what is said when there is nothing to say."""

from __future__ import annotations

from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy.causes import ranking
from verify.onpolicy.causes.facts import Finding
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


def test_noise_that_is_claimed_is_said_once() -> None:
    """Once `cannot-tell` followed it with the same three lines."""
    (only,) = causes(toy.drifting(1e-5).pairs)
    assert (only.name, only.claimed) == ("numeric-drift", True)
    assert len(set(only.for_)) == len(only.for_) == 3


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_where_nothing_is_claimed_it_leads_that_it_cannot_be_told(size: float) -> None:
    """Other weights that no version tells of: larger than noise, and without a law."""
    found = causes(toy.drifting(size).pairs)
    assert [one.name for one in found] == ["cannot-tell", "numeric-drift"]
    assert not any(one.claimed for one in found)
    assert not set(found[0].for_) & set(found[1].for_)
    for option in ("--version V=FILE", "--trainer-again FILE", "--weights", "recorder"):
        assert option in found[0].remedy
    again = Evidence(trainer_again=toy.samples(TRAINER, [np.zeros(1)], [np.zeros(1, np.int64)]))
    left = next(one for one in causes(toy.drifting(size).pairs, again) if one.name == "cannot-tell")
    assert "--trainer-again" not in left.remedy
    assert (found[0].share, found[1].share) == ("", "")


def test_candidates_that_chance_gives_as_well_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names(weight: float, chance: float | None, claimed: bool = False) -> list[str]:
        made = cause("temperature", weight=weight, claimed=claimed, chance=chance)
        monkeypatch.setattr(ranking.temperature, "detect", lambda facts: Finding(made))
        return [one.name for one in causes(toy.drifting(0.3).pairs)]

    assert "temperature" not in names(0.2, 1.0)
    assert "temperature" in names(0.2, 0.01)
    assert "temperature" in names(0.2, None)
    assert "temperature" in names(0.7, 1.0)  # noise is not claimed because of it
    assert names(0.2, 1.0, True)[0] == "temperature"


def test_what_was_not_compared_carries_no_share_of_the_mismatch() -> None:
    given = toy.logits(45, samples=4)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    own = toy.chosen(values, tokens)
    other = toy.samples(TRAINER, own, np.roll(tokens, 1, axis=0))
    found = causes(pair(other, toy.samples(ROLLOUT, own, tokens)))
    assert [one.name for one in found] == ["other-tokens"]
    assert found[0].share == "concerns 100 % of the samples"
    assert "number responses once" in found[0].remedy
    assert found[0].for_[0].endswith("under one id differ")
    loud = causes(toy.pairs(own, np.where(tokens > 0, 0.0, own), tokens))
    assert loud[0].share.endswith("of the mismatch")


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
