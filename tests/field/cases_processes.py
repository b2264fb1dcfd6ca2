"""Reports of results that differ between processes, or that a first call changes for the process.

The last cases switch the whole process to flushing subnormal numbers; the order of the file is the
order of execution, so they spoil no other.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import verify

X = {"x": verify.normal(64, 96)}


def block_of_this_process() -> int:
    """Stands for a choice by timing: fixed in a process, another one in some others."""
    seed = os.environ.get("PYTHONHASHSEED", "0")  # counts up over fresh processes
    return 32 if seed.isdigit() and int(seed) % 2 else 12


def sum_by_blocks(x: Tensor, block: int) -> Tensor:
    """Each block in order, then the blocks in order."""
    total = torch.zeros(x.shape[0])
    for start in range(0, x.shape[1], block):
        part = torch.zeros(x.shape[0])
        for column in range(start, start + block):
            part = part + x[:, column]
        total = total + part
    return total


@verify.case(inputs=X, claims=("repeat", "process"))
def bug_03(x: Tensor) -> dict[str, Tensor]:
    """The tile size is tuned by timing, once per process; each has its order of summation."""
    return {"out": sum_by_blocks(x, block_of_this_process()), "double": 2 * x}


@verify.case(inputs=X, claims=("repeat", "process"))
def bug_03_twin(x: Tensor) -> dict[str, Tensor]:
    """The tile size is pinned."""
    return {"out": sum_by_blocks(x, 32), "double": 2 * x}


NAMES = ("wq", "wk", "wv", "wo", "router", "gate", "up", "down")


def drawn(names: list[str], x: Tensor) -> dict[str, Tensor]:
    """One weight for each name, drawn in this order from one seed."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(16, generator=generator) * x for name in names}


@verify.case(inputs={"x": verify.normal(16)}, claims=("repeat", "process"))
def bug_07(x: Tensor) -> dict[str, Tensor]:
    """The order of a set of strings decides which name gets which draws."""
    return drawn(list(set(NAMES) & {*NAMES, "bias"}), x)


@verify.case(inputs={"x": verify.normal(16)}, claims=("repeat", "process"))
def bug_07_twin(x: Tensor) -> dict[str, Tensor]:
    """The same set, sorted."""
    return drawn(sorted(set(NAMES) & {*NAMES, "bias"}), x)


class Library:
    """Code that imports something when it is called first; a fast-math build sets the mode."""

    def __init__(self, *, fast_math: bool) -> None:
        self.fast_math, self.loaded = fast_math, False

    def load(self) -> None:
        if not self.loaded and self.fast_math:
            torch.set_flush_denormal(True)
        self.loaded = True


TINY = {"x": verify.normal(64, 4)}


def scaled(x: Tensor, library: Library) -> dict[str, Tensor]:
    """A product of subnormal size, then the import for the rest of the work."""
    out = {"tiny": x * 1e-40, "plain": x * 0.5}
    library.load()
    return out


@verify.case(inputs=TINY, setup=lambda: {"library": Library(fast_math=False)}, claims=("repeat",))
def flush_twin(x: Tensor, library: Library) -> dict[str, Tensor]:
    """The library is built without fast-math."""
    return scaled(x, library)


@verify.case(inputs=TINY, setup=lambda: {"library": Library(fast_math=True)}, claims=("repeat",))
def flush(x: Tensor, library: Library) -> dict[str, Tensor]:
    """An import turns on flush-to-zero for the whole process."""
    return scaled(x, library)
