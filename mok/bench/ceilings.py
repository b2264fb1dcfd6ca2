"""What the device can do at best, measured in the same rotation as the layers.

Why in the rotation: a card at its power cap runs cuBLAS at 800 TFLOP/s in a burst and at 600
sustained, so a ceiling from another run says little. Random data; cuBLAS 8192^3, one dense GEMM as
large as the layer's gate and up projections, the sum of a buffer as int64 (read speed), and for
one rank with two devices a copy to the next one; with several ranks the next device is itself being
timed, and a copy would slow down what runs there. Refuses to compare a CPU with these: there the
sizes are small and only exercise the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mok.bench.shapes import Shape

_SIDE = {"cuda": 8192, "cpu": 128}
_BYTES = {"cuda": 2 * 10**9, "cpu": 10**6}
_COPY_BYTES = 2**28


@dataclass(frozen=True)
class Ceiling:
    """One upper bound. amount: operations or bytes of a call; unit: of amount / seconds / 1e12."""

    name: str
    call: Callable[[], object]
    amount: int
    unit: str


def ceilings(shape: Shape, weight: torch.Tensor, ranks: int = 1, seed: int = 4321) -> list[Ceiling]:
    """The ceilings beside a shape. weight: one expert's [2I, H] bf16, whose device they use; ranks:
    how many are timed at once, each on a device of its own."""
    device = weight.device
    generator = torch.Generator(device).manual_seed(seed)
    side, size = _SIDE[device.type], _BYTES[device.type]

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, dtype=torch.bfloat16, device=device, generator=generator)

    left, right = normal(side, side), normal(side, side)
    rows = normal(shape.T * shape.K, shape.H)
    buffer = torch.randint(-(2**62), 2**62, (size // 8,), device=device, generator=generator)
    found = [
        Ceiling(f"GEMM {side}^3", lambda: left @ right, 2 * side**3, "TFLOP/s"),
        Ceiling(
            "GEMM gate-up size",
            lambda: rows @ weight.t(),
            2 * rows.numel() * weight.shape[0],
            "TFLOP/s",
        ),
        Ceiling("read (int64 sum)", buffer.sum, buffer.numel() * 8, "TB/s"),
    ]
    if _next_is_idle(device.type, ranks, torch.cuda.device_count()):
        found.append(_peer_copy(device))
    return found


def _next_is_idle(kind: str, ranks: int, devices: int) -> bool:
    return kind == "cuda" and ranks == 1 and devices > 1


def _peer_copy(device: torch.device) -> Ceiling:
    here = torch.cuda.current_device() if device.index is None else device.index
    there = torch.device("cuda", (here + 1) % torch.cuda.device_count())
    source = torch.randint(-(2**62), 2**62, (_COPY_BYTES // 8,), device=device)
    target = torch.empty_like(source, device=there)

    def copy() -> object:
        return target.copy_(source, non_blocking=True)

    return Ceiling(f"copy to {there}", copy, _COPY_BYTES, "TB/s")
