// The final sum of a backward launch: gradients of x and of the router weights.

#pragma once

#include "moe/backward/record.cuh"
#include "moe/sums.cuh"
#include "ptx.cuh"

// One warp a token. d_x = bf16(shared + sum over k of the gradient of x of route k), k ascending.
static __device__ __forceinline__ void sum_gradients(const Rank &r, const Gradient &g, u32 token,
                                                     u32 lane) {
  if (token >= r.tokens) return;
  const int id = id_of(r, token, lane);
  const u32 used = __ballot_sync(~0u, id >= 0), at = token * r.slots + lane;
  const BackPeer &own = g.peers[r.rank];
  if (lane < r.slots) g.d_router[at] = id >= 0 ? load_relaxed_float(own.d_router + at) : 0.0f;
  sum_slots<false>(r, token, lane, used, 1.0f, own.d_x, g.shared_d_x, g.d_x);
}
