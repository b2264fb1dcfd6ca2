"""Laws of the sign of d: temperature, penalties, truncated support and padded vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy.causes import penalties, residue, support, temperature
from verify.onpolicy.causes.facts import Facts
from verify.onpolicy.causes.table import Evidence

HEAT = 0.7


def processed(scale: float = 1.0, drop: Any = None, pads: int = 0, size: float = 0.0) -> Facts:
    """The sampler's logits times `scale` and without what `drop` names; padding in the trainer."""
    given = toy.logits(5, samples=24)
    sampler = given * scale
    if drop is not None:
        sampler = np.where(drop(toy.log_softmax(sampler)), -np.inf, sampler)
    rollout = toy.log_softmax(sampler)
    tokens = toy.drawn(rollout)
    trainer = given + toy.noise(size, given.shape)
    if pads:
        trainer = np.concatenate([trainer, np.zeros((*given.shape[:2], pads))], axis=2)
    return toy.facts(
        toy.chosen(toy.log_softmax(trainer), tokens), toy.chosen(rollout, tokens), tokens
    )


def beyond_top_p(share: float) -> Any:
    def drop(values: toy.Floats) -> Any:
        order = np.argsort(-values, axis=-1)
        ranked = np.exp(np.take_along_axis(values, order, axis=-1))
        out = np.cumsum(ranked, axis=-1) - ranked >= share
        found = np.empty_like(out)
        np.put_along_axis(found, order, out, axis=-1)
        return found

    return drop


def beyond_top_k(k: int) -> Any:
    return lambda values: values < np.sort(values, axis=-1)[..., -k][..., None]


@pytest.mark.parametrize("heat", [0.6, 0.9, 1.25])
def test_a_temperature_is_claimed_and_fitted_without_logits(heat: float) -> None:
    found = temperature.detect(processed(1.0 / heat, size=0.01))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["ratio"] == pytest.approx(heat, rel=0.1)


def test_with_logits_the_temperature_is_exact() -> None:
    given = toy.logits(5)
    rollout = toy.log_softmax(given / HEAT)
    tokens = toy.drawn(rollout)
    values = toy.chosen(toy.log_softmax(given), tokens)
    evidence = Evidence(logits={"trainer": {f"s{i}": one for i, one in enumerate(given)}})
    facts = toy.facts(values, toy.chosen(rollout, tokens), tokens, evidence=evidence)
    found = temperature.detect(facts)
    assert found is not None
    assert found.cause.fitted["ratio"] == pytest.approx(HEAT, abs=1e-3)
    assert "logits" in " ".join(found.cause.for_)


def test_raw_values_of_heated_sampling_have_the_inverse_ratio() -> None:
    given = toy.logits(6, samples=24)
    heated = toy.log_softmax(given / HEAT)
    tokens = toy.drawn(heated)
    raw = toy.chosen(toy.log_softmax(given), tokens)
    facts = toy.facts(toy.chosen(heated, tokens), raw, tokens)
    found = temperature.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["ratio"] == pytest.approx(1.0 / HEAT, rel=0.1)
    assert not support.detect(facts)


@pytest.mark.parametrize("size", [0.0, 0.01, 0.3])
def test_noise_has_no_law(size: float) -> None:
    facts = toy.drifting(size)
    for detector in (temperature.detect, penalties.detect):
        found = detector(facts)
        assert found is None or not found.cause.claimed
    assert not support.detect(facts)


def test_other_weights_have_no_law() -> None:
    given = toy.logits(7, samples=24)
    rollout = toy.log_softmax(given + toy.noise(0.5, given.shape))
    tokens = toy.drawn(rollout)
    facts = toy.facts(
        toy.chosen(toy.log_softmax(given), tokens), toy.chosen(rollout, tokens), tokens
    )
    assert not support.detect(facts)
    found = temperature.detect(facts)
    assert found is None or not found.cause.claimed


@pytest.mark.parametrize(
    "drop", [beyond_top_p(0.9), beyond_top_p(0.6), beyond_top_k(10), beyond_top_k(30)]
)
def test_truncated_support_comes_before_padding(drop: Any) -> None:
    found = support.detect(processed(drop=drop, size=0.005))
    assert [one.cause.name for one in found] == ["truncated-support", "padded-vocabulary"]
    assert [one.cause.claimed for one in found] == [True, False]


