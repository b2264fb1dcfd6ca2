"""Result documents as large as a nightly run makes them, for the tests of renderers.

The findings are real ones: two tensors compared and explained as a run would do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from verify import results
from verify.explanation.telling import explain
from verify.verdicts import CaseVerdict, Finding

CLAIMS = ("repeat", "process", "memory", "threads", "history", "batch", "rank", "reference")
NUM_CASES, NUM_FAILING = 1000, 30


@functools.cache
def difference(name: str = "out") -> dict[str, Any]:
    """An unordered sum against an ordered one: float32 [96, 40], elements a few ulp apart."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(96, 40, 64, generator=generator)
    shuffled = terms[:, :, torch.randperm(64, generator=generator)]
    base = functools.reduce(torch.add, terms.unbind(2))
    return explain(base, functools.reduce(torch.add, shuffled.unbind(2)), name, "repeat")


def large(
    make_result: Callable[..., dict[str, Any]],
    make_claim: Callable[..., Any],
    name: Callable[[int], str] = lambda index: f"suite/group-{index % 37}/case-{index}",
    *,
    number: int = NUM_CASES,
    failing: int = NUM_FAILING,
    detail: str = "out has other bits than expected",
) -> dict[str, Any]:
    """`number` cases of eight claims on four ranks; `failing` of them, spread out, differ."""
    claims = [make_claim(claim, ranks=4, **_conditions(claim)) for claim in CLAIMS]
    findings = [
        Finding(
            "bits-differ",
            detail,
            tensor="out",
            rank=rank,
            run=rank,
            variant="restored",
            difference=difference(),
        )
        for rank in range(2)
    ]
    wrong = [make_claim("repeat", findings, ranks=4, differing=2), *claims[1:]]
    pair = [CaseVerdict("good", "suite.py::good", claims), CaseVerdict("bad", "suite.py", wrong)]
    document = make_result(pair, ranks=4, executions=[])
    good, bad = document["cases"]
    every = number // failing
    cases = []
    for index in range(number):
        like = bad if index % every == 0 and index // every < failing else good
        target = f"suite.py::case{index}"
        cases.append({**like, "case": name(index), "target": target, "reproduce": f"run {target}"})
    return results.assemble({**document, "cases": cases})


def _conditions(claim: str) -> Mapping[str, Any]:
    if claim == "threads":
        return {
            "requested": [{"num_threads": 2, "base": 1}, {"num_threads": 3, "base": 1}],
            "effective": [{"num_threads": 2}, {"num_threads": 3}],
        }
    if claim != "reference":
        return {}
    measured = {
        "worst_ratio": 0.25,
        "over_budget": 0,
        "rounded_elsewhere": 12,
        "forbidden": 0,
        "relative_l2": 0.0021,
        "numel": 4096,
    }
    return {"measurements": {"out": measured, "grad.x": {**measured, "worst_ratio": 0.61}}}
