"""Noise of known origin and of none: rounded values, dropout, flips, drift, and the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import onpolicy_pairs as toy
import pytest

from verify.onpolicy import routing
from verify.onpolicy.causes import dropout, flips, precision, residue
from verify.onpolicy.causes.facts import Facts
from verify.onpolicy.causes.table import Evidence
from verify.onpolicy.samples import TRAINER, Routing


def to_bits(values: toy.Floats, bits: int) -> toy.Floats:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)


def rounded(change: Any) -> Facts:
    given = toy.logits(31)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    own = toy.chosen(values, tokens)
    return toy.facts(own, change(own), tokens)


@pytest.mark.parametrize(("bits", "name"), [(8, "bfloat16"), (11, "float16")])
def test_stored_values_lie_on_a_grid(bits: int, name: str) -> None:
    found = precision.detect(rounded(lambda own: to_bits(own, bits)))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["bits"] == bits
    assert f"exact {name} numbers" in found.cause.for_[0]
    assert not found.cause.structural


def test_few_decimals_are_rounding_too() -> None:
    found = precision.detect(rounded(lambda own: np.round(own, 3)))
    assert found is not None
    assert "3 decimals" in found.cause.for_[0]


def test_float32_lies_on_no_grid() -> None:
    assert precision.detect(toy.drifting(0.01)) is None


@pytest.mark.parametrize("heat", [1.0, 0.83])
def test_rounded_logits_show_in_differences_of_alternatives(heat: float) -> None:
    given = toy.logits(32) * 3.0
    low = toy.log_softmax(to_bits(given, 8) / heat)
    tokens = toy.drawn(low)

    def top(index: int) -> tuple[dict[int, float], ...]:
        rows = low[index]
        return tuple({int(v): float(np.float32(r[v])) for v in np.argsort(-r)[:6]} for r in rows)

    own, other = toy.chosen(low, tokens), toy.chosen(toy.log_softmax(given / heat), tokens)
    found = precision.detect(toy.facts(other, own, tokens))
    assert found is None  # without alternatives it looks like any noise
    rollout = toy.samples("rollout", own, tokens, top=top)
    pairs = toy.pair(toy.samples("trainer", other, tokens), rollout)
    found = precision.detect(toy.gather(pairs, Evidence()))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.where == "rollout side"


def test_exact_logits_make_no_line() -> None:
    given = toy.logits(33) * 3.0
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)

    def top(index: int) -> tuple[dict[int, float], ...]:
        rows = values[index]
        return tuple({int(v): float(np.float32(r[v])) for v in np.argsort(-r)[:6]} for r in rows)

    own = toy.chosen(values, tokens)
    assert precision.detect(toy.facts(own, own - 1e-3, tokens, top=top)) is None


def twice(first: float, second: float, common: float = 0.0) -> Facts:
    """The trainer scores twice with noise of its own, and with `common` noise both times."""
    given = toy.logits(34)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    shared = given + toy.noise(common, given.shape, seed=4)
    scored = [
        toy.chosen(toy.log_softmax(shared + toy.noise(size, given.shape, seed=5 + at)), tokens)
        for at, size in enumerate((first, second))
    ]
    again = Evidence(trainer_again=toy.samples(TRAINER, scored[1], tokens))
    return toy.facts(scored[0], toy.chosen(values, tokens), tokens, evidence=again)


def test_a_trainer_that_disagrees_with_itself_as_with_the_sampler_is_random() -> None:
    found = dropout.detect(twice(0.3, 0.3))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["own"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(("own", "common"), [(1e-3, 0.3), (1e-4, 0.0), (0.0, 0.3)])
def test_a_trainer_that_nearly_agrees_with_itself_is_not(own: float, common: float) -> None:
    found = dropout.detect(twice(own, own, common))
    assert found is None or not found.cause.claimed


def test_contexts_that_occur_again_are_a_hint_only() -> None:
    given = np.repeat(toy.logits(35, samples=4), 4, axis=0)
    values = toy.log_softmax(given)
    tokens = np.repeat(toy.drawn(values[::4]), 4, axis=0)
    trainer = toy.chosen(toy.log_softmax(given + toy.noise(0.3, given.shape)), tokens)
    found = dropout.detect(toy.facts(trainer, toy.chosen(values, tokens), tokens))
    assert found is not None
    assert found.cause.weight > 0.0
    assert not found.cause.claimed


def routed(flip_share: float, carried: float, rest: float) -> Facts:
    """Two layers of four experts; flipped rows have noise `carried`, the others `rest`."""
    rng = np.random.default_rng(36)
    given = toy.logits(37)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    count, length = tokens.shape
    prompt = 3
    base = np.argsort(rng.random((count, prompt + length - 1, 2, 8)), axis=3)[..., :2]
    flipped = rng.random(base.shape[:2]) < flip_share
    other = base.copy()
    other[flipped, 0] = (base[flipped, 0] + 1) % 8
    predicts = flipped[:, prompt - 1 :]
    size = np.where(predicts, carried, rest)[..., None]
    trainer = toy.chosen(toy.log_softmax(given + size * toy.noise(1.0, given.shape)), tokens)
    margins = np.where(flipped[..., None], 0.01, 0.5).astype(np.float32) * np.ones(2, np.float32)
    mine = toy.samples("trainer", trainer, tokens, routing=lambda at: Routing(other[at], 0))
    their = toy.samples(
        "rollout",
        toy.chosen(values, tokens),
        tokens,
        routing=lambda at: Routing(base[at], 0, margins=margins[at]),
    )
    return toy.gather(toy.pair(mine, their), Evidence())


def test_flipped_tokens_that_carry_the_mismatch_are_named() -> None:
    facts = routed(0.1, 1.0, 0.001)
    found = flips.detect(facts, routing.check(facts.pairs))
    assert found is not None
    assert found.cause.claimed
    assert found.cause.fitted["share"] > 0.9
    assert "router margin 0.01 there and 0.5 elsewhere" in " ".join(found.cause.for_)


def test_flips_that_carry_no_more_than_others_are_not() -> None:
    facts = routed(0.1, 0.05, 0.05)
    found = flips.detect(facts, routing.check(facts.pairs))
    assert found is None or not found.cause.claimed
    assert flips.detect(facts, None) is None
    many = routed(0.6, 0.05, 0.05)
    found = flips.detect(many, routing.check(many.pairs))
    assert found is not None
    assert found.cause.fitted["share"] > 0.4
    assert found.cause.weight < 0.2


def test_small_unbiased_noise_is_drift() -> None:
    found = residue.detect(toy.drifting(0.005))
    assert found[0].name == "numeric-drift"
    assert found[0].claimed
    assert not found[0].structural
    suspected = residue.detect(toy.drifting(0.005), ["routing-flips"])
    assert not any(one.claimed for one in suspected)


def test_larger_noise_is_nothing_that_can_be_claimed() -> None:
    assert not any(one.claimed for one in residue.detect(toy.drifting(0.05)))
    found = residue.detect(toy.drifting(0.2))
    assert not any(one.claimed for one in found)
    remedy = next(one.remedy for one in found if one.name == "cannot-tell")
    assert "verify.onpolicy.recorder" in remedy
    assert "a second scoring" in remedy


def test_gross_noise_cannot_be_told() -> None:
    found = residue.detect(toy.drifting(3.0))
    assert found[0].name == "cannot-tell"
    assert found[0].claimed


def test_damage_here_and_there_cannot_be_told() -> None:
    given = toy.logits(38)
    values = toy.log_softmax(given)
    tokens = toy.drawn(values)
    own = toy.chosen(values, tokens)
    trainer = own.copy()
    trainer.ravel()[::37] -= np.random.default_rng(1).random(len(trainer.ravel()[::37]))
    found = residue.detect(toy.facts(trainer, own, tokens))
    assert found[0].name == "cannot-tell"
    assert "carry" in found[0].for_[0]


def test_the_same_difference_each_time_is_no_noise() -> None:
    given = np.repeat(toy.logits(39, samples=4), 4, axis=0)
    values = toy.log_softmax(given)
    tokens = np.repeat(toy.drawn(values[::4]), 4, axis=0)
    moved = given + np.repeat(toy.noise(0.005, given[::4].shape), 4, axis=0)
    found = residue.detect(
        toy.facts(toy.chosen(toy.log_softmax(moved), tokens), toy.chosen(values, tokens), tokens)
    )
    assert not found[0].claimed
    assert "the same each time" in " ".join(found[0].for_)
