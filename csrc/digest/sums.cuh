// Keys of words, and the sums of a thread over a run of words with its table in registers.
#pragma once

#include "digest/parts.cuh"

__device__ __forceinline__ u64 splitmix64(u64 seed, u64 n) {
  u64 z = (n + 1) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ u32 key(u64 entry, u64 multiplier) {
  const u32 t0 = (u32)entry, t1 = (u32)(entry >> 32);
  const u32 b0 = (u32)multiplier, b1 = (u32)(multiplier >> 32);
  return __umulhi(t0, b0) + t1 * b0 + t0 * b1;
}

__device__ __forceinline__ void load_table(u64 (&table)[WORDS + 3], u64 seed, u64 first) {
#pragma unroll
  for (int j = 0; j < WORDS + 3; ++j) table[j] = splitmix64(seed, first + j);
}

// Sums of one thread over whole runs.
#if SHARED_PRODUCTS
// For two words m, n and lanes l, l + 1 with keys K0, K1, K2 in a row:
//   K0 m + K1 n = (K0 - K1) m + K1 (m + n),   K1 m + K2 n = K1 (m + n) - (K1 - K2) n
// Three products instead of four, and products are what this kernel is bound by. Differences and
// sums need a 33rd bit: it is added to the upper half, where it costs one addition. `zero` is 0,
// which the compiler does not know: it gives sums of three to the adders, and those of two to the
// busy multipliers.
struct Sums {
  u64 own[4] = {0, 0, 0, 0};  // of (K_l - K_(l+1)) times the word of the lane's parity
  u64 both[2] = {0, 0};       // shared by lanes 0 and 1, and by 2 and 3
  u32 own_high[4] = {0, 0, 0, 0};
  u32 both_high[2] = {0, 0};
};

__device__ __forceinline__ void add_words(Sums &sums, const u64 (&table)[WORDS + 3],
                                          u64 multiplier, const u32 (&words)[WORDS], u32 zero) {
  u32 k0 = key(table[0], multiplier), k1 = key(table[1], multiplier);
  u32 k2 = key(table[2], multiplier);
  u32 d0 = k0 - k1 + zero, d1 = k1 - k2 + zero;
  bool below0 = k0 < k1, below1 = k1 < k2;
#pragma unroll
  for (int j = 0; j < WORDS; j += 2) {
    const u32 m = words[j], n = words[j + 1], s = m + n + zero;
    const u32 k3 = key(table[j + 3], multiplier);
    const u32 k4 = key(table[j + 4 < WORDS + 3 ? j + 4 : WORDS + 2], multiplier);
    const u32 d2 = k2 - k3 + zero, d3 = k3 - k4 + zero;
    const bool below2 = k2 < k3, below3 = k3 < k4;
    sums.both[0] += (u64)k1 * s;
    sums.both[1] += (u64)k3 * s;
    if (s < m) sums.both_high[0] += k1, sums.both_high[1] += k3;
    sums.own[0] += (u64)d0 * m;
    sums.own[1] += (u64)d1 * n;
    sums.own[2] += (u64)d2 * m;
    sums.own[3] += (u64)d3 * n;
    if (below0) sums.own_high[0] += m;
    if (below1) sums.own_high[1] += n;
    if (below2) sums.own_high[2] += m;
    if (below3) sums.own_high[3] += n;
    k1 = k3, k2 = k4, d0 = d2, d1 = d3, below0 = below2, below1 = below3;
  }
}

__device__ __forceinline__ void fold(u64 (&lanes)[4], const Sums &sums) {
  u64 own[4], both[2];
#pragma unroll
  for (int l = 0; l < 4; ++l) own[l] = sums.own[l] - ((u64)sums.own_high[l] << 32);
#pragma unroll
  for (int p = 0; p < 2; ++p) both[p] = sums.both[p] + ((u64)sums.both_high[p] << 32);
  lanes[0] += both[0] + own[0], lanes[1] += both[0] - own[1];
  lanes[2] += both[1] + own[2], lanes[3] += both[1] - own[3];
}
#else
struct Sums {
  u64 lane[4] = {0, 0, 0, 0};
};

__device__ __forceinline__ void add_words(Sums &sums, const u64 (&table)[WORDS + 3],
                                          u64 multiplier, const u32 (&words)[WORDS], u32 zero) {
  u32 keys[4];
  keys[0] = key(table[0], multiplier);
  keys[1] = key(table[1], multiplier);
  keys[2] = key(table[2], multiplier);
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    keys[(j + 3) & 3] = key(table[j + 3], multiplier);
#pragma unroll
    for (int l = 0; l < 4; ++l) sums.lane[l] += (u64)keys[(j + l) & 3] * words[j];
  }
}

__device__ __forceinline__ void fold(u64 (&lanes)[4], const Sums &sums) {
#pragma unroll
  for (int l = 0; l < 4; ++l) lanes[l] += sums.lane[l];
}
#endif
