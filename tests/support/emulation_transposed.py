"""One product of the tensor cores by any layout of its operands, on the emulated machine.

It exists so that the machine itself is tested: products of transposed operands, ldmatrix and stores
in three dimensions, by the kernel tests/emulation/kernels/transposed.cpp. Refuses nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import emulation
import torch
from emulation import Emulator, Knobs, Launch, Recorder
from torch import Tensor

from mok.hopper.maps import MapSpec, rows_spec
from mok.hopper.records import TensorMap, tensor_map

_SHARED = 8192 + 32768 + 4 * 2048 + 1024
WRONG_LAYOUT, TOO_EARLY = 1, 2
"""What a job may do wrong: descriptors of A for the other layout; ldmatrix before the data."""


class Job(ctypes.Structure):
    """`Job` of tests/emulation/kernels/transposed.cpp."""

    _fields_ = (
        *((name, TensorMap) for name in ("a", "b", "out")),
        ("product", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("across_a", "across_b", "steps", "wrong")),
        *((name, ctypes.c_int) for name in ("x", "y", "z")),
    )


@dataclass(frozen=True)
class Done:
    """product fp32 [64, 256]; tile bf16 as stored, NaN where nothing was; failure: words or ""."""

    product: Tensor
    tile: Tensor
    failure: str


def multiply(
    emulator: Emulator,
    a: Tensor,
    b: Tensor,
    *,
    across: tuple[bool, bool],
    tile: tuple[int, int, int] = (2, 64, 64),
    at: tuple[int, int, int] = (0, 0, 0),
    wrong: int = 0,
    seed: int = 0,
) -> Done:
    """a bf16 [64, K] times b bf16 [256, K] transposed; across: which lie with K outside.

    The first 64 of K of a, as they lie in memory, also go to tile[z, y.., x..] of `at` (z, y, x).
    """
    given = [
        t.t().contiguous() if far else t.contiguous() for t, far in zip((a, b), across, strict=True)
    ]
    product = torch.full((64, 256), torch.nan)
    out = torch.full(tile, torch.nan, dtype=torch.bfloat16)
    boxes = (64, 64 if across[1] else 256)
    specs = [
        rows_spec(t.data_ptr(), t.shape[0], t.shape[1], box)
        for t, box in zip(given, boxes, strict=True)
    ]
    depth, rows, columns = tile
    strides = (columns * 2, rows * columns * 2)
    specs.append(MapSpec(out.data_ptr(), (columns, rows, depth), strides, (64, 16, 1)))
    job = Job(*(tensor_map(emulation.encode(spec)) for spec in specs), product.data_ptr())
    job.across_a, job.across_b = (int(far) for far in across)
    job.steps, job.wrong = a.shape[1] // 64, wrong
    job.z, job.y, job.x = at
    recorder = Recorder(emulator)
    memory, start = emulation.aligned_copy(job)
    made = Launch(grid_x=1, grid_y=1, block=128, shared=_SHARED, resident=1, ranks_here=1)
    made.kernel, made.one = emulator.kernels["transposed"], start
    recorder.launches.append(made)
    recorder.keep.append(memory)
    regions = [("a", given[0]), ("b", given[1]), ("out", out)]
    failure = emulation.run_launches(recorder, regions, Knobs(seed=seed))
    return Done(product, out, failure)
