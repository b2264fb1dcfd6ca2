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

// Two neighbours in fp32, by one access if they are aligned.
template <bool ALIGNED> static __device__ __forceinline__ u64 load_pair(const float *p) {
  if (ALIGNED) return *(const u64 *)p;
  return (u64)__float_as_uint(p[1]) << 32 | __float_as_uint(p[0]);
}
template <bool ALIGNED>
static __device__ __forceinline__ void store_pair(float *p, float low, float high) {
  if (ALIGNED) *(u64 *)p = (u64)__float_as_uint(high) << 32 | __float_as_uint(low);
  else p[0] = low, p[1] = high;
}
template <bool ALIGNED>
static __device__ __forceinline__ void add_gradient(const float (&d)[128], float *to, u32 width,
                                                    u32 inside) {
#pragma unroll
  for (int first = 0; first < 64; first += PAIRS) {
    u64 v[PAIRS];
    if ((u32)first * 4 >= inside) break;  // columns go 64 at a time
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = first + i;
      v[i] = load_pair<ALIGNED>(to + pair / 2 * 8 + (u64)(pair % 2 * 8) * width);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = first + i;
      store_pair<ALIGNED>(to + pair / 2 * 8 + (u64)(pair % 2 * 8) * width,
                          __fadd_rn(__uint_as_float((u32)v[i]), d[2 * pair]),
                          __fadd_rn(__uint_as_float((u32)(v[i] >> 32)), d[2 * pair + 1]));
    }
  }
}
// value(i): register i. Of no memory but with the bits of a sum with zeros there: -0 becomes 0.
template <class F>
static __device__ __forceinline__ void write_gradient(float *to, u32 width, u32 inside, F value) {
#pragma unroll
  for (int first = 0; first < 64; first += 16) {
    if ((u32)first * 4 >= inside) break;
#pragma unroll
    for (int pair = first; pair < first + 16; ++pair)
      store_pair<true>(to + pair / 2 * 8 + (u64)(pair % 2 * 8) * width,
                       __fadd_rn(0.0f, value(2 * pair)), __fadd_rn(0.0f, value(2 * pair + 1)));
  }
}
// Where a thread's first sum of a tile lies in an fp32 gradient.
static __device__ __forceinline__ float *place_in(float *main, const Consumer &c,
                                                  const BackTask &task, const WeightTile &t) {
  const u64 row = (u64)task.expert * t.height + t.row + row_in_block(c) + c.lane / 4;
  return main + row * t.width + t.column + c.lane % 4 * 2;
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
  if (is_fresh(g, is_shared(task.kind), t.of))
    write_gradient(to, t.width, inside, [&](int i) { return d[i]; });
  else if ((u64)to % 8) add_gradient<false>(d, to, t.width, inside);
  else add_gradient<true>(d, to, t.width, inside);
}
// Of an expert without rows: zeros, but nothing is added.
static __device__ __forceinline__ void finish_no_rows(const Gradient &g, const Consumer &c,
                                                      const BackTask &task, const WeightTile &t) {
  float *main = main_gradient(g, is_shared(task.kind), t.of);
  if (!main) {
    store_gradient(g, c, task, t, [](int, int) { return 0.0f; });
  } else if (is_fresh(g, is_shared(task.kind), t.of)) {
    write_gradient(place_in(main, c, task, t), t.width, t.width - t.column,
                   [](int) { return 0.0f; });
  }
}
