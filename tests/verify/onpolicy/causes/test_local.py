"""Causes that concern some tokens: sentinels, masks, displaced lists, the first of a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy.causes import alternatives, masks, sentinels, shift
from verify.onpolicy.causes.facts import Facts

Edit = Any


def edited(edit: Edit, *, seed: int = 11, samples: int = toy.SAMPLES, **more: Any) -> Facts:
    """A clean pair with a little noise, of which `edit` changes the rollout's [S, R] values."""
    given = toy.logits(seed, samples=samples)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    trainer = toy.chosen(toy.log_softmax(given + toy.noise(1e-3, given.shape)), tokens)
    rollout = toy.chosen(values, tokens).copy()
    edit(rollout, trainer)
    return toy.facts(trainer, rollout, tokens, **more)


def tail_of_zeros(rollout: toy.Floats, _: toy.Floats) -> None:
    rollout[:4, -6:] = 0.0


def test_a_tail_of_zeros_is_padding_and_no_certainty() -> None:
    found = sentinels.detect(edited(tail_of_zeros))
    assert found is not None
    assert found.explains is not None
    assert found.cause.fitted["value"] == 0.0
    assert found.cause.fitted["tokens"] >= 18
    assert "runs at the end" in " ".join(found.cause.for_)


@pytest.mark.parametrize("value", [1.0, -100.0, -9999.0, -20.5])
def test_a_constant_here_and_there_is_a_sentinel(value: float) -> None:
    def edit(rollout: toy.Floats, _: toy.Floats) -> None:
        rollout.ravel()[::31] = value

    found = sentinels.detect(edited(edit))
    assert found is not None
    assert found.cause.fitted["value"] == value


def test_an_end_token_added_by_hand_is_told_by_its_place() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        rollout[:, -1] = 0.0
        trainer[:, -1] = -1.5 - np.arange(len(trainer)) / 9.0

    found = sentinels.detect(
        edited(edit, meta=lambda at: {"finish_reason": "stop" if at else "length"})
    )
    assert found is not None
    assert "last tokens alone" in " ".join(found.cause.for_)


def test_certain_tokens_are_no_sentinels() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        rollout[:, ::3] = 0.0
        trainer[:, ::3] = -1e-7

    facts = edited(edit)
    assert sentinels.detect(facts) is None
    assert masks.detect(facts) is None


def test_zeros_of_top_p_are_no_sentinels() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        certain = trainer > np.log(0.8)
        rollout[certain] = 0.0
        low = ~certain
        rollout[low] = trainer[low] - np.log(0.9)

    assert sentinels.detect(edited(edit)) is None


def test_repeated_contexts_are_no_sentinels() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        rollout[:, 3] = -2.25
        trainer[:, 3] = -2.5

    assert sentinels.detect(edited(edit)) is None


def test_noise_and_bfloat16_have_no_sentinels() -> None:
    assert sentinels.detect(toy.drifting(0.1)) is None

    def edit(rollout: toy.Floats, _: toy.Floats) -> None:
        mantissa, exponent = np.frexp(rollout)
        rollout[:] = np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)

    assert sentinels.detect(edited(edit)) is None


def test_values_that_are_not_finite_come_with_their_number() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        rollout[0, 3] = -np.inf
        trainer[1, 4] = np.nan

    found = sentinels.detect_infinite(edited(edit).pairs)
    assert found is not None
    assert found.claimed
    assert "1 counted tokens have NaN on the trainer side" in found.for_[0]
    assert "-inf on the rollout side" in found.for_[1]
    assert sentinels.detect_infinite(toy.drifting(0.1).pairs) is None


def test_outside_the_mask_they_are_not_claimed() -> None:
    counted = [np.arange(toy.LENGTH) != 3] * toy.SAMPLES

    def edit(rollout: toy.Floats, _: toy.Floats) -> None:
        rollout[0, 3] = -np.inf

    assert sentinels.detect_infinite(edited(edit, masks=counted).pairs) is None


def observation(rollout: toy.Floats, trainer: toy.Floats) -> None:
    rollout[::2, 10:15] = 0.0
    trainer[::2, 10:15] = -4.0 - np.arange(5) / 7.0 - np.arange(len(trainer[::2]))[:, None] / 9.0


