"""Searches for a shape and a schedule under which the emulated kernels go wrong.

    python tests/support/emulation_search.py SEED SECONDS

Prints every example that fails, with what was seen, and at the end how many were run.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from emulation import build
from emulation_cases import draw_example, exact, problems_of


def main(seed: int, seconds: float) -> int:
    """Runs random examples; the number of those that failed, at most 5."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    runs = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        emulator = build(Path(folder))
        end = time.monotonic() + seconds
        while time.monotonic() < end and failed < 5:
            example = draw_example(rng)
            found = problems_of(example, emulator)
            runs += 1
            if found:
                failed += 1
                print(f"FAIL {example}", *found[:3], sep="\n  ", flush=True)
            exact.cache_clear()
    print(f"{runs} examples, {failed} failed")
    return failed


if __name__ == "__main__":
    raise SystemExit(min(main(int(sys.argv[1]), float(sys.argv[2])), 1))
