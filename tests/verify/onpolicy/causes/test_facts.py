"""Columns that detectors share, against plain loops; tails of tests, against exact ones."""

from __future__ import annotations

import math

import numpy as np
import onpolicy_pairs as toy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.onpolicy.causes.statistics import (
    binomial_tail,
    correlation,
    normal_tail,
    permutation_tail,
    ranks,
    student_tail,
)

IDS = st.lists(st.integers(0, 5), min_size=0, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4))
def test_what_was_seen_before_is_counted_as_a_loop_does(
    samples: list[tuple[list[int], ...]],
) -> None:
    prompts = [np.array(prompt, dtype=np.int64) for prompt, _ in samples]
    tokens = [np.array(response, dtype=np.int64) for _, response in samples]
    values = [-np.ones(len(one)) for one in tokens]
    facts = toy.facts(values, values, tokens, prompts=prompts)
    whole, response = facts.context.seen
    expected_whole, expected_response = [], []
    for one in facts.pairs.samples:
        prompt = list(one.trainer.prompt if one.trainer.prompt is not None else [])
        ids = [int(x) for x in one.tokens if one.tokens is not None]
        for place, token in enumerate(ids):
            expected_whole.append((prompt + ids[:place]).count(token))
            expected_response.append(ids[:place].count(token))
    assert whole.tolist() == expected_whole
    assert response.tolist() == expected_response


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), min_size=2, max_size=4))
def test_digests_are_equal_exactly_for_equal_contexts(samples: list[tuple[list[int], ...]]) -> None:
    prompts = [np.array(prompt, dtype=np.int64) for prompt, _ in samples]
    tokens = [np.array(response, dtype=np.int64) for _, response in samples]
    values = [-np.ones(len(one)) for one in tokens]
    facts = toy.facts(values, values, tokens, prompts=prompts)
    digests = facts.context.prefixes
    contexts = []
    for one in facts.pairs.samples:
        prompt = tuple(int(x) for x in one.trainer.prompt)
        ids = tuple(int(x) for x in one.tokens)
        contexts += [(prompt, ids[: place + 1]) for place in range(len(ids))]
    for a in range(len(contexts)):
        for b in range(a):
            assert (digests[a] == digests[b]) == (contexts[a] == contexts[b])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.floats(0.01, 0.99))
def test_the_binomial_tail_is_a_bound(trials: int, successes: int, chance: float) -> None:
    successes = min(successes, trials)
    exact = math.fsum(
        math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
        for k in range(successes, trials + 1)
    )
    assert exact <= binomial_tail(successes, trials, chance) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("t", "freedom", "exact"),
    [(3.078, 1, 0.1), (5.841, 3, 0.005), (12.924, 3, 5e-4), (3.496, 20, 1.13e-3)],
)
def test_student_s_tail_is_that_of_tables(t: float, freedom: float, exact: float) -> None:
    assert student_tail(t, freedom) == pytest.approx(exact, rel=0.02)
    assert student_tail(-t, freedom) == 1.0
    assert student_tail(t, 0) == 1.0


def test_ranks_and_correlations() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert correlation(np.arange(4.0), -np.arange(4.0)) == pytest.approx(-1.0)
    assert correlation(np.ones(4), np.arange(4.0)) == 0.0
    assert normal_tail(0.0) == 0.5
    rising = np.arange(6.0)
    assert permutation_tail(rising, rising) == pytest.approx(1 / 720, abs=4e-3)
    assert permutation_tail(rising, -rising) == 1.0


def test_rows_can_be_taken_out() -> None:
    facts = toy.drifting(0.1)
    half = facts.sample % 2 == 0
    assert len(facts.without(half)) + len(facts.only(half)) == len(facts)
    assert facts.share(half) == pytest.approx(facts.only(half).total / facts.total)
    assert facts.bounds[-1] == len(facts)
