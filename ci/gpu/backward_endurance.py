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

from collections.abc import Sequence
from typing import Any

import endurance  # beside this file
import torch
from torch import Tensor

from mok.bench.layer_inputs import make_inputs
from mok.bench.shapes import Shape
from mok.errors import UnsupportedError
from mok.hopper.support import BACKWARD_VARIABLE, backward_wanted

BACKWARDS = {"small": 5000, endurance.MEDIUM: 5000, "kimi-shard": 200}
GRADIENTS = ("d_x", "d_router", "d_gate", "d_up", "d_down")


class Backward(endurance.Recorded):
    """The backward of one shape."""

    names = GRADIENTS

    def __init__(self, shape: Shape, device: torch.device, room: int) -> None:
        from mok.config import MoKConfig
        from mok.operators import moe_backward, moe_forward

        if not backward_wanted():
            raise UnsupportedError(
                f"{BACKWARD_VARIABLE}=0 leaves backwards to the portable backend, which this does "
                "not measure; allowed: 1 or nothing. Unset it."
            )
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


main = endurance.command(endurance.Calls("backwards", BACKWARDS, Backward, passed))

if __name__ == "__main__":
    main()
