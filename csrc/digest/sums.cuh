// Keys of words, and the sums of a thread over neighbouring words.
#pragma once

#include "digest/parts.cuh"

__device__ __forceinline__ u64 splitmix64(u64 seed, u64 n) {
  u64 z = (n + 1) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ u64 multiplier_of(const Seeds &seeds, u64 block) {
  return splitmix64(seeds.block, block) | 1;
}

__device__ __forceinline__ u32 key(u64 entry, u64 multiplier) {
  const u32 t0 = (u32)entry, t1 = (u32)(entry >> 32);
  const u32 b0 = (u32)multiplier, b1 = (u32)(multiplier >> 32);
  return __umulhi(t0, b0) + t1 * b0 + t0 * b1;
}

// Adds a run of N words. A key serves lane l of the word l places before its own, so a run needs
// three keys more than it has words.
template <int N>
__device__ __forceinline__ void add_run(u64 (&lanes)[4], const u64 (&table)[N + 3], u64 multiplier,
                                        const u32 (&words)[N]) {
  u32 keys[4];
#pragma unroll
  for (int j = 0; j < 3; ++j) keys[j] = key(table[j], multiplier);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    keys[(j + 3) & 3] = key(table[j + 3], multiplier);
#pragma unroll
    for (int l = 0; l < 4; ++l) lanes[l] += (u64)keys[(j + l) & 3] * words[j];
  }
}
