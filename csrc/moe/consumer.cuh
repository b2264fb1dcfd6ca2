// Consumers: two warpgroups with 64 rows each of a tile; wgmma, then what is to be done with the tile.
//
// A warp finishes its own 16 rows and goes on to its next tile. That a tile is done, the teller passes
// on, which waits for memory in its stead. What leaves by the copy engine, the warp itself must see
// written: it looks some steps into its next tile, when that has long happened; if there is no next tile
// yet, it waits at once, since that tile may depend on this one.

#pragma once

#include "moe/log.cuh"
#include "moe/pipeline.cuh"
#include "moe/swiglu.cuh"
#include "moe/waits.cuh"

#define LATE 4  // steps of K into the next tile

struct Consumer {
  Position<STAGES> stage;
  Position<TASKS> task;
  u32 warp, lane;     // warp of the warpgroup 0 .. 3
  u32 half;           // which 64 rows: 0 or 1
  u32 staging;        // shared memory of this warp
  u32 unseen;         // barrier to arrive at when all stores have been seen written, 0: none
};

static __device__ __forceinline__ u32 row_in_block(const Consumer &c) { return c.half * 64 + c.warp * 16; }

// All that this warp gave to the copy engine is written, and its part of that tile is done.
static __device__ __forceinline__ void see_stores(Consumer &c) {
  if (c.lane == 0 && c.unseen) {
    tma_wait<0>();
    proxy_fence();
    barrier_arrive(c.unseen);
  }
  c.unseen = 0;
  __syncwarp();
}
static __device__ __forceinline__ void see_stores_if_idle(Consumer &c, u32 barrier, u32 parity) {
  if (c.unseen && !__shfl_sync(~0u, (u32)barrier_test(barrier, parity), 0)) see_stores(c);
}

static __device__ __forceinline__ void multiply_stage(float (&d)[128], u32 stage, u32 half, int first) {
  const u64 a = operand(stage + half * A_HALF), b = operand(stage + A_BYTES);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_64x256x16(d, a + 2 * k, b + 2 * k, k != 0 || !first);
  wgmma_commit();
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
// d = A B^T over all of K, at least one step; an idle half only lets the stages go. MULTIPLY: one stage,
// as multiply_stage. first 0: adds to d. meanwhile(): once, while the last products are at work.
template <void (*MULTIPLY)(float (&)[128], u32, u32, int), class F = Nothing>
static __device__ __forceinline__ void multiply(float (&d)[128], Rings &s, Consumer &c, u32 stages,
                                                u32 steps, bool idle, int first = 1,
                                                F meanwhile = F()) {
  see_stores_if_idle(c, shared_address(&s.full[c.stage.place]), c.stage.parity);
  barrier_wait(shared_address(&s.full[c.stage.place]), c.stage.parity);
  if (!idle) MULTIPLY(d, stages + c.stage.place * STAGE_BYTES, c.half, first);
  u32 previous = c.stage.place;
  c.stage.advance();
  for (u32 k = 1; k < steps; ++k) {
    barrier_wait(shared_address(&s.full[c.stage.place]), c.stage.parity);
    if (!idle) {
      MULTIPLY(d, stages + c.stage.place * STAGE_BYTES, c.half, 0);
      wgmma_wait<1>();
    } else {
      __syncwarp();  // else a lane might miss two rounds of a stage that lane 0 lets go
    }
    // a wait covers only the warp that waits: one arrival each
    if (c.lane == 0) barrier_arrive(shared_address(&s.empty[previous]));
    previous = c.stage.place;
    c.stage.advance();
    if (k == LATE && c.unseen) see_stores(c);
  }
  if (c.unseen) see_stores(c);
  meanwhile();
  wgmma_wait<0>();
  settle(d);
  if (c.lane == 0) barrier_arrive(shared_address(&s.empty[previous]));
}

// ---- gate and up --------------------------------------------------------------------------------

// 16 rows x 64 columns in pairs, through half `piece & 1` of the staging memory; store(from): the copy to
// global memory.
template <class F>
static __device__ __forceinline__ void send_piece(const Consumer &c, u32 piece, const u32 (&v)[16],
                                                  F store) {
  const u32 to = c.staging + (piece & 1) * 2048;
  if (c.lane == 0) tma_wait_read<1>();  // the group before the last one has left this half
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const u32 row = c.lane & 15, column = j * 16 + (c.lane >> 4) * 8;
    store_matrices(to + ((row * 128 + column * 2) ^ ((row & 7) << 4)), v[4 * j], v[4 * j + 1],
                   v[4 * j + 2], v[4 * j + 3]);
  }
  proxy_fence_shared();
  __syncwarp();
  if (c.lane == 0) {
    store(to);
    tma_commit();
  }
}

