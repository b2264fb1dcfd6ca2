"""The global generators: restored to the bit, scattered by the system, fingerprinted one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from verify.randomness import fingerprints, restore, scatter, seed_all, snapshot

DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": lambda: float(np.random.standard_normal()),
    "python": random.random,
}


@pytest.fixture(autouse=True)
def _keep() -> object:
    state = snapshot()
    yield
    restore(state)


def test_restore_gives_the_same_draws_again() -> None:
    state = snapshot()
    first = [[draw() for draw in DRAWS.values()] for _ in range(3)]
    restore(state)
    assert [[draw() for draw in DRAWS.values()] for _ in range(3)] == first
    assert fingerprints(snapshot()) != fingerprints(state)
    restore(state)
    assert fingerprints(snapshot()) == fingerprints(state)


@pytest.mark.parametrize("name", DRAWS)
def test_only_the_generator_that_was_drawn_from_shows(name: str) -> None:
    before = fingerprints(snapshot())
    DRAWS[name]()
    after = fingerprints(snapshot())
    assert {key for key in after if after[key] != before[key]} == {name}


def test_the_second_normal_that_numpy_keeps_is_state_too() -> None:
    np.random.seed(1)
    before = fingerprints(snapshot())["numpy"]
    np.random.standard_normal()
    one = fingerprints(snapshot())["numpy"]
    np.random.standard_normal()  # comes from the cache
    assert len({before, one, fingerprints(snapshot())["numpy"]}) == 3


def test_seeding_is_complete_and_scattering_is_not_seeded() -> None:
    seed_all(2**35 + 1)
    first = [draw() for draw in DRAWS.values()]
    seed_all(2**35 + 1)
    assert [draw() for draw in DRAWS.values()] == first
    seed_all(0)
    seeds = {scatter() for _ in range(8)}
    seed_all(0)
    seeds |= {scatter() for _ in range(8)}
    assert len(seeds) == 16


def test_a_generator_of_one_s_own_is_not_touched() -> None:
    own = torch.Generator().manual_seed(3)
    state = own.get_state()
    scatter()
    restore(snapshot())
    assert torch.equal(own.get_state(), state)
