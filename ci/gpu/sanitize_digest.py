"""The digest kernel for compute-sanitizer (memcheck, racecheck, initcheck): small, every path once.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python ci/gpu/sanitize_digest.py

Without torch's cache every tensor is an allocation of its own, so that a read beyond one is seen.
Exits 1 if a digest is wrong.
"""

from __future__ import annotations

import sys

import torch

from verify.device_digests import DigestPlan
from verify.device_kernel import Tuning
from verify.device_parts import Range, Shard
from verify.device_tiles import tile_digests
from verify.hashing import digest_on_host

TUNINGS = (Tuning(), Tuning(stages=2, striped=True))


def main() -> int:
    raw = torch.arange(70_001, dtype=torch.int64, device="cuda") * 0x1E3779B97F4A7C15
    many = torch.arange(300 * 40, dtype=torch.int32, device="cuda").view(300, 40)
    table = torch.arange(600 * 70, dtype=torch.int64, device="cuda").view(600, 70)
    tensors = {
        "aligned": raw,
        "shifted": raw.view(torch.uint8)[3:],
        "shifted by pieces": raw.view(torch.int32)[1:],
        "end of memory": raw.view(torch.bfloat16)[1:],
        "small": raw[:7],
        "byte": raw.view(torch.uint8)[5],
        "empty": raw[:0],
        "transposed": table.t(),
        "bytes transposed": raw.view(torch.uint8)[1:30_001].view(100, 300).t(),
        "conjugated": raw[:2000].view(torch.complex64).conj(),
        "conjugated, transposed": raw[:4200].view(torch.complex128).view(30, 70).t().conj(),
        "negated": raw[1:2001].view(torch.complex64).conj().imag,
        "shard": many,
        "few rows": many[:10],
        "range": raw.view(torch.int16)[:999],
    }
    layouts = {
        "shard": Shard(1, 3, (300, 50)),
        "few rows": Shard(1, 3, (10, 50)),
        "range": Range(77, (5000,)),
    }
    wrong = []
    for tuning in TUNINGS:
        plan = DigestPlan(tensors, layouts=layouts, tuning=tuning)
        plan.launch()
        for name, found in plan.digests().items():
            if found != digest_on_host(tensors[name], layouts.get(name)):
                wrong.append(f"{name} ({tuning})")
        if tuning.striped:  # which needs 16 tiles of a CTA
            long = raw.repeat(130)
            plan = DigestPlan([long], tuning=tuning)
            plan.launch()
            if plan.digests()["0"] != digest_on_host(long):
                wrong.append(f"long ({tuning})")
    tiles = tile_digests(raw, 1000)
    if tiles.total() != digest_on_host(raw) or tiles.differing(tile_digests(raw.cpu(), 1000)):
        wrong.append("tiles")
    sys.stdout.write(f"wrong: {', '.join(wrong)}\n" if wrong else "digests are right\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