def test_top_p_and_top_k_are_fitted() -> None:
    found = support.detect(processed(drop=beyond_top_p(0.8)))
    assert found[0].cause.fitted["top_p"] == pytest.approx(0.8, abs=0.03)
    found = support.detect(processed(drop=beyond_top_k(10)))
    assert found[0].cause.fitted["top_k"] == pytest.approx(10, rel=0.25)


@pytest.mark.parametrize("pads", [20, 60])
def test_padding_comes_before_truncated_support(pads: int) -> None:
    found = support.detect(processed(pads=pads, size=0.005))
    assert [one.cause.name for one in found] == ["padded-vocabulary", "truncated-support"]
    assert found[0].cause.where == "trainer side"


def test_padding_in_the_sampler_raises_every_token() -> None:
    given = toy.logits(8, samples=24)
    padded = toy.log_softmax(np.concatenate([given, np.zeros((*given.shape[:2], 60))], axis=2))
    real = toy.log_softmax(given)
    tokens = toy.drawn(real)
    found = support.detect(toy.facts(toy.chosen(real, tokens), toy.chosen(padded, tokens), tokens))
    assert found[0].cause.name == "padded-vocabulary"
    assert found[0].cause.where == "rollout side"


def test_alternatives_show_that_no_rank_is_beyond_k() -> None:
    given = toy.logits(9, samples=24)
    full = toy.log_softmax(given)
    rollout = toy.log_softmax(np.where(beyond_top_k(20)(full), -np.inf, given))
    tokens = toy.drawn(rollout)

    def top(index: int) -> tuple[dict[int, float], ...]:
        rows = full[index]
        return tuple({int(v): float(row[v]) for v in np.argsort(-row)[:40]} for row in rows)

    facts = toy.facts(toy.chosen(full, tokens), toy.chosen(rollout, tokens), tokens, top=top)
    found = support.detect(facts)
    assert found[0].cause.fitted["top_k"] == 20
    assert "rank beyond 20" in " ".join(found[0].cause.for_)


def penalised(presence: float) -> Facts:
    """Tokens are drawn one after the other; those in the response lose `presence`."""
    given = toy.logits(10, samples=24, words=60)
    rng = np.random.default_rng(1)
    count, length, words = given.shape
    seen = np.zeros((count, words))
    tokens, rollout = np.empty((count, length), np.int64), np.empty((count, length))
    for place in range(length):
        values = toy.log_softmax(given[:, place] - presence * seen)
        tokens[:, place] = (values + rng.gumbel(size=values.shape)).argmax(axis=1)
        rollout[:, place] = toy.chosen(values, tokens[:, place])
        seen[np.arange(count), tokens[:, place]] = 1.0
    return toy.facts(toy.chosen(toy.log_softmax(given), tokens), rollout, tokens)


def test_a_penalty_raises_seen_tokens_only() -> None:
    found = penalties.detect(penalised(0.5))
    assert found is not None
    assert found.cause.claimed
    assert 0.3 < found.cause.fitted["largest"] <= 0.5 + 1e-5
    without = penalties.detect(penalised(0.0))
    assert without is None or not without.cause.claimed


def test_a_penalty_carries_more_than_a_temperature_on_the_same_signs() -> None:
    facts = penalised(0.5)
    mine, other = penalties.detect(facts), temperature.detect(facts)
    assert mine is not None
    assert other is None or other.cause.weight < mine.cause.weight


def test_another_logarithm_is_named() -> None:
    facts = toy.drifting(0.0)
    other = toy.facts(
        [one / np.log(2) for one in np.split(facts.trainer, toy.SAMPLES)],
        np.split(facts.rollout, toy.SAMPLES),
        np.split(facts.token, toy.SAMPLES),
    )
    found = residue.other_logarithm(other)
    assert found is not None
    assert "bits" in found.for_[0]
    assert residue.other_logarithm(toy.drifting(0.01)) is None
