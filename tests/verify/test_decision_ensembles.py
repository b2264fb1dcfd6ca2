"""The executions of a claim are looked through once, whatever number of rules and tensors asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verify.decision.ensembles import UNCHANGED, Ensemble, place
from verify.evidence import BASE, FIRST, Execution, Plan


class Counted(list[Execution]):
    """A list that knows how often it was gone through."""

    times = 0

    def __iter__(self) -> Iterator[Execution]:
        self.times += 1
        return super().__iter__()


def execution(claim: str, run: int = 0, **fields: Any) -> Execution:
    given: dict[str, Any] = {"variant": "restored", "rank": 0, "inputs": {"x": "a"}}
    return Execution(case="c", claim=claim, run=run, **{**given, **fields})


def ensemble(executions: Counted) -> Ensemble:
    plan = Plan("c", "c", ["repeat"], 1, {"repeat": 1})
    base = {0: execution(BASE, variant=FIRST)}
    own = [e for e in executions if e.claim == "repeat"]
    executions.times = 0
    return Ensemble(plan, "repeat", base, executions, own, [], frozenset())


def test_executions_are_looked_through_once() -> None:
    runs = Counted([execution("repeat", run) for run in (2, 0, 1)])
    runs += [execution("contention", run) for run in (1, 0)]
    seen = ensemble(runs)
    for _ in range(3):
        assert [e.run for e in seen.restored("repeat")] == [0, 1, 2]
        assert [(e.claim, e.run) for e in seen.restored(*UNCHANGED)] == [
            (e.claim, e.run) for e in sorted(runs[:], key=place)
        ]
        assert [e.run for e in seen.restored("contention", "repeat")] == [0, 0, 1, 1, 2]
        assert seen.restored("memory") == []
    assert runs.times == 1


def test_only_those_that_are_compared_with_the_own_base() -> None:
    fits = execution("repeat", 7)
    others = [
        execution("repeat", 1, arm="free"),
        execution("repeat", 2, rank=5),
        execution("repeat", 3, inputs={"x": "b"}),
        execution("repeat", 4, compare="measured"),
    ]
    varied = execution("repeat", 8, inputs={}, same_inputs=False)
    assert ensemble(Counted([*others, varied, fits])).restored("repeat") == [fits, varied]
