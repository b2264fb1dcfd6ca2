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

// Adds what N neighbouring keys contribute. A key serves the lanes 0 .. 3 with the word at its own
// place and the three words before it, so words[0] lies three places before table[0]. Multiplying
// is what this kernel is bound by: 3 for a key and 4 for the lanes.
template <int N>
__device__ __forceinline__ void add_words(u64 (&lanes)[4], const u64 (&table)[N], u64 multiplier,
                                          const u32 (&words)[N + 3]) {
#pragma unroll
  for (int p = 0; p < N; ++p) {
    const u32 k = key(table[p], multiplier);
#pragma unroll
    for (int l = 0; l < 4; ++l) lanes[l] += (u64)k * words[p + 3 - l];
  }
}
