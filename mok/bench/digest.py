"""Speed of verify's digest on one core, beside torch.hash_tensor and a plain read.

Protocol: torch.set_num_threads(1) for the run (put back afterwards), one buffer per dtype with the
same bytes, all contenders alternating, medians, GB/s of bytes covered. The plain read is the sum of
the buffer viewed as int64: what one core can read. Refuses to load verify before it is asked to
measure; where a contender cannot take a dtype, its cell says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mok.bench.timing import alternate, machine

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp64": torch.float64,
}


def works(contender: Callable[[], object]) -> bool:
    """Whether it runs at all: torch.hash_tensor does not take every dtype."""
    try:
        contender()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _contenders(tensor: Tensor) -> dict[str, Callable[[], object]]:
    from verify import hashing

    everything: dict[str, Callable[[], object]] = {
        "verify digest": partial(hashing.digest_tensor, tensor),
        "torch.hash_tensor": partial(torch.hash_tensor, tensor),
        "plain read": partial(torch.sum, tensor.view(torch.int64)),
    }
    small = tensor[:1024]
    probes: dict[str, Callable[[], object]] = {
        "verify digest": partial(hashing.digest_tensor, small),
        "torch.hash_tensor": partial(torch.hash_tensor, small),
        "plain read": partial(torch.sum, small.view(torch.int64)),
    }
    return {name: everything[name] for name in everything if works(probes[name])}


def measure(megabytes: int = 256, rounds: int = 5) -> dict[str, object]:
    """GB/s by dtype and contender (None where unsupported), protocol and machine; JSON-ready.

    Raises ImportError when verify.hashing is not there.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = megabytes * 10**6 // 8
        # Odd multiples of the index: no two words are equal, and int32 views cover all patterns.
        words = torch.arange(1, count + 1, dtype=torch.int64) * 0x1E3779B97F4A7C15
        rows: list[dict[str, object]] = []
        for name, dtype in DTYPES.items():
            times = alternate(_contenders(words.view(dtype)), rounds)
            row: dict[str, object] = {"dtype": name}
            for contender in ("verify digest", "torch.hash_tensor", "plain read"):
                row[contender] = (
                    count * 8 / times[contender].median / 1e9 if contender in times else None
                )
            rows.append(row)
        measured = sum(row["verify digest"] is not None for row in rows)
        return {
            "measured": measured,
            "unit": "GB/s",
            "protocol": f"{megabytes} MB, one thread, alternating, median of {rounds} rounds "
            "after 1 warm-up",
            "rows": rows,
            "machine": machine(),
        }
    finally:
        torch.set_num_threads(threads)
