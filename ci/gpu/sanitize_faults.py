"""Runs every clean twin of the planted faults once, small, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python ci/gpu/sanitize_faults.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python ci/gpu/sanitize_faults.py
    compute-sanitizer --tool initcheck --error-exitcode 9 python ci/gpu/sanitize_faults.py

All tensors are made on the host and copied, each in an allocation of its own, so that what a tool
sees are these kernels and torch's copies and fills. `--faults` runs the faults instead, to see
which tool reports which: racecheck the missing barrier (shared memory is all that it watches),
initcheck the unwritten padding, and the unwritten tail when it is copied back; no tool reports
sums whose order or split varies, a number baked into a graph, or a kernel on another stream.
Exit code 0 when all results are right (twins), 3 without a CUDA device.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # before torch: no pools

import click
import torch
from torch import Tensor

from verify.controls import gpu_kernels as kernels
from verify.inputs import generate

COLUMNS, ROWS, COUNT = 32, 128, 100


def main() -> int:
    if not torch.cuda.is_available():
        click.echo("nothing ran: needs a CUDA device", err=True)
        return 3
    fault = "--faults" in sys.argv[1:]
    x = generate("x", (ROWS, COLUMNS))
    uneven = x[:COUNT].contiguous()
    a, b = generate("a", (32, 512)), generate("b", (512, 32))
    parts = generate("parts", (8, kernels.TILE))
    sums = x.double().sum(0)
    found = {
        "column sums": (kernels.column_sums(x.cuda(), fault=fault), sums),
        "split K": (
            kernels.split_product(a.cuda(), b.cuda(), fault=fault),
            a.double() @ b.double(),
        ),
        "handover": (
            kernels.hand_over(parts.cuda(), fault=fault, odds=0, blocks=6),
            kernels.handed_over(parts, 6).double(),
        ),
        "padding": (
            kernels.padded_sums(x.cuda(), count=COUNT, fault=fault),
            uneven.double().sum(0),
        ),
        "tail": (kernels.scaled_tiles(uneven.cuda(), fault=fault), 1.5 * uneven.double() + 0.25),
        "grid sums": (kernels.grid_sums(x.cuda(), num_sms=5, fault=fault), sums),
        "last block": (kernels.last_block_sums(x.cuda(), kernels.Calls(), fault=fault), sums),
        "two streams": (
            kernels.doubled_plus_one(x[0].cuda(), fault=fault),
            2 * x[0].double() + 1,
        ),
    }
    torch.cuda.synchronize()
    wrong = [name for name, (got, want) in found.items() if _error(got, want) > 1e-3]
    kind = "faults" if fault else "twins"
    click.echo(f"{kind}: {len(found)} ran, wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong and not fault else 0


def _error(got: Tensor, want: Tensor) -> float:
    error = (got.cpu().double() - want).abs().max()  # on the host: no kernel of torch looks at it
    return float(error) if bool(error == error) else float("inf")


if __name__ == "__main__":
    sys.exit(main())
