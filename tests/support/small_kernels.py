"""Small CUDA sources for tests, and a folder of them in place of csrc."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mok import kernel_sources

SCALE = """
#include "parts/scale.cuh"
extern "C" __global__ void __launch_bounds__(64)
scale(float *out, const float *in, unsigned count) {
  __shared__ float held[64];
  held[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < count) out[threadIdx.x] = scaled(held[(threadIdx.x + 1) % 64]) / FACTOR;
}
"""
SCALE_HEADER = "__device__ inline float scaled(float value) { return 3.0f * value; }\n"

# 64 values live at once with 32 registers a thread.
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2)
spill(float *out, const float *in, unsigned rounds) {
  float held[64];
#pragma unroll
  for (unsigned at = 0; at < 64; ++at) held[at] = in[at * 1024 + threadIdx.x];
  for (unsigned round = 0; round < rounds; ++round) {
#pragma unroll
    for (unsigned at = 0; at < 64; ++at) held[at] = held[at] * held[(at * 7 + 1) % 64] + 1.0f;
  }
#pragma unroll
  for (unsigned at = 0; at < 64; ++at) out[at * 1024 + threadIdx.x] = held[at];
}
"""

# Without a launch bound ptxas does not know how many registers a thread has: C7508.
IGNORED_REGISTERS = """
extern "C" __global__ void ignored(float *out) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  out[threadIdx.x] = 1.0f;
}
"""

# An accumulator is changed while products are in flight, so ptxas makes them wait for each other.
SERIALISED = """
extern "C" __global__ void __launch_bounds__(128)
serialised(float *out, unsigned long long a, unsigned long long b, int rounds) {
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int round = 0; round < rounds; ++round) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, "
        "0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a + round), "l"(b));
    d[0] += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def plant_sources(
    monkeypatch: pytest.MonkeyPatch, folder: Path, sources: Mapping[str, str]
) -> Path:
    """Writes `sources` (path to text) into `folder` and makes it the root of CUDA sources."""
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(kernel_sources, "source_root", lambda: folder)
    return folder
