// Tiles of HIDDEN: after d_out w_down comes SwiGLU backward, 64 columns at a time, and the router
// gradient's sums over these 64 columns.
//
// g and u come by the ring of stages, d_gate and d_up take their place there. The code is a loop over 16
// columns in a loop over 64, and after each turn the accumulators move on to the registers that the code
// names. Written out it is 84 KB, which no instruction cache holds: then a tile's end takes 30 to 45 us
// instead of 14. The moves are 15 % of the loop.

#pragma once

#include "moe/backward/swiglu.cuh"
#include "moe/backward/tiles.cuh"
#include "moe/consumer.cuh"
#include "ptx.cuh"

// The weights of the two rows of which a lane has elements.
struct RowWeights {
  float above, below;
};
static __device__ __forceinline__ RowWeights row_weights_of(const Gradient &g, const Consumer &c,
                                                            const BackTask &task, bool idle) {
  if (idle || is_shared(task.kind)) return {1.0f, 1.0f};
  const float *w = g.row_weights + place_of(g, task) * BLOCK + row_in_block(c) + c.lane / 4;
  return {load_relaxed_float(w), load_relaxed_float(w + 8)};
}

// Lanes of a row, pairwise: xor 1 before xor 2.
static __device__ __forceinline__ float sum_lanes(float sum, u32 lane) {
  sum = __fadd_rn(sum, __shfl_sync(~0u, sum, lane ^ 1));
  return __fadd_rn(sum, __shfl_sync(~0u, sum, lane ^ 2));
}

// Rows of padding give zeros, whatever g and u hold there.
struct Padding {
  bool any, above, below;  // in the warp; in the two rows of this lane
};
static __device__ __forceinline__ void clear_padding(u32 (&v)[4], const Padding &padding) {
  if (padding.above) v[0] = v[2] = 0;
  if (padding.below) v[1] = v[3] = 0;
}

// The accumulators of a warp from register `by` on, up to register `most`, become the first ones.
template <int BY, int MOST> static __device__ __forceinline__ void move_on(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i + BY < MOST; ++i) d[i] = d[i + BY];
}

// 16 columns: registers 0 .. 7 of d, with g at `gate`, which becomes d_gate, and u A_BYTES behind, which
// becomes d_up. sums: of the router gradient, for the two rows of this lane.
static __device__ __forceinline__ void swiglu_columns(const float (&d)[128], u32 gate, u32 weighted,
                                                      RowWeights w, float limit, const Padding &padding,
                                                      float (&sums)[2]) {
  u32 a[4], b[4], h[4];
  load_matrices(gate, a[0], a[1], a[2], a[3]);
  load_matrices(gate + A_BYTES, b[0], b[1], b[2], b[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float weight = i % 2 ? w.below : w.above;
    const SwigluGradient low =
        swiglu_backward(d[2 * i], low_bf16(a[i]), low_bf16(b[i]), weight, limit);
    const SwigluGradient high =
        swiglu_backward(d[2 * i + 1], high_bf16(a[i]), high_bf16(b[i]), weight, limit);
    sums[i % 2] = __fadd_rn(__fadd_rn(sums[i % 2], low.product), high.product);
    a[i] = pack_bf16(low.gate, high.gate);
    b[i] = pack_bf16(low.up, high.up);
    h[i] = pack_bf16(low.weighted, high.weighted);
  }
  if (padding.any) clear_padding(a, padding), clear_padding(b, padding), clear_padding(h, padding);
  __syncwarp();  // all lanes have what they read
  store_matrices(gate, a[0], a[1], a[2], a[3]);
  store_matrices(gate + A_BYTES, b[0], b[1], b[2], b[3]);
  store_matrices(weighted, h[0], h[1], h[2], h[3]);
}

// Piece q of 64 columns, whose sums are registers 0 .. 31. The stage holds g and u, then what leaves by
// the copy engine; it is let go one piece later, when that has been read.
static __device__ __forceinline__ void finish_hidden_piece(float (&d)[128], u32 q, const Rank &rank,
                                                           const Gradient &gradient, BackShared &s,
                                                           Consumer &c, u32 stages,
                                                           const BackTask &task, RowWeights w,
                                                           u32 &previous) {
  const float limit = reread(rank, s).limit;
  const u32 row = row_in_block(c), mine = c.lane / 4;
  const u32 gate = stages + c.stage.place * STAGE_BYTES + row * 128, weighted = c.staging + q % 2 * 2048;
  const Padding padding = {task.rows < row + 16, task.rows <= row + mine, task.rows <= row + mine + 8};
  float sums[2] = {0.0f, 0.0f};
  const u32 turn = (c.lane & 7) << 4, at = (c.lane & 15) * 128 + (c.lane >> 4) * 16;
  barrier_wait(shared_address(&s.full[c.stage.place]), c.stage.parity);
#pragma unroll 1
  for (u32 j = 0; j < 4; ++j) {
    const u32 place = (at + 32 * j) ^ turn;
    swiglu_columns(d, gate + place, weighted + place, w, limit, padding, sums);
    move_on<8, 32>(d);
  }
  const Rank &r = reread(rank, s);
  const Gradient &g = reread(gradient, s);
  const bool shared = is_shared(task.kind);
  const u32 place = place_of(g, task) * BLOCK + row, x = task.column * 256 + q * 64;
  if (!shared) {
    const u32 blocks = r.width / 64;
    float *to = g.partials + (u64)(place + mine) * blocks + task.column * 4 + q;
    const float above = sum_lanes(sums[0], c.lane), below = sum_lanes(sums[1], c.lane);
    if (c.lane % 4 == 0) to[0] = above, to[8 * (u64)blocks] = below;
  }
  proxy_fence_shared();
  __syncwarp();
  if (c.lane == 0) {
    tma_store_2d(shared ? &g.shared_d_gate_out : &g.d_gate_out, gate, x, place);
    tma_store_2d(shared ? &g.shared_d_up_out : &g.d_up_out, gate + A_BYTES, x, place);
    tma_store_2d(shared ? &g.shared_weighted_out : &g.weighted_out, weighted, x, place);
    tma_commit();
    if (q) {
      tma_wait_read<1>();
      barrier_arrive(shared_address(&s.empty[previous]));
    }
  }
  previous = c.stage.place;
  c.stage.advance();
  __syncwarp();
}

static __device__ __forceinline__ void finish_hidden(float (&d)[128], const Rank &r,
                                                     const Gradient &g, BackShared &s, Consumer &c,
                                                     u32 stages, const BackTask &task, RowWeights w) {
  const u32 pieces = pieces_of(width_of(reread(r, s), task.kind), task.column);
  u32 previous;
  if (c.lane == 0) tma_wait_read<0>();  // gradients of weights, of the tile before
  __syncwarp();
#pragma unroll 1
  for (u32 q = 0; q < pieces; ++q) {
    finish_hidden_piece(d, q, r, g, s, c, stages, task, w, previous);
    move_on<32, 128>(d);
  }
  if (c.lane == 0) {
    tma_wait_read<0>();
    barrier_arrive(shared_address(&s.empty[previous]));
  }
  __syncwarp();
}
// A half without rows lets g and u go as it let the operands go.
static __device__ __forceinline__ void skip_hidden(const Rank &r, Rings &s, Consumer &c,
                                                   const BackTask &task) {
  for (u32 q = 0; q < pieces_of(width_of(r, task.kind), task.column); ++q) {
    barrier_wait(shared_address(&s.full[c.stage.place]), c.stage.parity);
    __syncwarp();
    if (c.lane == 0) barrier_arrive(shared_address(&s.empty[c.stage.place]));
    c.stage.advance();
  }
}
