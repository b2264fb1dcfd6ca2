"""The Hopper forward, small, for compute-sanitizer: one rank, and two that share a launch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python ci/gpu/sanitize_forward.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --error-exitcode 9 \\
        python ci/gpu/sanitize_forward.py

Without torch's cache every tensor is an allocation of its own, so that a read beyond one is seen.
Rings begin anew, widths end inside of tiles, a rank has no tokens, and a second launch follows
under the same workspaces. No racecheck: it sees neither wgmma nor copies of the tensor memory
accelerator, nor anything between CTAs. Results are exact, and compared bit for bit on the host.
Exit code 0 when all are right, 1 when one is not, 3 without a device for the kernel.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # before torch: no pools

import click
import degree_problem  # all three beside this file
import degrees
import torch
from one_gpu import device_or_exit
from torch import Tensor

from mok.exact import exact_case
from mok.hopper.forward import launch
from mok.hopper.layout import Segments, saved_rows
from mok.hopper.local_group import launch_local_group
from mok.hopper.packing import Problem
from mok.hopper.workspace import Timeouts

TIMEOUTS = Timeouts(500.0, 500.0)  # seconds: a tool slows a launch down a hundredfold
SEGMENTS = Segments(1, 1)
DEGREES = {0: (200,), 2: (0, 200)}
"""By degree, tokens of each rank; 0: one rank alone."""


def problem(device: torch.device) -> tuple[Problem, Tensor]:
    """An exact problem on the device, and the out that it must give, on the host."""
    case = exact_case(200, 320, 192, 4, 2, "skewed", shared_width=64)
    given = case.inputs
    made = Problem(
        *(given.x, given.topk_experts, given.router_weights.float()),
        *(given.w_gate, given.w_up, given.w_down, given.shared),
    )
    return degree_problem.to_device(made, device), case.expected["out"].bfloat16()


def main() -> int:
    """Every degree, with and without what a backward needs, twice each."""
    device = device_or_exit()
    whole, wanted = problem(device)
    wrong = []
    for degree, tokens in DEGREES.items():
        parts = degree_problem.split(whole, tokens)
        sizes = degree_problem.sizes_of(parts)
        ranks = degrees.open_ranks(degree, sizes, device, SEGMENTS, timeouts=TIMEOUTS)
        for save in (False, True):
            if degree:
                found = launch_local_group(ranks.workspaces, parts, save=save)
            else:
                rows = saved_rows(tokens[0], sizes) if save else None
                found = [launch(ranks.workspaces[0], parts[0], saved=rows)]
            ranks.wait()
            out = torch.cat([one.out.cpu() for one in found])
            if not torch.equal(degrees.bits(out), degrees.bits(wanted)):
                wrong.append(f"degree {degree}{', saving' if save else ''}")
    click.echo(f"wrong: {', '.join(wrong)}" if wrong else "forwards are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
