// The words of CUDA C++ that the kernels use, for a C++20 compiler.
//
// __shared__ becomes thread_local: such variables of a library lie together in one block, which the
// emulator exchanges when another CTA runs, so that each CTA has its own.

#pragma once

#include <cmath>
#include <cstring>

#include "emulator.hpp"

typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ thread_local
#define __grid_constant__
#define __launch_bounds__(...)

#define threadIdx (emu::where->thread)
#define blockIdx (emu::where->block)
#define gridDim (emu::where->grid)

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

static inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
static inline u32 min(int a, u32 b) { return min((u32)a, b); }
static inline u32 min(u32 a, int b) { return min(a, (u32)b); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
static inline u32 max(int a, u32 b) { return max((u32)a, b); }
static inline u32 max(u32 a, int b) { return max(a, (u32)b); }
static inline int max(int a, int b) { return a > b ? a : b; }

static inline void __syncthreads() { emu::bar_sync(0, 0); }
static inline void require_full(u32 mask) {
  if (mask != ~0u) emu::fail("a warp operation with mask %08x; known are full warps", mask);
}
static inline void __syncwarp(u32 mask = ~0u) { require_full(mask), emu::sync_warp(); }
static inline u32 __shfl_sync(u32 mask, u32 v, int lane) {
  return require_full(mask), emu::shuffle(v, lane & 31);
}
static inline u64 __shfl_sync(u32 mask, u64 v, int lane) {
  return require_full(mask), emu::shuffle64(v, lane & 31);
}
static inline float __shfl_sync(u32 mask, float v, int lane) {
  return __builtin_bit_cast(float, __shfl_sync(mask, __builtin_bit_cast(u32, v), lane));
}
static inline u32 __shfl_up_sync(u32 mask, u32 v, u32 distance) {
  return require_full(mask), emu::shuffle_up(v, distance);
}
static inline u32 __shfl_xor_sync(u32 mask, u32 v, u32 bits) {
  return require_full(mask), emu::shuffle(v, emu::lane() ^ bits);
}
static inline float __shfl_xor_sync(u32 mask, float v, u32 bits) {
  return __builtin_bit_cast(float, __shfl_xor_sync(mask, __builtin_bit_cast(u32, v), bits));
}
static inline u32 __ballot_sync(u32 mask, bool v) { return require_full(mask), emu::ballot(v); }
static inline bool __any_sync(u32 mask, bool v) { return __ballot_sync(mask, v) != 0; }
static inline int __popc(u32 v) { return __builtin_popcount(v); }

template <class F> static inline u32 atomic_word(u32 *p, F next) {
  emu::maybe_yield(8);
  const u32 old = *p;
  *p = next(old);
  emu::changed(p);
  return old;
}
static inline u32 atomicAdd(u32 *p, u32 v) {
  return atomic_word(p, [v](u32 old) { return old + v; });
}
static inline u32 atomicOr(u32 *p, u32 v) {
  return atomic_word(p, [v](u32 old) { return old | v; });
}
static inline u32 atomicExch(u32 *p, u32 v) {
  return atomic_word(p, [v](u32) { return v; });
}
static inline u32 atomicInc(u32 *p, u32 most) {
  return atomic_word(p, [most](u32 old) { return old >= most ? 0 : old + 1; });
}
static inline void __threadfence() { emu::maybe_yield(8); }
static inline void __threadfence_system() { emu::maybe_yield(8); }

static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }  // compiled without contraction
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __uint_as_float(u32 v) { return __builtin_bit_cast(float, v); }
static inline u32 __float_as_uint(float v) { return __builtin_bit_cast(u32, v); }
