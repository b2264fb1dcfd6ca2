"""Records of routing: each fault is found, and a record that fits has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onpolicy_pairs as toy
from numpy.typing import NDArray

from verify.onpolicy.routing import RoutingCheck, check
from verify.onpolicy.routing_rows import overlap, start_of
from verify.onpolicy.routing_table import FAULTS
from verify.onpolicy.samples import Routing

Experts = NDArray[np.int64]
PROMPT, LENGTH, LAYERS, K, EXPERTS = 12, 20, 4, 3, 32
ROWS = PROMPT + LENGTH - 1


def live(seed: int = 0, layers: int = LAYERS) -> list[Experts]:
    """[rows, layers, K] for four samples, distinct experts within a layer."""
    rng = np.random.default_rng(seed)
    shape = (4, ROWS, layers, EXPERTS)
    return list(np.argsort(rng.random(shape), axis=3)[..., :K])


def checked(
    trainer: Callable[[int], Routing], rollout: Callable[[int], Routing], size: float = 0.1
) -> RoutingCheck:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, (4, LENGTH))
    prompts = list(rng.integers(0, 50, (4, PROMPT)))
    values = -rng.random((4, LENGTH)) - 0.1
    pairs = toy.pair(
        toy.samples("trainer", values + size * values, tokens, prompts=prompts, routing=trainer),
        toy.samples("rollout", values, tokens, prompts=prompts, routing=rollout),
    )
    found = check(pairs)
    assert found is not None
    return found


def kinds(found: RoutingCheck) -> set[str]:
    assert {fault.kind for fault in found.faults} <= set(FAULTS)
    return {fault.kind for fault in found.faults}


def test_equal_records_have_no_fault_and_no_flip() -> None:
    routes = live()
    found = checked(
        lambda at: Routing(routes[at][:, :, ::-1], 0), lambda at: Routing(routes[at], 0)
    )
    assert kinds(found) == set()
    assert found.share == 0.0
    assert [one.flipped for one in found.layers] == [0] * LAYERS
    assert np.count_nonzero(found.flips == 0) == 4 * LENGTH


def test_a_flip_concerns_the_token_that_its_row_predicts() -> None:
    routes = live()
    other = [one.copy() for one in routes]
    other[1][PROMPT - 1 + 5, 2] = (routes[1][PROMPT - 1 + 5, 2] + 1) % EXPERTS
    found = checked(lambda at: Routing(other[at]), lambda at: Routing(routes[at], 0))
    assert np.flatnonzero(found.flips > 0).tolist() == [LENGTH + 5]
    assert [one.flipped for one in found.layers] == [0, 0, 1, 0]


def test_layers_that_are_displaced_are_found_with_their_offset() -> None:
    record = live(layers=6)
    for one in record:
        one[:, :2] = 0
    found = checked(lambda at: Routing(record[at][:, 2:], 0), lambda at: Routing(record[at], 0))
    assert kinds(found) == {"layer-offset", "filler-layers"}
    said = " ".join(fault.what for fault in found.faults)
    assert "by +2" in said
    assert "100.0%" in said


def test_layers_that_are_named_are_matched_by_number() -> None:
    record = live(layers=6)
    named = (2, 3, 4, 5)
    found = checked(
        lambda at: Routing(record[at][:, 2:], 0, layers=named), lambda at: Routing(record[at], 0)
    )
    assert kinds(found) == set()
    assert [one.layer for one in found.layers] == list(named)
    found = checked(
        lambda at: Routing(record[at][:, :4], 0, layers=named), lambda at: Routing(record[at], 0)
    )
    assert kinds(found) == {"layer-offset"}


def test_one_layer_that_has_another_s_routes() -> None:
    record = live()
    other = [one.copy() for one in record]
    for one, own in zip(other, record, strict=True):
        one[:, 3] = own[:, 0]
    found = checked(lambda at: Routing(other[at], 0), lambda at: Routing(record[at], 0))
    assert kinds(found) == {"layer-offset"}
    assert "layers 3" in found.faults[0].where


def test_rows_of_the_prompt_that_were_never_filled() -> None:
    routes = live()
    record = [one.copy() for one in routes]
    for one in record:
        one[: PROMPT - 1] = 0
    found = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(record[at], 0))
    assert kinds(found) == {"filler-rows"}
    assert "rows 0..10 are constant (0, 0, 0)" in found.faults[0].what
    assert found.share == 0.0


def test_rows_of_the_prompt_from_another_request() -> None:
    routes, foreign = live(), live(seed=9)
    record = [one.copy() for one in routes]
    for one, other in zip(record, foreign, strict=True):
        one[:PROMPT] = other[:PROMPT]
    found = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(record[at], 0))
    assert kinds(found) == {"foreign-rows"}


def test_records_that_lack_rows_or_choose_more_experts() -> None:
    routes = live()
    found = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(routes[at][3:]))
    assert "missing-rows" in kinds(found)
    assert f"expected n-1 = {ROWS} rows, got {ROWS - 3}" in found.faults[0].what
    found = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(routes[at][:, :, :2], 0))
    assert kinds(found) == {"other-k"}


def test_an_expert_chosen_twice_is_no_choice() -> None:
    routes = live()
    record = [one.copy() for one in routes]
    record[0][5, 1, 1] = record[0][5, 1, 0]
    found = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(record[at], 0))
    assert kinds(found) == {"repeated-experts"}


def test_absent_rows_are_unknown_and_not_flipped() -> None:
    routes = live()
    record = [one.copy() for one in routes]
    for one in record:
        one[PROMPT - 1 : PROMPT + 3] = -1
    found = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(record[at], 0))
    assert kinds(found) == set()
    assert np.count_nonzero(found.flips < 0) == 4 * 4


def test_where_a_record_begins() -> None:
    def made(rows: int, start: int = -1) -> Routing:
        return Routing(np.zeros((rows, 1, 1), dtype=np.int64), start)

    assert start_of(made(9, 4), 5, 5) == 4
    assert start_of(made(9), 5, 5) == 0
    assert start_of(made(10), 5, 5) == 0
    assert start_of(made(5), 5, 5) == 4


def test_overlap_counts_equal_experts() -> None:
    a, b = np.array([[1, 2, 3]]), np.array([[3, 9, 1]])
    assert overlap(a, b).tolist() == [2 / 3]
    assert overlap(np.array([[-1, -1]]), np.array([[-1, -1]])).tolist() == [0.0]
    assert overlap(np.array([[1, 2, 3, 4]]), np.array([[4, 1]])).tolist() == [1.0]


def test_without_routing_there_is_nothing_to_check() -> None:
    assert check(toy.drifting(0.1).pairs) is None


def test_the_check_is_json() -> None:
    routes = live()
    record: Any = checked(lambda at: Routing(routes[at], 0), lambda at: Routing(routes[at], 0))
    read = record.to_json()
    assert read["tokens"] == 4 * LENGTH
    assert read["flipped"] == 0
    assert read["faults"] == []
