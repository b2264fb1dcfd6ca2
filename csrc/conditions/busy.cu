// A busy stream: keeps a share of the device at work until the host lets go or its time is over.
// WORK 0: memory bandwidth. WORK 1: FMA units. WORK 2: tensor cores.
//
// Few registers and no shared memory, so that other kernels find room beside it.
// grid: any, block 256. record, stopped, timeout, buffer, vectors: as for `hold`; without WORK 0 the
// buffer gets one word, and only if a sum comes out as it cannot.

#include "conditions/load.cuh"

#ifndef WORK
#error "define WORK as 0 (memory), 1 (FMA) or 2 (tensor cores)"
#endif

#if WORK == 1
static __device__ __forceinline__ float calculate(float seed) {
  float a[8];
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] = seed + i;
#pragma unroll 8
  for (int round = 0; round < 512; round++) {
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = __fmaf_rn(a[i], 0.9990234375f, 0.25f);
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) total += a[i];
  return total;
}
#elif WORK == 2
static __device__ __forceinline__ float calculate(float seed) {
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 16; i++) c[i / 4][i % 4] = seed;
  // bf16 pairs near one with random low bits: zeros would draw less power than real work
  const unsigned a = 0x3F803F80u ^ (threadIdx.x * 0x00010007u & 0x007F007Fu);
  const unsigned b = 0x3F803F80u ^ (threadIdx.x * 0x00050003u & 0x007F007Fu);
#pragma unroll 4
  for (int round = 0; round < 256; round++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
          "{%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"
          : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
          : "r"(a), "r"(b));
    }
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) total += c[i / 4][i % 4];
  return total;
}
#endif

extern "C" __global__ void __launch_bounds__(256)
    busy(u64* record, unsigned* stopped, u64 timeout, uint4* buffer, u64 vectors) {
  Progress progress = start_load(record);
#if WORK == 0
  u64 cursor = (u64)blockIdx.x * blockDim.x + threadIdx.x;
#endif
  do {
#if WORK == 0
    hammer(buffer, vectors, cursor, 16);
#else
    const float total = calculate((float)(threadIdx.x + 1) + (float)progress.steps);
    if (total < 0.0f) buffer[0].x = __float_as_uint(total);  // never; keeps the work from going
#endif
  } while (!step_load(progress, record, stopped, timeout));
}
