"""A grouped GEMM by itself: what peers' matrix products reach without anything around them.

Such rows say how much of a layer's time is not matrix products. They are no layers: nothing is
permuted, activated or combined. FLOPs are useful ones; rows of padding are timed and not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupedGemm:
    """run() -> its output, overwritten by the next run where the library writes into a buffer.

    flops: useful floating-point operations of one run. padding: rows that it works on beyond the
    routed ones, as a share of these.
    """

    name: str
    version: str
    run: Callable[[], Tensor]
    flops: int
    padding: float = 0.0