def test_zeros_between_turns_are_the_mask_s_fault() -> None:
    found = masks.detect(edited(observation))
    assert found is not None
    assert found.cause.name == "mask"
    assert found.cause.fitted == {"tokens": 40.0, "runs": 8.0}
    counted = [np.ones(toy.LENGTH, dtype=bool) for _ in range(toy.SAMPLES)]
    for one in counted[::2]:
        one[10:15] = False
    assert masks.detect(edited(observation, masks=counted)) is None
    assert masks.detect(edited(tail_of_zeros)) is None


def test_a_displaced_mask_shows_at_the_borders_of_turns() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        rollout[:, 10:20] = 0.0  # the turn of the tool
        trainer[:, 10:20] = -3.0 - np.arange(10) / 7.0
        trainer[:, 10:20] -= np.arange(len(trainer))[:, None] / 9.0

    counted = np.ones(toy.LENGTH, dtype=bool)
    counted[11:21] = False  # one too late
    found = masks.detect(edited(edit, masks=[counted] * toy.SAMPLES))
    assert found is not None
    assert "displaced" in found.cause.for_[0]
    right = np.ones(toy.LENGTH, dtype=bool)
    right[10:20] = False
    assert masks.detect(edited(edit, masks=[right] * toy.SAMPLES)) is None


@pytest.mark.parametrize("by", [1, -1, 2])
def test_a_displaced_list_is_found_with_its_direction(by: int) -> None:
    def edit(rollout: toy.Floats, _: toy.Floats) -> None:
        rollout[:] = np.roll(rollout, by, axis=1)

    found = shift.detect(edited(edit))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["lag"] == by
    assert found.cause.where == ""


def test_one_displaced_sample_of_many_is_found() -> None:
    def edit(rollout: toy.Floats, _: toy.Floats) -> None:
        rollout[5] = np.roll(rollout[5], 1)

    found = shift.detect(edited(edit))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.where == "sample s5"


def test_exact_agreement_needs_few_tokens() -> None:
    values = -3.0 * np.random.default_rng(3).random((1, 12))
    found = shift.detect(toy.facts(np.roll(values, 1, axis=1), values, [np.arange(12)]))
    assert found is not None
    assert found.cause.claimed


def test_constant_and_short_lists_fit_every_lag() -> None:
    constant = np.full((4, 20), -1.0)
    tokens = np.tile(np.arange(20), (4, 1))
    found = shift.detect(toy.facts(constant - 0.5, constant, tokens))
    assert found is None or not found.cause.claimed
    short = -np.array([[0.1, 2.0, 0.7]])
    found = shift.detect(toy.facts(np.roll(short, 1, axis=1), short, [np.arange(3)]))
    assert found is None or not found.cause.claimed
    for size in (0.0, 0.1):
        assert shift.detect(toy.drifting(size)) is None


def with_alternatives(first: bool) -> Facts:
    given = toy.logits(12)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    own = toy.chosen(values, tokens)

    def top(index: int) -> tuple[dict[int, float], ...]:
        found = []
        for place, row in enumerate(values[index]):
            ids = {*np.argsort(-row)[:5].tolist(), int(tokens[index, place])}
            found.append({v: float(np.float32(row[v])) for v in ids})
        return tuple(found)

    largest = values.max(axis=-1).astype(np.float32).astype(np.float64)
    return toy.facts(own, largest if first else own - 1e-4, tokens, top=top)


def test_the_first_of_the_list_is_not_the_sampled_token() -> None:
    found = alternatives.detect(with_alternatives(first=True))
    assert found is not None
    assert found.cause.name == "other-tokens"
    assert "top-1" in found.cause.for_[0]
    assert alternatives.detect(with_alternatives(first=False)) is None


def test_zeros_that_come_to_stand_side_by_side_are_no_turns() -> None:
    def edit(rollout: toy.Floats, _: toy.Floats) -> None:
        rollout[np.random.default_rng(4).random(rollout.shape) < 0.2] = 0.0

    facts = edited(edit)
    assert masks.detect(facts) is None
    assert sentinels.detect(facts) is not None


def test_a_little_nearer_to_a_neighbour_is_no_displacement() -> None:
    def edit(rollout: toy.Floats, trainer: toy.Floats) -> None:
        trainer[:, 1:] = 0.45 * rollout[:, 1:] + 0.55 * rollout[:, :-1]

    found = shift.detect(edited(edit))
    assert found is None or not found.cause.claimed
