"""Order and budget: affected cases first, few starts, and nothing cut short; no real workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.evidence import Execution, Plan
from verify.gates.pacing import MOST_AT_ONCE, Budget, Pair, ordered, paced
from verify.plans import RunOptions


def pairs_of(*ranks: int) -> list[Any]:
    """Cases c0, c1, ... made for so many ranks."""
    return [(None, Plan(f"c{n}", f"c{n}", ("repeat",), r, {})) for n, r in enumerate(ranks)]


class Engine:
    """Stands for the workers: every case makes `executions` and takes `seconds`."""

    def __init__(self, executions: int = 10, seconds: float = 1.0) -> None:
        self.executions, self.seconds = executions, seconds
        self.now = 0.0
        self.starts: list[list[str]] = []

    def __call__(
        self, cases: Sequence[Pair], ranks: int, options: Any, folder: Path, progress: Any
    ) -> list[Any]:
        assert folder.is_dir()
        assert {plan.ranks for _, plan in cases} == {ranks}
        self.starts.append([plan.case for _, plan in cases])
        self.now += self.seconds * len(cases)
        return [
            Execution(plan.case, "repeat", "v", 0, run)
            for _, plan in cases
            for run in range(self.executions)
        ]

    def run(
        self, pairs: Any, seconds: float | None = None, executions: int | None = None
    ) -> SimpleNamespace:
        budget = Budget(seconds, executions, lambda: self.now)
        found = paced(pairs, RunOptions(), budget, self)
        left = [plan.case for plan in found.left]
        return SimpleNamespace(left=left, spent=found.spent, executions=found.executions)


def test_without_a_budget_every_number_of_ranks_starts_once() -> None:
    engine = Engine()
    pairs = ordered(pairs_of(*[4, 1] * 10), frozenset())
    found = engine.run(pairs)
    assert [len(start) for start in engine.starts] == [10, 10]
    assert (found.left, found.spent, found.executions) == ([], None, 200)


def test_affected_cases_come_first_and_share_a_start_with_the_others() -> None:
    pairs = ordered(pairs_of(1, 4, 1, 4, 1), frozenset({3, 4}))
    assert [plan.case for _, plan in pairs] == ["c4", "c3", "c1", "c0", "c2"]
    engine = Engine()
    engine.run(pairs)
    assert engine.starts == [["c4"], ["c3", "c1"], ["c0", "c2"]]


@pytest.mark.parametrize(
    ("budget", "ran", "spent"),
    [
        ({"executions": 1}, 1, "10 of at most 1 executions were made"),
        ({"executions": 35}, 4, "40 of at most 35 executions were made"),
        ({"executions": 200}, 20, None),
        ({"executions": 199}, 20, None),
        ({"seconds": 0.5}, 1, "1.0 s of at most 0.5 s were used"),
        ({"seconds": 7.0}, 7, "7.0 s of at most 7 s were used"),
        ({"seconds": 7.0, "executions": 20}, 2, "20 of at most 20 executions were made"),
        ({"seconds": 1e6, "executions": 10**6}, 20, None),
    ],
)
def test_the_budget(budget: dict[str, Any], ran: int, spent: str | None) -> None:
    engine = Engine()
    found = engine.run(pairs_of(*[2] * 20), **budget)
    assert found.left == [f"c{n}" for n in range(ran, 20)]
    assert (found.spent, found.executions) == (spent, 10 * ran)
    assert len(engine.starts[0]) == 1
    assert max(map(len, engine.starts)) <= MOST_AT_ONCE


def test_a_budget_that_the_controls_used_up_runs_nothing() -> None:
    engine = Engine()
    engine.now = 60.0
    found = engine.run(pairs_of(1, 1), seconds=60.0)
    assert (engine.starts, found.left) == ([], ["c0", "c1"])
    assert found.spent == "60.0 s of at most 60 s were used"


@given(
    st.lists(st.integers(1, 3), max_size=12),
    st.sets(st.integers(0, 11)),
    st.none() | st.integers(1, 60),
    st.none() | st.floats(0.1, 20),
    st.integers(0, 9),
    st.floats(0, 3),
)
def test_every_case_runs_once_or_is_left(
    ranks: list[int],
    affected: set[int],
    executions: int | None,
    seconds: float | None,
    each: int,
    takes: float,
) -> None:
    pairs = pairs_of(*ranks)
    queue = ordered(pairs, frozenset(affected))
    engine = Engine(each, takes)
    found = engine.run(queue, seconds, executions)
    ran = [case for start in engine.starts for case in start]
    assert ran + found.left == [plan.case for _, plan in queue]
    assert sorted(ran + found.left) == sorted(plan.case for _, plan in pairs)
    assert bool(found.left) == (found.spent is not None)
    if executions is not None:  # passed by one case at most
        assert found.executions < executions + max(each, 1)
    border = len(affected & set(range(len(ranks))))
    assert {plan.case for _, plan in queue[:border]} == {
        f"c{n}" for n in affected if n < len(ranks)
    }
