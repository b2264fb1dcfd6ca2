"""Gradients at every degree of expert parallelism on one GPU: the same bits as one rank's.

What is compared, and what has to occur, is in ci/gpu/backward_degrees.py; test_emulated_backward.py
runs the same on a CPU, smaller.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from degree_script import load_backward_degrees, load_degrees, load_problem
from hopper_runs import TIMEOUTS, exact_on_cuda, on_cuda, parts_of, random_inputs, random_upstream

from mok.exact import same_bits
from mok.hopper.backward_problem import BackwardProblem
from mok.hopper.gradient_records import WANT_ROUTED
from mok.hopper.layout import Segments
from mok.hopper.local_group import launch_local_group_backward
from mok.hopper.support import device_problem
from mok.main_gradients import MainGradients

pytestmark = pytest.mark.gpu
gradients, degrees, problems = load_backward_degrees(), load_degrees(), load_problem()


@pytest.fixture(autouse=True)
def _hopper() -> None:
    problem = device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def base() -> Any:
    """The problem and what one rank alone gives, with the segments that a layer takes."""
    device = torch.device("cuda", torch.cuda.current_device())
    whole = problems.to_device(problems.whole_problem(), device)
    return gradients.make_base(whole, gradients.upstream().to(device))


@pytest.mark.parametrize("degree", degrees.DEGREES)
@pytest.mark.parametrize("segments", degrees.SEGMENTS)
@pytest.mark.parametrize("ctas", [1, 7, 0])
def test_no_degree_and_no_ring_changes_a_bit(
    base: Any, degree: int, segments: tuple[int, int], ctas: int
) -> None:
    row = gradients.row_of(base, (degree, segments, ctas and max(ctas, degree)))
    assert row["wrong"] == []
    assert row["lacking"] == [], row


def _spread(tokens: int, ranks: int) -> list[int]:
    """Unequal shares, of more than one rank."""
    counts = [0] * ranks
    for token in range(tokens):
        counts[(token * token) % ranks if ranks > 1 else 0] += 1
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_sms", [0, 16])
def test_forwards_and_backwards_take_turns_at_any_degree(ranks: int, num_sms: int) -> None:
    inputs, d_out = on_cuda(random_inputs()), random_upstream().cuda()
    whole = parts_of(inputs, [700])[0]
    base = gradients.make_base(whole, d_out)
    tokens = _spread(700, ranks)
    parts, d_outs = parts_of(inputs, tokens), list(d_out.split(tokens))
    opened = gradients.open_ranks(ranks, parts, Segments(1, 2), timeouts=TIMEOUTS)
    wanted = base.wanted(tokens)
    for _ in range(3):
        kept = gradients.forward(opened, parts, num_sms)
        found = gradients.backward(opened, parts, d_outs, kept, num_sms=num_sms)
        opened.wait()
        assert same_bits(torch.cat([one.out for one in kept]), base.out)
        assert gradients.different(gradients.joined(found), wanted) == []


def test_64_ranks_on_one_gpu() -> None:
    case, inputs = exact_on_cuda(330, 64, 64, 64, 4, "skewed")
    tokens = [(rank * 7) % 11 for rank in range(64)]
    tokens[63] += 330 - sum(tokens)
    assert min(tokens) >= 0
    parts, d_outs = parts_of(inputs, tokens), list(case.d_out.cuda().split(tokens))
    opened = gradients.open_ranks(64, parts, None, timeouts=TIMEOUTS)
    kept = gradients.forward(opened, parts)
    found = gradients.backward(opened, parts, d_outs, kept, wants=WANT_ROUTED)
    opened.wait()
    assert same_bits(torch.cat([one.out for one in kept]), case.expected["out"])
    joined = gradients.joined(found)
    assert same_bits(joined["d_x"], case.expected["d_x"])
    assert same_bits(joined["d_router"], case.expected["d_router_weights"])
    for name in ("gate", "up", "down"):
        assert same_bits(joined[f"d_{name}"], case.expected[f"d_w_{name}"].bfloat16()), name


def test_ranks_may_keep_and_want_different_things(base: Any) -> None:
    """One rank keeps nothing, one wants nothing of weights, one adds to main gradients."""
    tokens = problems.shares(base.whole, 4)
    parts = problems.split(base.whole, tokens)
    d_outs = list(base.d_out.split(tokens))
    opened = gradients.open_ranks(4, parts, Segments(1, 2))
    kept: list[Any] = gradients.forward(opened, parts)
    kept[1] = None
    asked = [BackwardProblem(d, k, gradients.ALL) for d, k in zip(d_outs, kept, strict=True)]
    asked[2] = dataclasses.replace(asked[2], wants=0)
    shape = parts[3].gate.shape
    main = MainGradients(gate=torch.full(shape, 0.25, device=base.d_out.device))
    asked[3] = dataclasses.replace(asked[3], main=main)
    found = launch_local_group_backward(opened.workspaces, parts, asked)
    opened.wait()
    experts = base.gradients["d_gate"].chunk(4)
    for name in ("d_x", "d_router"):
        one = torch.cat([getattr(mine, name) for mine in found])
        assert gradients.different({name: one}, {name: base.gradients[name]}) == []
    for rank in (0, 1):
        assert same_bits(found[rank].d_gate, experts[rank].bfloat16()), rank
    assert found[2].d_gate is None
    assert found[2].d_shared_up is None
    assert found[3].d_gate is None
    assert same_bits(main.gate, 0.25 + experts[3])