// value(i): the i-th register of a thread.
template <class F> static __device__ __forceinline__ void pack_piece(u32 (&v)[16], F value) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    v[i] = pack_bf16(value(2 * i), value(2 * i + 1));
    compute_now(v[i]);
  }
}
template <class F>
static __device__ __forceinline__ void store_piece(const Consumer &c, u32 piece, const void *map, u32 x,
                                                   u32 y, F value) {
  u32 v[16];
  pack_piece(v, value);
  send_piece(c, piece, v, [&](u32 from) { tma_store_2d(map, from, x, y); });
}

// Columns of gate are registers 0 .. 63, of up 64 .. 127: both of one element in one thread. What costs
// arithmetic comes between what only waits for the copy engine.
static __device__ __forceinline__ void finish_up(const float (&d)[128], const Rank &r, Consumer &c,
                                                 const Task &task) {
  const bool shared = task.kind == GROUP_SHARED_UP;
  const u32 place = shared ? task.block : task.block % r.ring_h;
  const u32 row = row_in_block(c), at = place * BLOCK + row, saved_at = task.block * BLOCK + row;
  const void *hidden = shared ? &r.shared_hidden_out : &r.hidden_out;
  const void *gate = shared ? &r.shared_saved_gate : &r.saved_gate;
  const void *up = shared ? &r.shared_saved_up : &r.saved_up;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const u32 x = task.column * 128 + q * 64;
    store_piece(c, q, hidden, x, at,
                [&](int i) { return swiglu(d[q * 32 + i], d[64 + q * 32 + i], r.limit); });
    if (!r.save) continue;
    store_piece(c, q + 1, gate, x, saved_at, [&](int i) { return d[q * 32 + i]; });
    store_piece(c, q, up, x, saved_at, [&](int i) { return d[64 + q * 32 + i]; });
  }
}

// ---- down ---------------------------------------------------------------------------------------

// The route of row `row` of the tile, 0 where there is none. Loaded before the products, since what
// result_of looks up with it can wait until the last of them are at work.
static __device__ __forceinline__ u32 route_of(const Rank &r, const Task &task, bool routed, u32 row) {
  return routed && row < task.rows ? r.routes[task.block * BLOCK + row] : 0;
}
// Where row `row` of the tile goes: the slot of its route in its owner's memory; null for padding.
static __device__ __forceinline__ u16 *result_of(const Rank &r, const Task &task, u32 row, u32 route) {
  if (row >= task.rows) return nullptr;
  if (task.kind == GROUP_SHARED_DOWN)
    return r.shared_y + (u64)(task.block * BLOCK + row) * r.hidden_size;
  if (r.ranks > 1 && load_relaxed(r.counters + COUNT_FAILED)) return nullptr;  // peers may be gone
  return r.peers[route >> ROUTE_BITS].y + (u64)(route & ((1u << ROUTE_BITS) - 1)) * r.hidden_size;
}

// 16 rows x 256 columns, a half at a time: registers, shared memory, then whole lines to each slot.
// target: in lane i, where row i goes.
static __device__ __forceinline__ void finish_down(const float (&d)[128], const Rank &r, Consumer &c,
                                                   const Task &task, u64 target) {
  const u32 chunk = c.lane & 15, above = c.lane >> 4;
  const u32 column = task.column * 256 + chunk * 8;
  if (c.lane == 0) tma_wait_read<0>();
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = half * 64 + j * 8;
      const u32 row = c.lane & 15, place = j * 2 + above;
      store_matrices(c.staging + row * 256 + (place ^ (row & 7)) * 16, pack_bf16(d[i], d[i + 1]),
                     pack_bf16(d[i + 2], d[i + 3]), pack_bf16(d[i + 4], d[i + 5]),
                     pack_bf16(d[i + 6], d[i + 7]));
    }
    __syncwarp();
    const bool inside = column + half * 128 < r.hidden_size;
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const u32 row = pair * 2 + above;
      const u64 to = __shfl_sync(~0u, target, row);
      const uint4 v = load_shared(c.staging + row * 256 + (chunk ^ (row & 7)) * 16);
      if (to && inside) store_streaming((u16 *)to + column + half * 128, v);
    }
    __syncwarp();
  }
}

// -------------------------------------------------------------------------------------------------

template <class S> static __device__ __forceinline__ typename S::Task next_task(S &s, Consumer &c) {
  const u32 barrier = shared_address(&s.announced[c.task.place]);
  see_stores_if_idle(c, barrier, c.task.parity);
  barrier_wait(barrier, c.task.parity);
  const typename S::Task task = s.tasks[c.task.place];
  __syncwarp();
  if (c.lane == 0) barrier_arrive(shared_address(&s.taken[c.task.place]));
  return task;
}
