// Tiles of INPUT: where rows of d_x go, and the router gradient of a row from its sums.

#pragma once

#include "moe/backward/tiles.cuh"
#include "moe/consumer.cuh"
#include "ptx.cuh"

// The router gradient of a row: its sums over 64 columns, ascending from zero.
static __device__ __forceinline__ float router_gradient(const Rank &r, const Gradient &g, u32 at) {
  const u32 blocks = r.width / 64;
  const float *from = g.partials + (u64)at * blocks;
  float sum = 0.0f;
  for (u32 first = 0; first < blocks; first += 8) {
    float v[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[i] = load_relaxed_float(from + min(first + i, blocks - 1));
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
      if (first + i < blocks) sum = __fadd_rn(sum, v[i]);
  }
  return sum;
}

// Where row `row` of the tile goes: the slot of its route in its owner's memory; null for padding. With
// the first column tile goes the route's router gradient.
static __device__ __forceinline__ u16 *input_result_of(const Rank &r, const Gradient &g,
                                                       const BackTask &task, u32 row, u32 route) {
  if (row >= task.rows) return nullptr;
  if (is_shared(task.kind)) return g.shared_d_x + (u64)(task.block * BLOCK + row) * r.hidden_size;
  if (r.ranks > 1 && load_relaxed(r.counters + COUNT_FAILED)) return nullptr;  // peers may be gone
  const BackPeer &owner = g.peers[route >> ROUTE_BITS];
  const u32 slot = route & ((1u << ROUTE_BITS) - 1);
  if (task.column == 0) owner.d_router[slot] = router_gradient(r, g, place_of(g, task) * BLOCK + row);
  return owner.d_x + (u64)slot * r.hidden_size;
}
