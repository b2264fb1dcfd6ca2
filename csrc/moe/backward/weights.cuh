// Tiles of WEIGHTS: sums over rows, into bf16 gradients, into fp32 ones, which are written or added to, or
// into scratch when more rows of the expert come later.

#pragma once

#include "moe/backward/tiles.cuh"
#include "moe/consumer.cuh"
#include "ptx.cuh"

#define PAIRS 16  // of fp32, that a lane reads before the first is used

// Sums of a tile by register, so that they come back to the thread that left them.
static __device__ __forceinline__ uint4 *scratch_of(const Gradient &g, const Consumer &c, u32 tile) {
  return (uint4 *)g.scratch + (u64)tile * 32 * 256 + c.half * 128 + c.warp * 32 + c.lane;
}
static __device__ __forceinline__ void load_sums(float (&d)[128], const uint4 *from) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const uint4 v = load_streaming(from + i * 256);
    d[4 * i] = __uint_as_float(v.x), d[4 * i + 1] = __uint_as_float(v.y);
    d[4 * i + 2] = __uint_as_float(v.z), d[4 * i + 3] = __uint_as_float(v.w);
  }
}
static __device__ __forceinline__ void store_sums(const float (&d)[128], uint4 *to) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    uint4 v = make_uint4(__float_as_uint(d[4 * i]), __float_as_uint(d[4 * i + 1]),
                         __float_as_uint(d[4 * i + 2]), __float_as_uint(d[4 * i + 3]));
    store_streaming(to + i * 256, v);
  }
}

static __device__ __forceinline__ const void *gradient_map(const Gradient &g, bool shared, u32 of) {
  if (of == WANT_DOWN) return shared ? &g.shared_w_down_out : &g.w_down_out;
  if (of == WANT_GATE) return shared ? &g.shared_w_gate_out : &g.w_gate_out;
  return shared ? &g.shared_w_up_out : &g.w_up_out;
}
static __device__ __forceinline__ float *main_gradient(const Gradient &g, bool shared, u32 of) {
  if (of == WANT_DOWN) return shared ? g.shared_main_down : g.main_down;
  if (of == WANT_GATE) return shared ? g.shared_main_gate : g.main_gate;
  return shared ? g.shared_main_up : g.main_up;
}
// Whether that is this call's own, where nothing has been written yet.
static __device__ __forceinline__ bool is_fresh(const Gradient &g, bool shared, u32 of) {
  return (shared ? g.fresh >> 3 : g.fresh) & of;
}

// value(q, i): register i of 64 columns of a thread. Always four pieces, so that the next tile begins with
// the first half of the staging memory again.
template <class F>
static __device__ __forceinline__ void store_gradient(const Gradient &g, const Consumer &c,
                                                      const BackTask &task, const WeightTile &t, F value) {
  const void *map = gradient_map(g, is_shared(task.kind), t.of);
  const int y = t.row + row_in_block(c), z = task.expert;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    u32 v[16];
    pack_piece(v, [&](int i) { return value(q, i); });
    const int x = t.column + q * 64;
    send_piece(c, q, v, [&](u32 from) { tma_store_3d(map, from, x, y, z); });
  }
}

