// csrc/ptx.cuh for the emulator: the same functions, by calls of it. Found first on the include
// path.

#pragma once

#include "device.hpp"

#define INLINE static inline

INLINE u32 shared_address(const void *p) { return emu::shared_address(p); }

INLINE void barrier_init(u32 barrier, u32 arrivals) { emu::barrier_init(barrier, arrivals); }
INLINE void barrier_init_fence() {}
INLINE void barrier_expect(u32 barrier, u32 bytes) { emu::barrier_arrive(barrier, bytes); }
INLINE void barrier_arrive(u32 barrier) { emu::barrier_arrive(barrier, 0); }
INLINE bool barrier_test(u32 barrier, u32 parity) {
  emu::maybe_yield(4);
  return emu::barrier_done(barrier, parity);
}
INLINE void barrier_wait(u32 barrier, u32 parity) { emu::barrier_wait(barrier, parity); }
INLINE void named_barrier(u32 id, u32 threads) { emu::bar_sync(id, threads); }

INLINE void tma_prefetch(const void *map) { (void)map; }
INLINE void tma_acquire_map(const void *map) { (void)map; }
INLINE void tma_load_2d(u32 to, const void *map, u32 barrier, int x, int y) {
  emu::tma_load(2, to, map, barrier, x, y, 0);
}
INLINE void tma_load_3d(u32 to, const void *map, u32 barrier, int x, int y, int z) {
  emu::tma_load(3, to, map, barrier, x, y, z);
}
INLINE void tma_store_2d(const void *map, u32 from, int x, int y) {
  emu::tma_store(2, map, from, x, y, 0);
}
INLINE void tma_store_3d(const void *map, u32 from, int x, int y, int z) {
  emu::tma_store(3, map, from, x, y, z);
}
INLINE void tma_commit() { emu::tma_commit(); }
template <int N> INLINE void tma_wait_read() { emu::tma_wait(N, true); }
template <int N> INLINE void tma_wait() { emu::tma_wait(N, false); }
INLINE void proxy_fence() { emu::proxy_fence(); }
INLINE void proxy_fence_shared() { emu::proxy_fence(); }

INLINE u64 operand(u32 address) {
  return ((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
INLINE void wgmma_fence() {}
INLINE void wgmma_commit() { emu::wgmma_commit(); }
template <int N> INLINE void wgmma_wait() { emu::wgmma_wait(N); }
INLINE u64 operand_columns(u32 address) {
  return ((address & 0x3ffff) >> 4) | (512ull << 16) | (64ull << 32) | (1ull << 62);
}
template <int TRANS_A = 0, int TRANS_B = 0>
INLINE void wgmma_64x256x16(float (&d)[128], u64 a, u64 b, int accumulate) {
  emu::wgmma(d, a, b, accumulate != 0, TRANS_A != 0, TRANS_B != 0);
}
INLINE void settle(float (&d)[128]) { (void)d; }
INLINE void compute_now(u32 &v) { (void)v; }
template <int N> INLINE void registers_raise() {}
template <int N> INLINE void registers_lower() {}

static inline u32 round_bf16(float v) {
  const u32 bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
static inline float flush(float v) {
  return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v;
}
INLINE float exp2_approx(float x) { return flush(std::exp2(flush(x))); }
INLINE float lower_of(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
INLINE float higher_of(float a, float b) { return a != a || b != b ? NAN : a < b ? b : a; }
INLINE float reciprocal_approx(float x) { return flush(1.0f / flush(x)); }
INLINE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
INLINE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  emu::store_matrices(to, {a, b, c, d});
}
INLINE void load_matrices(u32 from, u32 &a, u32 &b, u32 &c, u32 &d) {
  u32 words[4];
  emu::load_matrices(from, words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
INLINE void store_shared_pair(u32 to, float low, float high) {
  const float pair[2] = {low, high};
  emu::write_shared(to, pair, 8);
}
INLINE uint4 load_shared(u32 from) {
  uint4 v;
  emu::read_shared(from, &v, 16);
  return v;
}

INLINE u32 load_acquire_device(const u32 *p) { return emu::poll(p); }
INLINE u32 load_acquire_system(const u32 *p) { return emu::poll(p); }
INLINE u32 load_relaxed(const u32 *p) {
  emu::check_global(p, 4, "a relaxed load");
  return *p;
}
INLINE float load_relaxed_float(const float *p) {
  float v;
  emu::read_global(p, &v, 4);
  return v;
}
INLINE void add_release_device(u32 *p, u32 value) { emu::exchange_add(p, value); }
INLINE u32 fetch_add_device(u32 *p, u32 value) { return emu::exchange_add(p, value); }
INLINE u32 draw(u32 *queue) { return emu::exchange_add(queue, 1); }
INLINE void store_release_system(u32 *p, u32 value) { emu::store_word(p, value); }
INLINE void fence_device() { emu::maybe_yield(8); }
INLINE void fence_system() { emu::maybe_yield(8); }
INLINE uint4 load_streaming(const void *p) {
  uint4 v;
  emu::read_global(p, &v, 16);
  return v;
}
INLINE void store_streaming(void *p, uint4 v) { emu::write_global(p, &v, 16); }
INLINE u64 nanoseconds() { return emu::now(); }
INLINE void pause(u32 nanoseconds) { (void)nanoseconds, emu::pause(); }
