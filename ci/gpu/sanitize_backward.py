"""The Hopper backward, small, for compute-sanitizer: one rank, and two that share a launch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python ci/gpu/sanitize_backward.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --error-exitcode 9 \\
        python ci/gpu/sanitize_backward.py

As sanitize_forward.py, whose reasons hold. The ring begins anew, an expert goes in parts through
memory, widths end inside of tiles, a rank has no tokens, an expert no rows; gradients go to bf16
and to fp32, from g and u that were kept and that are computed again, and a second launch follows
under the same workspaces. Results are exact, and compared bit for bit on the host. What the kernels
are to write holds NaN before (`filled_gradients`). Exit code 0 when all are right, 1 when one is
not, 3 without a device for the kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # before torch: no pools

import backward_degrees  # all three beside this file
import click
import degree_problem
import torch
from one_gpu import device_or_exit
from torch import Tensor

from mok.exact import exact_case
from mok.hopper import backward_problem
from mok.hopper.backward_problem import BackwardProblem, Gradients
from mok.hopper.layout import Segments
from mok.hopper.packing import Problem
from mok.hopper.workspace import Timeouts

TIMEOUTS = Timeouts(500.0, 500.0)  # seconds: a tool slows a launch down a hundredfold
SEGMENTS = Segments(1, 1)
T = 450
DEGREES = {0: (T,), 2: (0, T)}
"""By degree, tokens of each rank; 0: one rank alone. Of two ranks the second has all tokens, so
that its sums of the shared expert are all there are."""
NAMES = {
    "d_x": "d_x",
    "d_router": "d_router_weights",
    **{f"d_{name}": f"d_w_{name}" for name in ("gate", "up", "down")},
    **{f"d_shared_{name}": f"d_w_shared_{name}" for name in ("gate", "up", "down")},
}


@contextlib.contextmanager
def filled_gradients() -> Iterator[None]:
    """Every gradient that a launch inside is to write holds NaN first.

    Gradients of weights leave a CTA by TMA stores, which initcheck does not take for writes: what
    reads them later, and be it the host, would read memory that nobody wrote. After an ordinary
    write it is silent there, and loses nothing: an element that the kernels leave out keeps its
    NaN, which is not the expected value. Workspaces are not filled, so that what the kernels read
    of one another without a write before is still told.
    """
    make = backward_problem.make_gradients

    def filled(given: Problem, backward: BackwardProblem) -> Gradients:
        made = make(given, backward)
        for one in dataclasses.fields(made):
            tensor = getattr(made, one.name)
            if tensor is not None:
                tensor.fill_(torch.nan)
        return made

    backward_problem.make_gradients = filled
    try:
        yield
    finally:
        backward_problem.make_gradients = make


def problem(device: torch.device) -> tuple[Problem, Tensor, dict[str, Tensor]]:
    """An exact problem and its d_out on the device, and what they must give, on the host."""
    case = exact_case(T, 320, 192, 4, 2, "empty-experts", shared_width=64)
    given = case.inputs
    made = Problem(
        *(given.x, given.topk_experts, given.router_weights.float()),
        *(given.w_gate, given.w_up, given.w_down),
        shared=given.shared,
    )
    return degree_problem.to_device(made, device), case.d_out.to(device), case.expected


def wrong_of(found: dict[str, Tensor], expected: dict[str, Tensor], ranks: int) -> list[str]:
    """Names of gradients with other bits, compared on the host."""
    told = []
    for name, value in found.items():
        wanted, mine = expected[NAMES[name]], value.cpu()
        if name.startswith("d_shared"):
            rows = mine.shape[0] // ranks  # of the others, which have no tokens, zeros
            if bool(mine[:-rows].any()):
                told.append(f"{name} of a rank without tokens")
            mine = mine[-rows:]
        told += backward_degrees.different({name: mine}, {name: wanted})
    return told


def main() -> int:
    """Every degree, kept and computed again, to bf16 and to fp32."""
    device = device_or_exit()
    whole, d_out, expected = problem(device)
    wrong, lacking = [], []
    for degree, tokens in DEGREES.items():
        parts = degree_problem.split(whole, tokens)
        d_outs = list(d_out.split(list(tokens)))
        ranks = backward_degrees.open_ranks(degree, parts, SEGMENTS, timeouts=TIMEOUTS)
        kept = backward_degrees.forward(ranks, parts)
        for given, dtype in ((kept, torch.bfloat16), ([None] * len(parts), torch.float32)):
            with filled_gradients():  # looked up in its module by every launch
                found = backward_degrees.backward(ranks, parts, d_outs, given, dtype=dtype)
            ranks.wait()
            told = wrong_of(backward_degrees.joined(found), expected, len(parts))
            wrong += [f"degree {degree}, {dtype}: {name}" for name in told]
        facts = backward_degrees.facts_of(ranks.workspaces, tokens)
        if not (facts.wraps and facts.parts and facts.empty_experts):
            lacking.append(f"degree {degree} ran without what it is made for: {facts}")
    for text in (*wrong, *lacking):
        click.echo(f"wrong: {text}")
    click.echo("backwards are right" if not wrong and not lacking else "backwards are wrong")
    return 1 if wrong or lacking else 0


if __name__ == "__main__":
    sys.exit(main())