// 16 rows x 256 columns in fp32, 64 columns at a time through the staging memory, so that a warp reads and
// writes whole lines of two rows at once: pairs as they lie in registers are eight lines an access, and
// twice the time for a tile's end. to: the first row; aligned to 16 bytes. Sums are added to what is
// there, or to zero, which makes 0 of -0.
static __device__ __forceinline__ u32 add_bits(u32 a, u32 b) {
  return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
}
template <bool ADD>
static __device__ __forceinline__ void send_sums(const float (&d)[128], const Consumer &c, float *to,
                                                 u32 width, u32 inside) {
  const u32 chunk = c.lane & 15, above = c.lane >> 4, mine = c.lane / 4;
  float *const at = to + (u64)above * width + chunk * 4;
  if (c.lane == 0) tma_wait_read<0>();  // gradients in bf16, of the tile before
  __syncwarp();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    if ((u32)q * 64 >= inside) break;  // columns go 64 at a time
    uint4 old[8] = {};
    if (ADD) {
#pragma unroll
      for (int i = 0; i < 8; ++i) old[i] = *(const uint4 *)(at + (u64)(2 * i) * width + q * 64);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const u32 row = mine + i % 2 * 8, place = i / 2 * 2 + (c.lane & 3) / 2;
      store_shared_pair(c.staging + row * 256 + (place ^ (row & 7) * 2) * 16 + (c.lane & 1) * 8,
                        d[32 * q + 2 * i], d[32 * q + 2 * i + 1]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 row = 2 * i + above;
      const uint4 v = load_shared(c.staging + row * 256 + (chunk ^ (row & 7) * 2) * 16);
      *(uint4 *)(at + (u64)(2 * i) * width + q * 64) =
          make_uint4(add_bits(old[i].x, v.x), add_bits(old[i].y, v.y), add_bits(old[i].z, v.z),
                     add_bits(old[i].w, v.w));
    }
    __syncwarp();
  }
}
// The same where a caller's memory is not aligned so.
static __device__ __forceinline__ void add_unaligned(const float (&d)[128], const Consumer &c, float *to,
                                                     u32 width, u32 inside) {
  to += (u64)(c.lane / 4) * width + c.lane % 4 * 2;
#pragma unroll
  for (int first = 0; first < 128; first += 2 * PAIRS) {
    float v[2 * PAIRS];
    if ((u32)first * 2 >= inside) break;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i)
      v[i] = to[(first + i) / 4 * 8 + i % 2 + (u64)((first + i) / 2 % 2 * 8) * width];
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i)
      to[(first + i) / 4 * 8 + i % 2 + (u64)((first + i) / 2 % 2 * 8) * width] =
          __fadd_rn(v[i], d[first + i]);
  }
}
static __device__ __forceinline__ void write_zeros(const Consumer &c, float *to, u32 width, u32 inside) {
  const u32 chunk = c.lane & 15, above = c.lane >> 4;
  for (u32 first = 0; first < inside; first += 64)
#pragma unroll
    for (u32 row = 0; row < 16; row += 2)
      *(uint4 *)(to + (u64)(row + above) * width + first + chunk * 4) = make_uint4(0, 0, 0, 0);
}
// Where the first sum of a warp's rows lies in an fp32 gradient.
static __device__ __forceinline__ float *place_in(float *main, const Consumer &c,
                                                  const BackTask &task, const WeightTile &t) {
  const u64 row = (u64)task.expert * t.height + t.row + row_in_block(c);
  return main + row * t.width + t.column;
}

// No counter waits for what this writes.
static __device__ __forceinline__ void finish_weights(const float (&d)[128], const Gradient &g,
                                                      const Consumer &c, const BackTask &task,
                                                      const WeightTile &t) {
  float *main = main_gradient(g, is_shared(task.kind), t.of);
  if (!main) {
    store_gradient(g, c, task, t, [&](int q, int i) { return d[q * 32 + i]; });
    return;
  }
  float *to = place_in(main, c, task, t);
  const u32 inside = t.width - t.column;
  if (is_fresh(g, is_shared(task.kind), t.of)) send_sums<false>(d, c, to, t.width, inside);
  else if ((u64)to % 16) add_unaligned(d, c, to, t.width, inside);
  else send_sums<true>(d, c, to, t.width, inside);
}
// Of an expert without rows: zeros, but nothing is added.
static __device__ __forceinline__ void finish_no_rows(const Gradient &g, const Consumer &c,
                                                      const BackTask &task, const WeightTile &t) {
  float *main = main_gradient(g, is_shared(task.kind), t.of);
  if (!main) {
    store_gradient(g, c, task, t, [](int, int) { return 0.0f; });
  } else if (is_fresh(g, is_shared(task.kind), t.of)) {
    write_zeros(c, place_in(main, c, task, t), t.width, min(256u, t.width - t.column));
  }
}
