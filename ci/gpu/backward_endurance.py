"""Many backwards under load on one GPU, one digest for each gradient: how many there are.

    python ci/gpu/backward_endurance.py --json backward-endurance.json
    python ci/gpu/backward_endurance.py --shape small --backwards 500

10,000 backwards of shapes that take 2 ms or less, and 200 of kimi-shard, in the way of
ci/gpu/endurance.py: a tenth are calls, the rest replays of a CUDA graph; gradients are filled with
NaNs after they were digested; loads are those of verify's `contention`, each beside a whole batch.
Every backward is that of one forward, whose g and u were kept, by the operator that autograd calls.

Exit code 0: one digest for each gradient of each shape, and enough backwards under load. 1: not so.
3: no device for the kernels.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import endurance  # both beside this file
import torch
from one_gpu import device_or_exit
from torch import Tensor

from mok.bench.layer_inputs import make_inputs
from mok.bench.shapes import Shape, parse_shape
from mok.hopper.support import BACKWARD_VARIABLE

BACKWARDS = {"small": 5000, endurance.MEDIUM: 5000, "kimi-shard": 200}
GRADIENTS = ("d_x", "d_router", "d_gate", "d_up", "d_down")


class Backward(endurance.Recorded):
    """The backward of one shape."""

    names = GRADIENTS

    def __init__(self, shape: Shape, device: torch.device, room: int) -> None:
        from mok.config import MoKConfig
        from mok.operators import moe_backward, moe_forward

        given = make_inputs(shape, "gaussian", device)
        gate, up = (half.contiguous() for half in given.w_gate_up.chunk(2, 1))
        self.d_out = given.d_out
        rows = (given.x, given.topk_experts, given.router_weights)
        tensors = (*rows, gate, up, given.w_down, None, None, None)
        minibatch, none = MoKConfig().minibatch_size, (None, "")
        with torch.no_grad():
            kept = moe_forward(*tensors, *none, minibatch, True, 0, "hopper")[1:]

        def backward() -> Sequence[Tensor]:
            with torch.no_grad():
                found = moe_backward(
                    *(given.d_out, *tensors, list(kept), *none, minibatch),
                    *(True, True, 0, "hopper", torch.bfloat16),
                )
            gradients: Sequence[Tensor] = found[: len(GRADIENTS)]
            return gradients

        super().__init__(backward, device, room)


def passed(row: dict[str, Any]) -> bool:
    """As of forwards, and one digest for each gradient."""
    each = row["outputs"]
    return endurance.passed(row) and set(each) == set(GRADIENTS) and set(each.values()) == {1}


def chosen(names: Sequence[str], backwards: int | None) -> list[tuple[Shape, int]]:
    """Shapes, and how many backwards of each; those of BACKWARDS unless told."""
    some = names or tuple(BACKWARDS)
    return [(parse_shape(name), backwards or BACKWARDS.get(name, 1000)) for name in some]


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--shape", "names", multiple=True, metavar="NAME|T=..,E=..,H=..,I=..,K=..")
@click.option("--backwards", type=click.IntRange(1), help="Of each shape.")
def main(path: Path | None, names: tuple[str, ...], backwards: int | None) -> None:
    """Count the distinct digests of many backwards' gradients under load."""
    from mok.errors import InputError

    try:
        wanted = chosen(names, backwards)
    except InputError as error:
        raise click.UsageError(str(error)) from error
    device = device_or_exit()
    os.environ[BACKWARD_VARIABLE] = "1"
    document: dict[str, Any] = {"calls": f"1 of {endurance.CALLS}, the others replays", "rows": []}
    for shape, count in wanted:
        row = endurance.measure(shape, count, device, click.echo, Backward)
        document["rows"].append(row)
        click.echo(f"{shape.name}: {row}")
        if path is not None:  # a run that is cut short keeps what it had
            text = json.dumps(document, indent=1, allow_nan=False)
            path.write_text(f"{text}\n", encoding="utf-8")
    sys.exit(0 if all(map(passed, document["rows"])) else 1)


if __name__ == "__main__":
    main()
