"""Faults of CUDA kernels, each caught by the condition that provokes it; they need a CUDA device.

What calls a kernel stands in `gpu_kernels`. A fault promises the claim that must find it and, where
it keeps still before and after, `repeat`; a twin promises all that is particular to a GPU as well.
On a machine without CUDA they are listed as not run, and never as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from verify.cases import CLAIMS, ON_CUDA
from verify.controls import gpu_kernels as kernels
from verify.controls.planting import Control, cases_of, plant
from verify.inputs import normal

CAPACITY, COUNT, COLUMNS = 1024, 1000, 256
MANY_RUNS = 700  # executions until a fault that shows in one of 30 of them is surely seen

ROWS = {"x": normal(CAPACITY, COLUMNS)}
UNEVEN = {"x": normal(COUNT, COLUMNS)}
BIAS = {"x": normal(2048, COLUMNS), "bias": normal(COLUMNS, requires_grad=True)}
FACTORS = {"a": normal(128, 2048), "b": normal(2048, 128)}
PARTS = {"values": normal(512, kernels.TILE)}
FLAT = {"x": normal(1 << 16)}
LEARNED = {"x": normal(1 << 16, requires_grad=True)}


def atomic_bias_gradient(x: Tensor, bias: Tensor) -> Tensor:
    """Adds up the gradient of a bias by fp32 atomics, in order of arrival."""
    return kernels.add_bias(x, bias, fault=True)


def tree_bias_gradient(x: Tensor, bias: Tensor) -> Tensor:
    """Adds it up by a fixed tree."""
    return kernels.add_bias(x, bias, fault=False)


def splits_by_arrival(a: Tensor, b: Tensor) -> Tensor:
    """Adds the parts of a product split along K in the order in which they were finished."""
    return kernels.split_product(a, b, fault=True)


def splits_in_order(a: Tensor, b: Tensor) -> Tensor:
    """Adds them in the order of the splits."""
    return kernels.split_product(a, b, fault=False)


def ahead_of_barrier(values: Tensor) -> Tensor:
    """On one branch, reads a tile that another warp fills without waiting for it."""
    return kernels.hand_over(values, fault=True)


def behind_barrier(values: Tensor) -> Tensor:
    """Waits at the barrier on every branch."""
    return kernels.hand_over(values, fault=False)


def sums_unwritten_padding(x: Tensor) -> Tensor:
    """Sums rows of a workspace that nobody wrote."""
    return kernels.padded_sums(x, count=COUNT, fault=True)


def sums_zero_padding(x: Tensor) -> Tensor:
    """Sums rows of zeros there."""
    return kernels.padded_sums(x, count=COUNT, fault=False)


def whole_tiles_only(x: Tensor) -> Tensor:
    """Leaves the rows after the last whole tile unwritten."""
    return kernels.scaled_tiles(x, fault=True)


def every_row(x: Tensor) -> Tensor:
    """Writes the last, smaller tile as well."""
    return kernels.scaled_tiles(x, fault=False)


def partial_per_block(x: Tensor, num_sms: int | None = None) -> Tensor:
    """Adds up one partial sum for every multiprocessor."""
    return kernels.grid_sums(x, num_sms=num_sms, fault=True)


def partial_per_chunk(x: Tensor, num_sms: int | None = None) -> Tensor:
    """Adds up as many partial sums on whatever number of multiprocessors."""
    return kernels.grid_sums(x, num_sms=num_sms, fault=False)


def partial_per_reachable(x: Tensor) -> Tensor:
    """Adds up one partial sum for every multiprocessor that the current stream reaches."""
    return kernels.grid_sums(x, num_sms=kernels.reachable_multiprocessors(x.device), fault=True)


def chunk_per_reachable(x: Tensor) -> Tensor:
    """Adds up as many partial sums whatever the stream reaches."""
    return kernels.grid_sums(x, num_sms=kernels.reachable_multiprocessors(x.device), fault=False)


def counting_calls(*, fault: bool) -> Callable[[Tensor], Tensor]:
    """The sum by the last block, which the fault knows by the number of the call."""
    calls = kernels.Calls()

    def execute(x: Tensor) -> Tensor:
        """Lets the block add up that is the last one of this call."""
        return kernels.last_block_sums(x, calls, fault=fault)

    return execute


def on_default_stream(x: Tensor) -> Tensor:
    """Launches its second kernel on the default stream, whatever stream it is called on."""
    return kernels.doubled_plus_one(x, fault=True)


def on_current_stream(x: Tensor) -> Tensor:
    """Launches both on the current stream."""
    return kernels.doubled_plus_one(x, fault=False)


def backward_on_default_stream(x: Tensor) -> Tensor:
    """Launches the kernel of its gradient on the default stream, whatever backward is on."""
    return kernels.doubled(x, fault=True)


def backward_on_current_stream(x: Tensor) -> Tensor:
    """Launches it on the stream that backward is on."""
    return kernels.doubled(x, fault=False)


def _planted(
    name: str,
    faulty: Callable[..., Any],
    clean: Callable[..., Any],
    inputs: Mapping[str, Any],
    claim: str,
    *,
    also: Sequence[str] = (),
    runs: Mapping[str, int] | None = None,
    **options: Any,
) -> Control:
    wanted = (*ON_CUDA, "repeat", "memory", "contention", "history", claim)
    return plant(
        name,
        faulty,
        clean,
        claim=claim,
        reason="bits-differ",
        also=also,
        twin={"claims": tuple(c for c in CLAIMS if c in wanted)},
        runs=runs,
        needs="cuda",
        inputs=inputs,
        device="cuda",
        **options,
    )


CONTROLS = (
    _planted("gpu/atomic-sum", atomic_bias_gradient, tree_bias_gradient, BIAS, "repeat"),
    _planted("gpu/split-k", splits_by_arrival, splits_in_order, FACTORS, "repeat"),
    _planted(
        "gpu/missing-barrier",
        ahead_of_barrier,
        behind_barrier,
        PARTS,
        "contention",
        also=("repeat",),
        runs={"contention": MANY_RUNS},
    ),
    _planted("gpu/unwritten-padding", sums_unwritten_padding, sums_zero_padding, ROWS, "memory"),
    _planted("gpu/unwritten-tail", whole_tiles_only, every_row, UNEVEN, "memory"),
    _planted(
        "gpu/sm-count",
        partial_per_block,
        partial_per_chunk,
        ROWS,
        "vary",
        also=("repeat",),
        vary={"num_sms": (40, 7)},
    ),
    _planted(
        "condition/sms",
        partial_per_reachable,
        chunk_per_reachable,
        ROWS,
        "sms",
        also=("repeat",),
    ),
    _planted(
        "condition/graph",
        counting_calls(fault=True),
        counting_calls(fault=False),
        ROWS,
        "graph",
    ),
    _planted(
        "condition/stream",
        on_default_stream,
        on_current_stream,
        FLAT,
        "stream",
        also=("repeat",),
    ),
    _planted(
        "gpu/backward-stream",
        backward_on_default_stream,
        backward_on_current_stream,
        LEARNED,
        "stream",
        also=("repeat",),
    ),
)
CASES = cases_of(CONTROLS)
