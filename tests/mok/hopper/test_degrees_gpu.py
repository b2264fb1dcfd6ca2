"""Every degree of expert parallelism on one GPU: the same bits, and logs that keep the rules.

What is compared, and what has to occur, is in ci/gpu/degrees.py; test_emulated.py runs the same on
a CPU, smaller.
"""

from __future__ import annotations

import pytest
import torch
from degree_script import load_degrees, load_problem
from torch import Tensor

from mok.hopper.layout import Segments
from mok.hopper.packing import Problem
from mok.hopper.support import device_problem

pytestmark = pytest.mark.gpu
degrees, problems = load_degrees(), load_problem()


@pytest.fixture(autouse=True)
def _hopper() -> None:
    problem = device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def whole() -> tuple[Problem, Tensor]:
    """The problem, and out of one rank alone with the segments that a layer takes."""
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problems.to_device(problems.whole_problem(), device)
    ranks = degrees.open_ranks(0, problems.sizes_of([problem]), device, None)
    out = degrees.run(ranks, [problem])
    ranks.wait()
    assert bool(out.isfinite().all())
    return problem, out


@pytest.mark.parametrize("degree", degrees.DEGREES)
@pytest.mark.parametrize("segments", degrees.SEGMENTS)
def test_no_degree_and_no_ring_changes_a_bit(
    whole: tuple[Problem, Tensor], degree: int, segments: tuple[int, int]
) -> None:
    problem, wanted = whole
    tokens = problems.shares(problem, degree)
    parts = problems.split(problem, tokens)
    chosen = Segments(*segments)
    ranks = degrees.open_ranks(degree, problems.sizes_of(parts), problem.x.device, chosen)
    for num_sms in (0, *degrees.GRIDS):
        out = degrees.run(ranks, parts, num_sms)
        ranks.wait()
        assert torch.equal(degrees.bits(out), degrees.bits(wanted)), num_sms
    if chosen == degrees.SMALLEST:
        facts = degrees.facts_of(ranks.workspaces, tokens)
        assert degrees.lacking(facts) == [], facts


@pytest.mark.parametrize(
    ("degree", "num_sms"),
    [*((0, sms) for sms in (1, 2, 7, 132)), *((n, sms) for n in (2, 4, 8) for sms in (0, n))],
)
def test_a_log_of_tickets_keeps_the_rules(
    whole: tuple[Problem, Tensor], degree: int, num_sms: int
) -> None:
    problem, wanted = whole
    parts = problems.split(problem, problems.shares(problem, degree))
    ranks = degrees.open_ranks(
        degree, problems.sizes_of(parts), problem.x.device, degrees.SMALLEST, logs=True
    )
    for _ in range(2):
        out, log, judged = degrees.run_logged(ranks, parts, num_sms)
        assert judged.findings == ()
        assert judged.records == len(log) > 1000
        assert min(max(judged.wraps_x), max(judged.wraps_h)) >= degrees.WRAPS
        assert torch.equal(degrees.bits(out), degrees.bits(wanted))
