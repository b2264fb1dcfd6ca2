// The final sum: out = bf16(shared + sum over k of w_k y_k), k ascending, multiply and add rounded
// separately, in fp32. One warp a token. An unused slot adds nothing, not even a zero.

#pragma once

#include "moe/pipeline.cuh"

#define SLOTS_AT_ONCE 4
#define PIECES 4  // of 32 x 16 bytes of a row; 16 loads of a lane before the first is used

static __device__ __forceinline__ void widen(float (&sum)[8], uint4 v) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[2 * i] = low_bf16(pairs[i]), sum[2 * i + 1] = high_bf16(pairs[i]);
}

template <bool WEIGHTED>
static __device__ __forceinline__ void add_row(float (&sum)[8], uint4 v, float w) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = low_bf16(pairs[i]), high = high_bf16(pairs[i]);
    sum[2 * i] = __fadd_rn(sum[2 * i], WEIGHTED ? __fmul_rn(w, low) : low);
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], WEIGHTED ? __fmul_rn(w, high) : high);
  }
}

// The expert id of lane `lane`'s slot of a token; negative: unused.
static __device__ __forceinline__ int id_of(const Rank &r, u32 token, u32 lane) {
  const u32 parity = r.counters[COUNT_SCHEDULE] & 1, first = token * r.slots;
  const u32 *ids = r.peers[r.rank].ids + (u64)parity * (1 + (u64)r.max_tokens * r.slots) + 1 + first;
  return lane < r.slots ? (int)ids[lane] : -1;
}

// out[token] from rows [tokens * slots, H] and shared [tokens, H] or null. In lane k: slot k's weight, if
// WEIGHTED; used: a bit for each slot that is. Loads nothing conditionally: what is beyond the row, or
// unused, is another place of the same row or the next slot's, and is not added.
template <bool WEIGHTED>
static __device__ __forceinline__ void sum_slots(const Rank &r, u32 token, u32 lane, u32 used,
                                                 float weight, const u16 *rows, const u16 *shared_rows,
                                                 u16 *out_rows) {
  const u32 vectors = r.hidden_size / 8, last = vectors - 1;
  const uint4 *y = (const uint4 *)rows + (u64)token * r.slots * vectors;
#pragma unroll 1
  for (u32 start = 0; start < vectors; start += 32 * PIECES) {
    u32 at[PIECES];
    float sum[PIECES][8] = {};
#pragma unroll
    for (u32 p = 0; p < PIECES; ++p) at[p] = min(start + 32 * p + lane, last);
    if (shared_rows) {
      const uint4 *shared = (const uint4 *)shared_rows + (u64)token * vectors;
#pragma unroll
      for (u32 p = 0; p < PIECES; ++p) widen(sum[p], load_streaming(shared + at[p]));
    }
#pragma unroll 1
    for (u32 base = 0; base < r.slots; base += SLOTS_AT_ONCE) {
      uint4 v[SLOTS_AT_ONCE][PIECES];
#pragma unroll
      for (u32 k = 0; k < SLOTS_AT_ONCE; ++k) {
        const uint4 *row = y + (u64)min(base + k, r.slots - 1) * vectors;
#pragma unroll
        for (u32 p = 0; p < PIECES; ++p) v[k][p] = load_streaming(row + at[p]);
      }
#pragma unroll
      for (u32 k = 0; k < SLOTS_AT_ONCE; ++k) {
        const float w = WEIGHTED ? __shfl_sync(~0u, weight, base + k) : 1.0f;
        if (used >> (base + k) & 1) {
#pragma unroll
          for (u32 p = 0; p < PIECES; ++p) add_row<WEIGHTED>(sum[p], v[k][p], w);
        }
      }
    }
    uint4 *out = (uint4 *)out_rows + (u64)token * vectors;
#pragma unroll
    for (u32 p = 0; p < PIECES; ++p)
      if (start + 32 * p + lane < vectors)
        store_streaming(out + at[p],
                        make_uint4(pack_bf16(sum[p][0], sum[p][1]), pack_bf16(sum[p][2], sum[p][3]),
                                   pack_bf16(sum[p][4], sum[p][5]), pack_bf16(sum[p][6], sum[p][7])));
  }
}

static __device__ __forceinline__ void sum_token(const Rank &r, u32 token, u32 lane) {
  if (token >= r.tokens) return;
  const float weight = lane < r.slots ? r.router[token * r.slots + lane] : 0.0f;
  const u32 used = __ballot_sync(~0u, id_of(r, token, lane) >= 0);
  sum_slots<true>(r, token, lane, used, weight, r.peers[r.rank].y, r.shared_y, r.out);
}
