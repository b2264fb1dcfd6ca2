// csrc/transposed.cuh for the emulator: the same functions, by calls of it. Found first on the
// include path.

#pragma once

#include "ptx.cuh"

INLINE u64 operand_columns(u32 address) {
  return ((address & 0x3ffff) >> 4) | (512ull << 16) | (64ull << 32) | (1ull << 62);
}
template <int TRANS_A, int TRANS_B>
INLINE void wgmma_64x256x16(float (&d)[128], u64 a, u64 b, int accumulate) {
  emu::wgmma(d, a, b, accumulate != 0, TRANS_A != 0, TRANS_B != 0);
}
INLINE void load_matrices(u32 from, u32 &a, u32 &b, u32 &c, u32 &d) {
  u32 words[4];
  emu::load_matrices(from, words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
INLINE void tma_store_3d(const void *map, u32 from, int x, int y, int z) {
  emu::tma_store(3, map, from, x, y, z);
}
INLINE float load_relaxed_float(const float *p) {
  float v;
  emu::read_global(p, &v, 4);
  return v;
}
