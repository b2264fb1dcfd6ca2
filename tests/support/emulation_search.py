"""Searches for a shape and a schedule under which the emulated kernels go wrong.

    python tests/support/emulation_search.py SEED SECONDS [forward|backward]

Prints every example that fails, with what was seen, and at the end how many were run. backward:
both directions under one workspace.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import emulation
import torch
from emulation import Emulator
from emulation_backward import PARTS
from emulation_backward_cases import draw_backward, exact_backward, problems_of_backward
from emulation_cases import draw_example, exact, problems_of


def run_forward(rng: random.Random, emulator: Emulator) -> tuple[object, list[str]]:
    """One example, and what went wrong."""
    example = draw_example(rng)
    return example, problems_of(example, emulator)


def run_backward(rng: random.Random, emulator: Emulator) -> tuple[object, list[str]]:
    """One example, and what went wrong."""
    example = draw_backward(rng)
    return example, problems_of_backward(example, emulator)


DIRECTIONS: dict[str, tuple[Callable[..., tuple[object, list[str]]], tuple[str, ...]]] = {
    "forward": (run_forward, emulation.FORWARD_PARTS),
    "backward": (run_backward, PARTS),
}


def main(seed: int, seconds: float, direction: str) -> int:
    """Runs random examples; the number of those that failed, at most 5."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    runs = failed = 0
    run, parts = DIRECTIONS[direction]
    with tempfile.TemporaryDirectory() as folder:
        emulator = emulation.build(Path(folder), parts=parts)
        end = time.monotonic() + seconds
        while time.monotonic() < end and failed < 5:
            example, found = run(rng, emulator)
            runs += 1
            if found:
                failed += 1
                print(f"FAIL {example}", *found[:3], sep="\n  ", flush=True)
            exact.cache_clear()
            exact_backward.cache_clear()
    print(f"{runs} examples, {failed} failed")
    return failed


if __name__ == "__main__":
    chosen = sys.argv[3] if len(sys.argv) > 3 else "forward"
    raise SystemExit(min(main(int(sys.argv[1]), float(sys.argv[2]), chosen), 1))
