"""Causes told by the samples they concern: places, versions, positions, prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy.causes import groups, places, positions, prompts, versions
from verify.onpolicy.causes.facts import Facts
from verify.onpolicy.causes.table import Evidence
from verify.onpolicy.samples import TRAINER

COUNT = 24


def uneven(
    sizes: toy.Floats, *, seed: int = 21, falls: bool = False, **more: Any
) -> tuple[Facts, toy.Floats]:
    """Noise of the logits of its own size for each sample; with falls, larger at the beginning."""
    given = toy.logits(seed, samples=COUNT)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    size = np.broadcast_to(sizes[:, None], given.shape[:2]).copy()
    if falls:
        size *= np.exp(-np.arange(given.shape[1]) / 8.0)
    moved = given + size[..., None] * toy.noise(1.0, given.shape)
    trainer = toy.chosen(toy.log_softmax(moved), tokens)
    return toy.facts(trainer, toy.chosen(values, tokens), tokens, **more), trainer


def loud(which: Any, size: float = 0.5, quiet: float = 0.01) -> toy.Floats:
    return np.where([bool(which(at)) for at in range(COUNT)], size, quiet)


@pytest.mark.parametrize("field", ["rank", "rollout_rank", "batch_position"])
def test_a_place_that_stands_out_is_named(field: str) -> None:
    facts, _ = uneven(loud(lambda at: at % 4 == 2), meta=lambda at: {field: at % 4})
    found = places.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert found.cause.where == f"{places.KINDS[field]} 2"


def test_even_places_do_not_stand_out() -> None:
    for seed in range(5):
        facts, _ = uneven(np.full(COUNT, 0.05), seed=seed, meta=lambda at: {"rank": at % 4})
        found = places.detect(facts)
        assert found is None or not found.cause.claimed


def test_one_sample_is_no_place() -> None:
    facts, _ = uneven(loud(lambda at: at == 2), meta=lambda at: {"rank": at})
    assert places.detect(facts) is None


def test_unequal_samples_across_places_are_not_a_place() -> None:
    facts, _ = uneven(loud(lambda at: at in (1, 6, 11, 16)), meta=lambda at: {"rank": at % 4})
    found = places.detect(facts)
    assert found is None or not found.cause.claimed
    assert set(np.flatnonzero(groups.outstanding(facts))) == {1, 6, 11, 16}


def test_a_mismatch_that_begins_at_a_step_is_stale() -> None:
    facts, _ = uneven(loud(lambda at: at >= 12, 0.1), meta=lambda at: {"step": 7 + at // 4})
    found = versions.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["step"] == 10
    facts, _ = uneven(np.full(COUNT, 0.05), meta=lambda at: {"step": 7 + at // 4})
    found = versions.detect(facts)
    assert found is None or not found.cause.claimed


def test_recorded_versions_tell_stale_samples() -> None:
    def meta(at: int) -> dict[str, str]:
        return {"trainer_version": "9", "rollout_version": "8" if at % 2 else "9"}

    facts, _ = uneven(loud(lambda at: at % 2, 0.1), meta=meta)
    found = versions.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert found.cause.structural
    facts, _ = uneven(np.full(COUNT, 0.05), meta=meta)
    found = versions.detect(facts)
    assert found is None or not found.cause.claimed


def test_two_versions_in_one_response_are_as_recorded() -> None:
    half = toy.LENGTH // 2

    def meta(at: int) -> dict[str, Any]:
        return {"trainer_version": "7", "rollout_version": ["6"] * half + ["7"] * half}

    given = toy.logits(22, samples=COUNT)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    moved = given.copy()
    moved[:, :half] += toy.noise(0.3, moved[:, :half].shape)
    trainer = toy.chosen(toy.log_softmax(moved + toy.noise(1e-3, given.shape)), tokens)
    found = versions.detect(toy.facts(trainer, toy.chosen(values, tokens), tokens, meta=meta))
    assert found is not None
    assert found.cause.claimed
    assert not found.cause.structural
    assert "as recorded" in found.cause.remedy


def test_another_version_s_scoring_that_fits_is_named() -> None:
    given = toy.logits(23)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    trainer = toy.chosen(toy.log_softmax(given + toy.noise(0.2, given.shape)), tokens)
    rollout = toy.chosen(values, tokens)
    told = {"trainer_version": "5"}
    steps = {"4": toy.samples(TRAINER, rollout, tokens), "5": toy.samples(TRAINER, trainer, tokens)}
    facts = toy.facts(
        trainer, rollout, tokens, evidence=Evidence(steps=steps), meta=lambda at: told
    )
    found = versions.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert "trainer of 4" in found.cause.for_[0]
    only = Evidence(steps={"5": steps["5"]})
    assert versions.detect(toy.facts(trainer, rollout, tokens, evidence=only)) is None


def test_the_same_contexts_one_step_earlier_fit() -> None:
    """Every step scores the same tokens; the sampler is one step behind."""
    given = toy.logits(24, samples=4)
    move = toy.noise(0.1, given.shape)
    tokens = toy.drawn(toy.log_softmax(given))
    by_step = [toy.chosen(toy.log_softmax(given + at * move), tokens) for at in range(6)]
    trainer = np.concatenate(by_step[1:])
    rollout = np.concatenate(by_step[:-1])
    found = versions.detect(
        toy.facts(trainer, rollout, np.tile(tokens, (5, 1)), meta=lambda at: {"step": at // 4})
    )
    assert found is not None
    assert found.cause.claimed
    assert "step before" in " ".join(found.cause.for_)


def test_padding_that_matters_is_positions() -> None:
    sizes = np.array([0.0 if at % 3 == 0 else 0.05 * (at % 3) for at in range(COUNT)])
    facts, _ = uneven(sizes, meta=lambda at: {"padding": at % 3})
    found = positions.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert "agree exactly" in found.cause.for_[0]
    facts, _ = uneven(np.full(COUNT, 0.05), meta=lambda at: {"padding": at % 3})
    found = positions.detect(facts)
    assert found is None or not found.cause.claimed


def test_padding_read_by_a_convolution_moves_the_first_tokens() -> None:
    given = toy.logits(25, samples=COUNT)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    moved = given.copy()
    moved[1::2, :3] += toy.noise(0.5, moved[1::2, :3].shape)
    facts = toy.facts(
        toy.chosen(toy.log_softmax(moved), tokens),
        toy.chosen(values, tokens),
        tokens,
        meta=lambda at: {"padding": at % 2},
    )
    found = positions.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["first"] == 3


def test_exchanged_lists_are_found_by_pairing_them_again() -> None:
    facts, trainer = uneven(np.full(COUNT, 1e-3))
    moved = trainer.copy()
    moved[8:12] = trainer[[9, 10, 11, 8]]
    rollout = np.stack(np.split(facts.rollout, COUNT))
    tokens = np.stack(np.split(facts.token, COUNT))
    found = prompts.detect(toy.facts(moved, rollout, tokens, meta=lambda at: {"rank": at // 4}))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["samples"] == 4
    assert "trainer rank 2" in " ".join(found.cause.for_)
    assert prompts.detect(facts) is None


def test_a_wrong_prompt_shows_at_the_beginning() -> None:
    facts, _ = uneven(loud(lambda at: at < 6, 4.0), falls=True, meta=lambda at: {"rank": at // 6})
    found = prompts.detect(facts)
    assert found is not None
    assert found.cause.claimed
    assert found.cause.name == "wrong-prompt"
    facts, _ = uneven(loud(lambda at: at < 6, 2.0), meta=lambda at: {"rank": at // 6})
    assert prompts.detect(facts) is None


def test_kernels_that_take_a_mask_another_way_are_not_positions() -> None:
    sizes = np.where(np.arange(COUNT) % 3 == 0, 0.0, 1e-4)
    facts, _ = uneven(sizes, meta=lambda at: {"padding": at % 3})
    found = positions.detect(facts)
    assert found is not None
    assert not found.cause.claimed


def test_the_chance_of_a_contrast_is_one() -> None:
    """Of 200 random halves of even samples, few have a small chance."""
    facts, _ = uneven(np.full(COUNT, 0.05))
    rng = np.random.default_rng(8)
    chances = [groups.contrast(facts, rng.permutation(COUNT) < 6).chance for _ in range(200)]
    assert min(chances) > 1e-4
    assert sum(chance < 0.05 for chance in chances) < 25
