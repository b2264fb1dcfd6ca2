"""Few, equal, certain or enormous values: nothing is claimed that they cannot show."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy.analysing import analyse_dumps
from verify.onpolicy.causes import (
    prompts,
    residue,
    sentinels,
    statistics,
    support,
    temperature,
    versions,
)
from verify.onpolicy.causes.dropout import values_of
from verify.onpolicy.causes.groups import contrast
from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.statistics import permutation_tail
from verify.onpolicy.causes.table import Cause, Evidence
from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import pair
from verify.onpolicy.samples import ROLLOUT, TRAINER


def claimed(trainer: Any, rollout: Any, tokens: Any, **more: Any) -> dict[str, Cause]:
    facts = toy.facts(trainer, rollout, tokens, **more)
    found = diagnose(facts.pairs, measure(facts.pairs), facts.evidence)
    return {one.name: one for one in found if one.claimed}


def test_short_answers_with_one_open_token_are_not_exchanged() -> None:
    rng = np.random.default_rng(0)
    rollout = -np.abs(rng.normal(size=(200, 6))) * 1e-7
    rollout[:, 0] = -rng.exponential(0.7, 200)
    trainer = rollout.copy()
    trainer[:, 0] += rng.normal(size=200) * 0.02
    facts = toy.facts(trainer, rollout, rng.integers(0, 50, (200, 6)))
    assert prompts.exchanged(facts) == {}


def test_exchanged_lists_of_few_tokens_are_found_all_the_same() -> None:
    rng = np.random.default_rng(1)
    rollout = -rng.exponential(1.0, (200, 8))
    trainer = rollout + rng.normal(size=(200, 8)) * 1e-4
    trainer[[3, 9]] = trainer[[9, 3]]
    facts = toy.facts(trainer, rollout, rng.integers(0, 50, (200, 8)))
    assert prompts.exchanged(facts) == {3: 9, 9: 3}


def test_lists_without_a_common_place_are_compared_in_silence() -> None:
    trainer = np.full((2, 10), np.nan)
    trainer[0, :5], trainer[1, 5:] = -1.0, -2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        claimed(trainer, trainer - 0.5, np.array([np.arange(10)] * 2))


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ([[-1e-8, -2e-8, -3e-8, -5e-8]], [[0.0, 0.0, 0.0, 0.0]]),  # greedy: certain tokens
        ([[-0.5001], [-0.4999], [-0.4998], [-0.4997]], [[-0.5]] * 4),  # one token, said again
    ],
)
def test_equal_values_that_nearly_agree_are_no_sentinel(trainer: Any, rollout: Any) -> None:
    ours, theirs = np.array(trainer), np.array(rollout)
    assert sentinels.detect(toy.facts(ours, theirs, np.full(ours.shape, 3))) is None


def test_a_file_of_one_value_is_a_sentinel_where_the_other_side_is_far_from_it() -> None:
    ours = -np.linspace(0.5, 3.0, 8)[None]
    found = sentinels.detect(toy.facts(ours, np.zeros((1, 8)), np.arange(8)[None]))
    assert found is not None
    assert found.cause.claimed


def test_honest_zeros_are_counted_on_the_side_of_the_sentinel() -> None:
    rng = np.random.default_rng(2)
    rollout = -rng.exponential(1.0, (8, 60)) - 0.2
    trainer = rollout.copy()
    trainer[:, 5] = rollout[:, 5] = 0.0  # certain on both sides
    trainer[:, 30] = 0.0
    rollout[:, 40] = trainer[:, 40] = -0.3
    found = sentinels.detect(toy.facts(trainer, rollout, rng.integers(0, 99, (8, 60))))
    assert found is not None
    assert [one.split()[0] for one in found.cause.against] == ["8"]
    rollout[:, 5] -= 1e-9  # the trainer's zeros are as honest as before
    found = sentinels.detect(toy.facts(trainer, rollout, rng.integers(0, 99, (8, 60))))
    assert found is not None
    assert [one.split()[0] for one in found.cause.against] == ["8"]


def test_one_loud_token_among_certain_ones_is_no_other_logarithm() -> None:
    certain = -np.array([1e-6, 2e-6, 1e-7, 3e-7, 1e-6, 2e-6, 1e-7, 3e-7])
    facts = toy.facts(
        np.append(certain * 1.01, -5.0)[None], np.append(certain, -2.5)[None], np.arange(9)[None]
    )
    assert residue.other_logarithm(facts) is None


def test_one_value_again_and_again_is_no_other_logarithm() -> None:
    ones = np.ones((1, 30))
    assert residue.other_logarithm(toy.facts(-ones, -1.5 * ones, np.arange(30)[None])) is None


def test_values_near_the_end_of_float64_raise_nothing() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = -rng.random((2, 1, 30)) * 1.7e308
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        claimed(ours, theirs, np.arange(30)[None])


def test_a_vocabulary_beyond_int64_is_a_number() -> None:
    facts = toy.drifting(1e-3, evidence=Evidence(run_config={"vocab_size": 10**30}))
    assert support.describe(facts, True).vocabulary == int(1e30)


def test_a_contrast_needs_no_tokens_only_sums_of_samples() -> None:
    facts = toy.drifting(1e-2)
    members = np.arange(toy.SAMPLES) < 4
    rows = members[facts.sample]
    seen = contrast(facts, members)
    assert seen.ratio == pytest.approx(facts.size[rows].mean() / facts.size[~rows].mean())
    excess = facts.size[rows].sum() - rows.sum() * facts.size[~rows].mean()
    assert seen.excess == pytest.approx(max(0.0, excess) / facts.total)


def test_as_many_steps_as_samples_are_not_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counting(*given: Any) -> Any:
        tried.append(1)
        return contrast(*given)

    monkeypatch.setattr(versions, "contrast", counting)
    rollout = -np.random.default_rng(4).exponential(1.0, (3000, 8))
    tokens = np.zeros((3000, 8), dtype=np.int64)
    noise = toy.noise(1e-3, rollout.shape)
    facts = toy.facts(rollout + noise, rollout, tokens, meta=lambda index: {"step": index})
    versions.detect(facts)
    assert 0 < len(tried) <= 512


def test_many_samples_are_not_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=5000)
    y = x + rng.normal(size=5000) * 100.0
    if permutation_tail(x, y) == 1.0:
        y = -y
    monkeypatch.setattr(np.random, "default_rng", None)
    assert 0.0 < permutation_tail(x, y) < 1.0


def test_a_second_scoring_of_other_tokens_is_no_second_scoring() -> None:
    rollout = -np.random.default_rng(6).exponential(1.0, (2, 30))
    tokens = np.arange(60).reshape(2, 30)
    pairs = pair(toy.samples(TRAINER, rollout, tokens), toy.samples(ROLLOUT, rollout, tokens))
    same = values_of(pairs, toy.samples(TRAINER, rollout, tokens))
    assert np.isfinite(same).all()
    other = values_of(pairs, toy.samples(TRAINER, rollout, tokens[::-1]))
    assert np.isnan(other).all()


def test_a_temperature_that_cannot_be_fitted_is_not_said_to_be_1() -> None:
    tokens = np.arange(40)[None]
    rollout = np.tile([-0.05, -3.0], 20)[None]
    trainer = np.tile([-0.04, -600.0], 20)[None]
    found = temperature.detect(toy.facts(trainer, rollout, tokens))
    assert found is not None
    assert "ratio" not in found.cause.fitted
    assert "could not be fitted" in " ".join(found.cause.for_)


def test_times_that_cannot_be_told() -> None:
    assert statistics.times(2.5) == "2.5 times"
    assert statistics.times(float("inf")) == statistics.times(1e12) == "more than 1e9 times"


def test_a_side_of_one_value_has_no_values_next_to_it() -> None:
    ours = -np.linspace(0.5, 3.0, 8)[None]
    found = sentinels.detect(toy.facts(ours, np.zeros((1, 8)), np.arange(8)[None]))
    assert found is not None
    assert "that side has no other value" in found.cause.for_[0]


def test_a_second_scoring_that_fits_nowhere_is_said_to() -> None:
    rollout = -np.random.default_rng(6).exponential(1.0, (2, 30))
    tokens = np.arange(60).reshape(2, 30)
    sides = [toy.samples(side, rollout, tokens) for side in (TRAINER, ROLLOUT)]
    other = toy.samples(TRAINER, rollout, tokens[::-1])
    evidence = Evidence(trainer_again=other, steps={"41": sides[0], "40": other})
    notes = analyse_dumps(*sides, evidence=evidence).pairs.notes
    assert [one for one in notes if "by id" in one] == [
        f"{name} has values of 0 of 60 tokens: its samples are found by id, and must have the same "
        "token ids"
        for name in ("version 40", "the trainer's second scoring")
    ]


def test_the_last_bits_of_certain_tokens_are_drift() -> None:
    rng = np.random.default_rng(7)
    rollout = -rng.random((8, 20)) * 1e-7
    trainer = -rng.random((8, 20)) * 1e-7
    found = claimed(trainer, rollout, rng.integers(0, 99, (8, 20)))
    assert set(found) == {"numeric-drift"}


def certain(open_: int, seed: int) -> tuple[toy.Floats, toy.Floats]:
    """600 tokens, all but so many of them certain; the rollout has 4 decimals for these, so 0.0."""
    rng = np.random.default_rng([seed, open_])
    rollout = -(10.0 ** rng.uniform(-8.0, -4.5, 600))
    rollout[rng.choice(600, open_, replace=False)] = -rng.exponential(1.5, open_)
    trainer = rollout + rng.normal(size=600) * 0.02 * -np.expm1(rollout)
    rollout[rollout > -5e-5] = 0.0
    return trainer.reshape(20, 30), rollout.reshape(20, 30)


def test_certain_tokens_that_one_side_rounds_to_0_obey_no_law_of_signs() -> None:
    tokens = np.arange(600).reshape(20, 30)
    for seed in range(30):
        found = claimed(*certain(8, seed), tokens)
        assert "temperature" not in found
    found = claimed(*certain(0, 0), tokens)  # no token is in doubt
    assert set(found) <= {"numeric-drift"}


@pytest.mark.parametrize("seed", [7, 17, 55, 117, 118, 145])
def test_a_rank_that_happens_to_have_the_open_tokens_does_not_stand_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, (5, 20))
    rollout[rng.random((5, 20)) < 0.98] *= 1e-6
    trainer = rollout + rng.normal(size=(5, 20)) * 2e-3 * -np.expm1(rollout)
    tokens = rng.integers(0, 99, (5, 20))
    found = claimed(trainer, rollout, tokens, meta=lambda at: {"rank": at % 2})
    assert "outlier-place" not in found
